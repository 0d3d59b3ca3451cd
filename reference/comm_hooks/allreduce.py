"""The plainest comm hooks: an average by one all-reduce a bucket, and none at all."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from .interface import only_tensor


def allreduce(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What happens without a hook: average the bucket over the ranks of `state` (None: all)."""
    return average(bucket.buffer(), state)


def noop(_state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Leave this rank's gradients as they are: an iteration then shows what communication would cost."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def average(flat: Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[Tensor]:
    """Start to average `flat` over the ranks of `group`, in place; returns at once.

    Divided first, so that a sum of half precision numbers does not overflow where their average would not.
    """
    flat.div_(dist.get_world_size(group))
    adding_up: torch.futures.Future[Any] = dist.all_reduce(flat, group=group, async_op=True).get_future()
    return adding_up.then(only_tensor)
