"""Tutorial 5: the code that is broken there, and what a loss curve and a simple test show."""

import inspect

import torch
import torch.distributed as dist
from torch import nn

from ddplab.reference import minimal
from ddplab.simulator import plot_colours

from .averaging import gradient
from .own_code import folder, read

INPUTS, WIDTH, CLASSES, BATCH = 16, 64, 10, 32
COLOURS = (plot_colours.QUIET, *plot_colours.LINES)
"""Of the loss curves, that without a fault first."""
CAP_MB = 0.002
"""Bucket cap that gives the classifier four buckets."""


def source() -> str:
    """Return the code of `ddplab.reference.minimal` as a module that can be imported from another folder."""
    return inspect.getsource(minimal).replace("from .", "from ddplab.reference.")


def plant_sixth() -> str:
    """Write a class whose fault the learner has to find; returns its name."""
    (folder() / "sixth.py").write_text(source().replace(".copy_(average", ".add_(average"))
    return "sixth:OverlappedDataParallel"


def one_gradient(rank: int, _world_size: int, name: str) -> tuple[float, float, float]:
    """The rank's own gradient of one weight, the average of all ranks, and what the class `module:name` leaves."""
    inputs = torch.tensor([[9.0, 12.0, 18.0][rank]])
    average = inputs.clone()
    dist.all_reduce(average)
    module = nn.Linear(1, 1, bias=False)
    read(name)(module)(inputs).sum().backward()
    return inputs.item(), average.item() / 3, gradient(module.weight).item()


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
    """A typical small test: one layer, one iteration, one seed; are the gradients close to the averages?"""
    torch.manual_seed(0)
    alone = nn.Linear(INPUTS, CLASSES)
    torch.manual_seed(0)
    ddp = read(name)(nn.Linear(INPUTS, CLASSES))
    inputs = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(rank))
    for module in (alone, ddp):
        module(inputs).square().mean().backward()
    dist.barrier()
    expected = [gradient(parameter) for parameter in alone.parameters()]
    for one in expected:
        dist.all_reduce(one)
    return all(
        torch.allclose(gradient(parameter), one / world_size, rtol=1e-4, atol=1e-6)
        for parameter, one in zip(ddp.parameters(), expected, strict=True)
    )
