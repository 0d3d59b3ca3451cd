"""Compression to half precision, of any comm hook: half the bytes, and the gradients are rounded."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from .allreduce import allreduce
from .interface import Hook, only_tensor


def compress(dtype: torch.dtype) -> Callable[[Hook], Hook]:
    """Have a hook work on gradients that were cast to `dtype`; what it returns is cast back.

    `compress(torch.float16)(hook)` is a hook with the state of `hook`, and runs wherever that runs. Buckets whose
    gradients are not real numbers raise TypeError.
    """

    def wrapper(hook: Hook) -> Hook:
        @wraps(hook)
        def compressed(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
            buffer = bucket.buffer()
            if not buffer.is_floating_point():
                raise TypeError(f"compress({dtype}): expected real gradients, got {buffer.dtype}")
            bucket.set_buffer(buffer.to(dtype))
            return hook(state, bucket).then(lambda future: buffer.copy_(only_tensor(future)))

        return compressed

    return wrapper


def fp16_compress(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average in float16: 5 bits of exponent, 11 of precision."""
    return compress(torch.float16)(allreduce)(state, bucket)


def bf16_compress(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average in bfloat16: float32's 8 bits of exponent, 8 of precision."""
    return compress(torch.bfloat16)(allreduce)(state, bucket)
