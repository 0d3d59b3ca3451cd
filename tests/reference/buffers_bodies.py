"""Rank bodies of test_buffers.py."""

import warnings
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from reference.data_parallel import DistributedDataParallel

TorchDDP = nn.parallel.DistributedDataParallel


def buffers_after_forward(rank: int, _world_size: int, wrapper: str) -> list[list[Tensor]]:
    """Running means of a batch norm, after each of four forward passes, the third under no_sync."""
    torch.manual_seed(0)
    ddp = {"ours": DistributedDataParallel, "torch": TorchDDP}[wrapper](nn.BatchNorm1d(2))
    seen = []
    for number in range(4):
        with ddp.no_sync() if number == 2 else nullcontext():
            ddp(torch.full((4, 2), float(rank + number)) + torch.eye(4)[:, :2]).sum().backward()
        seen.append([buffer.clone() for buffer in ddp.module.buffers()])
    return seen


def backward_after_the_next_forward(rank: int, _world_size: int) -> bool:
    """The graph saves a buffer, and the next forward pass overwrites that buffer with rank 0's."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * self.scale * x

    ddp = DistributedDataParallel(Scaled())
    first = ddp(torch.ones(1))
    second = ddp(torch.ones(1))
    (first + second).sum().backward()
    return ddp.module.weight.grad.item() == 2


def local_buffers(rank: int, _world_size: int) -> bool:
    module = nn.Linear(1, 1)
    module.register_buffer("own", torch.full((1 + rank,), float(rank)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(module, broadcast_buffers=False)
    ddp(torch.ones(1, 1)).sum().backward()
    return bool((module.own == rank).all())
