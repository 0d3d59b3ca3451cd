"""Tutorial 6's ranks: what comm hooks send, what that loses, and what training makes of it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference.comm_hooks.compress import bf16_compress, fp16_compress
from reference.comm_hooks.interface import Hook
from reference.comm_hooks.powersgd import PowerSGDState, power_sgd
from reference.data_parallel import DistributedDataParallel
from reference.parameters import size_bytes

from .averaging import gradient
from .counting import all_reduces

FULL_PRECISION = 2
"""Iterations at the start that PowerSGD does not compress."""
SIDE = 64
INPUTS, WIDTH, CLASSES, BATCH = 32, 128, 10, 64
Registered = tuple[Any, Hook] | None


def _power_sgd(rank: int, *, feedback: bool) -> Registered:
    state = PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=FULL_PRECISION, use_error_feedback=feedback
    )
    return state, power_sgd


HOOKS: dict[str, Callable[[], Registered]] = {
    "none": lambda: None,
    "fp16": lambda: (None, fp16_compress),
    "bf16": lambda: (None, bf16_compress),
    "PowerSGD rank 1": lambda: _power_sgd(1, feedback=True),
    "PowerSGD rank 4": lambda: _power_sgd(4, feedback=True),
    "PowerSGD rank 1, no feedback": lambda: _power_sgd(1, feedback=False),
}


class Given(nn.Module):
    """One parameter whose gradient is whatever forward is given."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: Tensor) -> Tensor:
        """A loss with that gradient."""
        return (self.weight * gradient).sum()


def averages(_rank: int, _world_size: int, hook: str, gradients: Sequence[float]) -> Tensor:
    """What the ranks make of gradients that are the same on all of them."""
    model = Given(len(gradients))
    ddp = _wrapped(model, HOOKS[hook]())
    ddp(torch.tensor(gradients)).backward()
    return gradient(model.weight)


def distances_of_sums(_rank: int, _world_size: int, hook: str, iterations: int) -> list[float]:
    """The same random matrix as gradient in every iteration; how far the mean of what arrives is from it.

    Returns:
        After each iteration that compresses, the distance over the matrix's own norm.
    """
    torch.manual_seed(0)
    matrix = torch.randn(SIDE, SIDE)
    model = Given(SIDE, SIDE)
    ddp = _wrapped(model, HOOKS[hook]())
    arrived, distances = torch.zeros(SIDE, SIDE), []
    for iteration in range(FULL_PRECISION + iterations):
        model.weight.grad = None
        ddp(matrix).backward()
        if (count := iteration + 1 - FULL_PRECISION) > 0:
            arrived += gradient(model.weight)
            distances.append(((arrived / count - matrix).norm() / matrix.norm()).item())
    return distances


def elements_sent(_rank: int, _world_size: int, rows: int, columns: int, approximation_rank: int) -> tuple[int, int]:
    """Elements of a matrix that are sent before PowerSGD begins to compress, and in an iteration after that."""
    model = Given(rows, columns)
    ddp = _wrapped(model, _power_sgd(approximation_rank, feedback=True))
    by_iteration = []
    for _ in range(FULL_PRECISION + 1):
        with all_reduces() as sent:
            ddp(torch.ones(rows, columns)).backward()
        by_iteration.append(sum(sent) // model.weight.element_size())
    return by_iteration[0], by_iteration[-1]


def train(rank: int, world_size: int, hook: str, steps: int) -> tuple[list[float], float]:
    """Learn to tell which of ten random directions an input is closest to.

    Returns:
        The loss of each step, averaged over the ranks; what part of the gradients' bytes was sent.
    """
    torch.manual_seed(0)
    teacher = torch.randn(INPUTS, CLASSES)
    model = nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
    )
    ddp = _wrapped(model, HOOKS[hook]())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    inputs_of_rank = torch.Generator().manual_seed(100 + rank)
    losses = []
    with all_reduces() as sent:
        for _ in range(steps):
            inputs = torch.randn(BATCH, INPUTS, generator=inputs_of_rank)
            loss = nn.functional.cross_entropy(ddp(inputs), (inputs @ teacher).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return (mean / world_size).tolist(), sum(sent) / (steps * sum(map(size_bytes, model.parameters())))


def _wrapped(model: nn.Module, registered: Registered) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model)
    if registered is not None:
        ddp.register_comm_hook(*registered)
    return ddp
