"""Tutorial 6: bytes that comm hooks send, their errors, training with them, and pictures of all three."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from numpy.typing import NDArray
from torch import Tensor, nn

from ddplab import DistributedDataParallel, PowerSGDState, power_sgd
from ddplab.reference.comm_hooks.compress import bf16_compress, fp16_compress
from ddplab.reference.comm_hooks.interface import Hook
from ddplab.simulator import plot_colours

from .averaging import gradient
from .counting import all_reduces
from .own_code import read
from .plots import mark_guess, new_axes

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
    return given, averaged[0], averaged[1], sent_bytes[0], model.weight.nbytes // 2


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
    return (mean / world_size).tolist(), sum(sent) / (steps * sum(one.nbytes for one in model.parameters()))


def _wrapped(model: nn.Module, registered: Registered) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model)
    if registered is not None:
        ddp.register_comm_hook(*registered)
    return ddp


def draw_missing(
    missing: Mapping[str, Sequence[float]], guess_of_one: float | None, guesses_at_end: Mapping[str, float | None]
) -> Axes:
    """Draw which part of the gradient is missing from the mean of all iterations so far.

    Args:
        missing: By way of sending, the part after each iteration.
        guess_of_one: The learner's, in percent, for one iteration of either way.
        guesses_at_end: The learner's, in percent, for all iterations, by way.
    """
    ax = new_axes()
    colours = dict(zip(missing, plot_colours.LINES, strict=False))
    for way, values in missing.items():
        ax.plot(range(1, len(values) + 1), values, label=way, color=colours[way])
    ax.set_xlabel("iterations")
    ax.set_ylabel("part of the gradient that is missing")
    ax.set_ylim(0, 1.05)
    ax.legend(frameon=False)
    mark_guess(ax, guess_of_one, "%", x=1, scale=1 / 100)
    for way, guess in guesses_at_end.items():
        mark_guess(ax, guess, "%", x=len(missing[way]), scale=1 / 100, colour=colours[way])
    return ax


def smooth(losses: Sequence[float]) -> NDArray[np.float64]:
    """Means of 20 losses in a row."""
    return np.convolve(losses, np.ones(20) / 20, mode="valid")


def draw_losses(losses: Mapping[str, Sequence[float]], colours: Sequence[str] = plot_colours.LINES) -> Axes:
    """Draw losses by label; the second and third curve are dashed, because they may lie on the first."""
    ax = new_axes(7, 3.4)
    for (name, values), colour, dashes in zip(losses.items(), colours, ("-", "--", ":", *"---"), strict=False):
        ax.plot(smooth(values), dashes, color=colour, label=name)
    ax.set_xlabel("step")
    ax.set_ylabel("loss, mean of 20 steps")
    ax.legend(frameon=False)
    return ax
