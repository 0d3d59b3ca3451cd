"""Rank bodies of test_reducer.py: what a reducer launches, and in which buckets."""

from functools import partial

import torch
from torch import Tensor, nn

from ddplab.conformance.training_programs import Net, Program, loss_of
from reference.data_parallel import DistributedDataParallel
from reference.reducer_observer import Observer

from ..scenarios import mlp

TorchDDP = nn.parallel.DistributedDataParallel


class _Launches(Observer):
    def __init__(self) -> None:
        self.ready: list[int] = []
        self.launched: list[int] = []

    def bucket_ready(self, bucket: int) -> None:
        self.ready.append(bucket)

    def bucket_launched(self, bucket: int, future: torch.futures.Future) -> None:
        self.launched.append(bucket)


def watch_launches(rank: int, world_size: int, program: Program, plan: list[list[int]]) -> tuple[list, list]:
    """Order in which buckets became ready, and order in which they were launched."""
    ddp = DistributedDataParallel(Net(program, rank), plan=plan)
    ddp.reducer.observers.append(log := _Launches())
    loss_of(ddp, program, 0, rank, world_size).backward()
    return log.ready, log.launched


def watch_rebuild(rank: int, world_size: int, program: Program, cap_mb: float | None) -> list:
    """Bucket assignment during each step's backward pass."""
    ddp = DistributedDataParallel(Net(program, rank), bucket_cap_mb=cap_mb)
    layouts = []
    for number in range(len(program.steps)):
        loss = loss_of(ddp, program, number, rank, world_size)
        layouts.append(ddp.reducer.buckets.assignment)
        loss.backward()
    return layouts


def layouts_by_iteration(rank: int, _world_size: int, options: dict) -> tuple[list, list]:
    """Parameter indices by bucket in each iteration, and whether the buckets have been rebuilt."""
    both = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        ddp = wrapper(mlp((4, 4, 4, 4), torch.float32, 0), **options)
        index = {id(parameter): number for number, parameter in enumerate(ddp.module.parameters())}
        seen = []
        for _ in range(4):
            loss = ddp(torch.ones(1, 4)).sum()
            if wrapper is DistributedDataParallel:
                buckets = [list(indices) for indices in ddp.reducer.buckets.assignment]
            else:
                shadows = ddp.reducer._get_zeros_like_grad_buckets()
                buckets = [[index[id(parameter)] for parameter in bucket.parameters()] for bucket in shadows]
            loss.backward()
            seen.append((buckets, ddp._has_rebuilt_buckets))
        both.append(seen)
    return tuple(both)


def _double_gradient(of: nn.Parameter, _ready: Tensor) -> None:
    of.grad.mul_(2)


def gradients_changed_by_a_later_hook(rank: int, _world_size: int) -> tuple[list[float], list[float]]:
    """Averages of the last layer's gradient, which a hook of the first layer doubles later; ours, then torch's."""
    sent = []
    for wrap in (DistributedDataParallel, TorchDDP):
        module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        for parameter in module.parameters():
            nn.init.ones_(parameter)
        ddp = wrap(module)
        first, last = module.parameters()
        first.register_post_accumulate_grad_hook(partial(_double_gradient, last))
        ddp(torch.full((1, 1), float(rank + 1))).sum().backward()
        sent.append(last.grad.flatten().tolist())
    return tuple(sent)
