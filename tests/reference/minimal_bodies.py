"""Rank bodies of test_minimal.py: training with the classes of `reference.minimal`."""

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from reference import minimal
from reference.bucketing import MIB

TERMS = 6


class Terms(nn.Module):
    """The sum of squares of some of its parameters; parameter i has 2**i elements, so buckets have unequal sizes."""

    def __init__(self, start):
        super().__init__()
        self.weights = nn.ParameterList(
            torch.full((2**i,), float(start + i), dtype=torch.float64) for i in range(TERMS)
        )

    def forward(self, order, factor):
        """Autograd reaches the last term first, so gradients become ready in reverse `order`."""
        total = torch.zeros((), dtype=torch.float64)
        for index in order:
            total = total + factor * self.weights[index].square().sum()
        return total


def train(rank, world_size, name, cap_bytes, orders, steps):
    """Weights after some steps; by step, the number of elements of each all-reduce, in launch order."""
    make = getattr(minimal, name)
    caps = {"bucket_cap_mb": cap_bytes / MIB} if issubclass(make, minimal.BucketedDataParallel) else {}
    ddp = make(Terms(start=rank + 1), **caps)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    launched, all_reduce = [], dist.all_reduce
    with mock.patch.object(
        dist, "all_reduce", lambda flat, **kw: launched[-1].append(len(flat)) or all_reduce(flat, **kw)
    ):
        for _ in range(steps):
            launched.append([])
            optimizer.zero_grad()
            ddp(orders[rank], factor=rank + 1).backward()
            if name != "OverlappedDataParallel":
                ddp.average_gradients()
            optimizer.step()
        launched.append([])
        if name == "OverlappedDataParallel":
            ddp.average_gradients()  # finds nothing to do
    return [weight.detach() for weight in ddp.module.weights], launched
