"""Compression to half precision, around any comm hook: half the bytes, and rounded gradients."""

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
    """Make a wrapper that casts gradients to `dtype` before a hook runs, and casts the hook's result back.

    `compress(torch.float16)(hook)` is a hook that takes the same state as `hook`. It raises TypeError for gradients
    that are not real numbers.
    """
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"compress: expected a dtype, such as torch.float16, got {dtype!r}")

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
    """Average in float16, which has 5 bits of exponent and 11 of precision."""
    return compress(torch.float16)(allreduce)(state, bucket)


def bf16_compress(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average in bfloat16, which has 8 bits of exponent, as in float32, and 8 of precision."""
    return compress(torch.bfloat16)(allreduce)(state, bucket)
