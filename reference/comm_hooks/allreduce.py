"""The simplest comm hooks: average each bucket with one all-reduce, or leave it as it is."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from .interface import only_tensor


def allreduce(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the bucket over the ranks of `state` (None: all), as happens without a hook."""
    return average(bucket.buffer(), state)


def noop(_state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Leave this rank's gradients as they are, to measure an iteration without communication."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def average(flat: Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Start to average `flat` over the ranks of `group`, in place; returns a future of `flat` without waiting.

    Divides before adding: a sum of half-precision numbers can overflow although their average does not.
    """
    flat.div_(dist.get_world_size(group))
    summing: torch.futures.Future[Any] = dist.all_reduce(flat, group=group, async_op=True).get_future()
    return summing.then(only_tensor)
