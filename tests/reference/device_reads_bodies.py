"""Training on meta tensors, which have no numbers: what reads one on the host, and would wait for a GPU, raises.

The process group is as NCCL's: its futures are done as soon as a collective is enqueued.
"""

from contextlib import nullcontext
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddplab.reference.data_parallel import DistributedDataParallel

from ..hook_bodies import OURS, register

STEPS = 5
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "skip_all_reduce_unused_params": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "power, cold": {"warm_start": False, "batch_tensors_with_same_shape": True},
    "power, epsilon": {"orthogonalization_epsilon": 1e-8},
}
"""Options of further states of PowerSGD."""
HOOKS = ["none", *OURS, *VARIANTS]


def register_variant(ddp: nn.Module, hook: str, group: dist.ProcessGroup) -> None:
    """Register one of `HOOKS`, which averages over the ranks of the group."""
    if hook != "none":
        register(ddp, hook.partition(",")[0], group, **VARIANTS.get(hook, {}))


class Enqueued(dist.Work):
    """A collective that has been enqueued."""

    def __init__(self, value: list) -> None:
        super().__init__()
        self._future: torch.futures.Future = torch.futures.Future()
        self._future.set_result(value)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        return self._future


class EnqueuingGroup(dist.ProcessGroup):
    """A process group whose collectives change nothing, which meta tensors do not notice."""

    def __init__(self, _store: dist.Store, rank: int, world_size: int, _timeout: timedelta) -> None:
        super().__init__(rank, world_size)

    def allreduce(self, tensors: list[Tensor], *_options: Any) -> dist.Work:
        return Enqueued(tensors)

    def broadcast(self, tensors: list[Tensor], *_options: Any) -> dist.Work:
        return Enqueued(tensors)

    def allgather(self, outputs: list[list[Tensor]], _inputs: list[Tensor], *_options: Any) -> dist.Work:
        return Enqueued(outputs)


@cache
def enqueuing_group(world_size: int) -> dist.ProcessGroup:
    """Such a group of all ranks; there is one, because torch cannot destroy groups written in Python."""
    dist.Backend.register_backend("enqueuing", EnqueuingGroup, devices=["cpu"])
    return dist.new_group(list(range(world_size)), backend="enqueuing")


def train_on_meta(_rank: int, world_size: int, mode: str, hook: str) -> None:
    """Train with no_sync, buffers, and gradients that are sometimes kept and sometimes set to None."""
    group = enqueuing_group(world_size)
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 6)).to("meta")
    module.register_buffer("seen", torch.zeros(3, device="meta"))
    plan = [[4, 5], [0, 1, 2], [3]]  # the rebuild reads rank 0's ready order, once
    ddp = DistributedDataParallel(module, process_group=group, init_sync=False, plan=plan, **MODES[mode])
    register_variant(ddp, hook, group)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(STEPS):
        accumulates = step == 3 and mode in ("plain", "views")
        with ddp.no_sync() if accumulates else nullcontext():
            ddp(torch.ones(2, 6, device="meta")).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 2)
