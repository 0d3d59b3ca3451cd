"""Rank functions of tutorial 10: what a loss curve and a simple test show of a faulty data-parallel class."""

import torch
import torch.distributed as dist
from torch import nn

from .averaging import gradient
from .own_code import read

INPUTS, WIDTH, CLASSES, BATCH = 16, 64, 10, 32
CAP_MB = 0.002
"""Bucket cap that gives the classifier three buckets."""


def _classifier() -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )


def train(rank: int, world_size: int, name: str, steps: int) -> list[float]:
    """Train a classifier under the class `module:class`; each rank has its own batches and initial parameters.

    Returns:
        The loss of each step, averaged over the ranks.
    """
    teacher = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(rank)
    ddp = read(name)(_classifier(), bucket_cap_mb=CAP_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    batches = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(BATCH, INPUTS, generator=batches)
        loss = nn.functional.cross_entropy(ddp(inputs), (inputs @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    means: list[float] = (mean / world_size).tolist()
    return means


def passes_simple_test(rank: int, world_size: int, name: str) -> bool:
    """A test as one often finds it: one layer, one iteration, one seed; are the gradients close to the averages?"""
    torch.manual_seed(0)
    alone = nn.Linear(INPUTS, CLASSES)
    torch.manual_seed(0)
    ddp = read(name)(nn.Linear(INPUTS, CLASSES))
    inputs = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(rank))
    for module in (alone, ddp):
        module(inputs).square().mean().backward()
    dist.barrier()
    for own, averaged in zip(alone.parameters(), ddp.parameters(), strict=True):
        expected = gradient(own)
        dist.all_reduce(expected)
        if not torch.allclose(gradient(averaged), expected / world_size, rtol=1e-4, atol=1e-6):
            return False
    return True
