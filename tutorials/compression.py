"""Rank functions of tutorial 6: bytes that comm hooks send, their errors, and training with them."""

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
from .own_code import read

FULL_PRECISION = 2
"""Number of iterations that average in full precision before PowerSGD starts to compress."""
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


class GivenGradient(nn.Module):
    """A module with one parameter, whose gradient is the argument of `forward`."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, gradient: Tensor) -> Tensor:
        """Return a loss whose derivative is `gradient`."""
        return (self.weight * gradient).sum()


def averages(_rank: int, _world_size: int, hook: str, gradients: Sequence[float]) -> Tensor:
    """The average that a comm hook returns if the gradients are the same on all ranks."""
    model = GivenGradient(len(gradients))
    ddp = _wrapped(model, HOOKS[hook]())
    ddp(torch.tensor(gradients)).backward()
    return gradient(model.weight)


def errors_of_mean(_rank: int, _world_size: int, hook: str, iterations: int) -> list[float]:
    """Errors of the mean averaged gradient, if the gradient is the same random matrix in all iterations.

    Returns:
        After each compressed iteration, the distance from the mean to the matrix, divided by the norm of the matrix.
    """
    torch.manual_seed(0)
    matrix = torch.randn(SIDE, SIDE)
    model = GivenGradient(SIDE, SIDE)
    ddp = _wrapped(model, HOOKS[hook]())
    total, errors = torch.zeros(SIDE, SIDE), []
    for iteration in range(FULL_PRECISION + iterations):
        model.weight.grad = None
        ddp(matrix).backward()
        if (count := iteration + 1 - FULL_PRECISION) > 0:
            total += gradient(model.weight)
            errors.append(((total / count - matrix).norm() / matrix.norm()).item())
    return errors


def try_hook(rank: int, _world_size: int, name: str) -> tuple[Tensor, Tensor, Tensor, int, int]:
    """Average one bucket with the learner's hook `module:name` and with `fp16_compress`.

    Returns:
        This rank's gradients; both averages; bytes that the learner's hook sent; half of the gradients' bytes.
    """
    given = torch.tensor([1.0, 0.1, -3.0, 1e-3]) * (rank + 1)
    averaged, sent_bytes = [], []
    for hook in (read(name), fp16_compress):
        model = GivenGradient(len(given))
        ddp = _wrapped(model, (None, hook))
        with all_reduces() as sent:
            ddp(given).backward()
        averaged.append(gradient(model.weight))
        sent_bytes.append(sum(sent))
    return given, averaged[0], averaged[1], sent_bytes[0], size_bytes(model.weight) // 2


def elements_sent(_rank: int, _world_size: int, rows: int, columns: int, approximation_rank: int) -> tuple[int, int]:
    """Number of elements sent for a matrix in an uncompressed and in a compressed iteration of PowerSGD."""
    model = GivenGradient(rows, columns)
    ddp = _wrapped(model, _power_sgd(approximation_rank, feedback=True))
    by_iteration = []
    for _ in range(FULL_PRECISION + 1):
        with all_reduces() as sent:
            ddp(torch.ones(rows, columns)).backward()
        by_iteration.append(sum(sent) // model.weight.element_size())
    return by_iteration[0], by_iteration[-1]


def train(rank: int, world_size: int, hook: str, steps: int) -> tuple[list[float], float]:
    """Train a classifier of random inputs: which of ten random directions is closest.

    Returns:
        The loss of each step, averaged over the ranks; the fraction of the gradients' bytes that was sent.
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
