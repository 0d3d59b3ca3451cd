"""Tutorial 1: averages of gradients and of parameters on ranks, and a picture of the difference.

Rank functions are in modules because another process cannot import a function that a notebook defines.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import Tensor, nn

from ddplab.simulator import plot_colours

from .plots import mark_guess, new_axes

BATCH, INPUTS, WIDTH = 16, 8, 16
STEPS = 20
CLIP = 0.1
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def integer_model() -> nn.Module:
    """Two layers with small integer weights in double precision, so that all sums in their gradients are exact."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).double()
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0)
        parameter.data += torch.randint(-2, 3, parameter.shape, generator=generator)
    return model


def float_model() -> nn.Module:
    """The same layers with random weights in single precision, so that sums are rounded."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


MODELS = {"integers": integer_model, "floats": float_model}


def batch(step: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and targets of all ranks together: small integers that differ from step to step."""
    generator = torch.Generator().manual_seed(100 + step)
    inputs = torch.randint(-2, 3, (BATCH, INPUTS), generator=generator)
    return inputs.to(dtype), torch.randint(-2, 3, (BATCH, 1), generator=generator).to(dtype)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean squared error."""
    return nn.functional.mse_loss(model(inputs), targets)


def gradients_of_whole_batch(weights: str) -> list[Tensor]:
    """Gradients of the whole batch, computed in one process."""
    model = MODELS[weights]()
    return _gradients(model, *batch(dtype=next(model.parameters()).dtype))


def share_of_batch(rank: int, world_size: int, weights: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, and this rank's inputs and targets: an equal share of the batch.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        weights: A key of `MODELS`.
    """
    model = MODELS[weights]()
    inputs, targets = batch(dtype=next(model.parameters()).dtype)
    mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    return model, inputs[mine], targets[mine]


def average(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Average tensors over the ranks in place, and return them."""
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()
    return list(tensors)


def train(rank: int, world_size: int, optimizer: str, averaged: str, every: int) -> list[Tensor]:
    """Train for `STEPS` steps on this rank's shares, and return the parameters.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        optimizer: A key of `OPTIMIZERS`.
        averaged: "gradients": the ranks average gradients before each optimiser step; "parameters": they average
            parameters instead.
        every: Number of steps from one average of the parameters to the next.
    """
    model = float_model().double()
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step)
        mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
        stepper.zero_grad()
        loss_of(model, inputs[mine], targets[mine]).backward()
        if averaged == "gradients":
            average([gradient(parameter) for parameter in model.parameters()])
        stepper.step()
        if averaged == "parameters" and (step + 1) % every == 0:
            average([parameter.data for parameter in model.parameters()])
    return [parameter.detach() for parameter in model.parameters()]


def initial_parameters() -> list[Tensor]:
    """The parameters with which `train` starts."""
    return [parameter.detach() for parameter in float_model().double().parameters()]


def distance(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """The largest absolute difference of corresponding elements."""
    return max((one - other).abs().max().item() for one, other in zip(some, others, strict=True))


def weighted_gradients(rank: int, _world_size: int, shares: Sequence[int], weights: Sequence[float]) -> list[Tensor]:
    """Sum of the ranks' gradients, each times the weight of its rank; rank r has `shares[r]` of the inputs."""
    inputs, targets = batch()
    first = sum(shares[:rank])
    mine = _gradients(integer_model(), inputs[first : first + shares[rank]], targets[first : first + shares[rank]])
    for gradient in mine:
        gradient *= weights[rank]
        dist.all_reduce(gradient)
    return mine


def clipped(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Scale tensors so that their common norm is at most `CLIP`."""
    norm = torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors])).item()
    return [tensor * min(1.0, CLIP / norm) for tensor in tensors]


def clipped_gradients(rank: int, world_size: int, when: str) -> list[Tensor]:
    """Averaged gradients, clipped "before" or "after" the average."""
    model = float_model()
    inputs, targets = batch(dtype=torch.float32)
    mine = slice(rank * BATCH // world_size, (rank + 1) * BATCH // world_size)
    own = _gradients(model, inputs[mine], targets[mine])
    return average(clipped(own)) if when == "before" else clipped(average(own))


def _gradients(model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    loss_of(model, inputs, targets).backward()
    return [gradient(parameter) for parameter in model.parameters()]


def gradient(parameter: Tensor) -> Tensor:
    """The gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


def draw_apart(
    apart: Mapping[tuple[str, int], float], moved: Mapping[str, float], guesses: Mapping[str, str | None]
) -> Axes:
    """Draw how far averaged parameters are from those of averaged gradients, as a fraction of the way of training.

    Args:
        apart: Largest difference of any parameter, by optimiser and number of steps between two averages.
        moved: Largest change of any parameter in training, by optimiser.
        guesses: By optimiser, "yes" if the learner guesses equal parameters with an average after every step, or
            "no"; they stand inside or beside the band of roundings.
    """
    ax = new_axes(7, 2.6)
    ax.axvspan(1e-17, 1e-12, color=plot_colours.SMALL)
    ax.text(1e-16, len(moved) - 0.5, "rounding", va="bottom")
    for (name, every), colour in zip(
        apart, (plot_colours.COMPUTATION, plot_colours.EXPOSED) * len(moved), strict=False
    ):
        place = list(moved).index(name) + (0.15 if every > 1 else -0.15)
        label = f"averaged every {'step' if every == 1 else f'{every} steps'}" if name == next(iter(moved)) else None
        ax.plot(max(apart[name, every] / moved[name], 1e-17), place, "o", color=colour, label=label)
    ax.set_xscale("log")
    ax.set_xlim(1e-17, 10)
    ax.set_yticks(range(len(moved)), list(moved))
    ax.set_ylim(len(moved) - 0.4, -0.6)
    ax.set_xlabel("largest difference of a parameter, as a part of its way in training")
    ax.legend(frameon=False, loc="upper right", bbox_to_anchor=(0.8, 1))
    for place, name in enumerate(moved):
        mark_guess(ax, guesses[name], x=1e-14 if guesses[name] == "yes" else 1e-10, y=place - 0.15)
    return ax
