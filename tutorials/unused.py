"""Tutorial 5's ranks: parameters that take no part, and the errors that this leads to."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reference import models
from reference.data_parallel import DistributedDataParallel

from .averaging import gradient
from .counting import all_reduces

WIDTH, BATCH = 8, 16
Gradients = list[Tensor | None]


class Branches(nn.Module):
    """Layers side by side, of which a batch goes through those that it is told."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, 1, bias=False) for _ in range(count))

    def forward(self, inputs: Tensor, chosen: Sequence[int]) -> Tensor:
        """The sum of what the chosen ones return, by number."""
        return torch.stack([self.branches[number](inputs) for number in chosen]).sum(0)


def train_branches(
    rank: int, _world_size: int, chosen: Sequence[Sequence[int]], arguments: Mapping[str, Any]
) -> Gradients | str:
    """Two iterations of two branches; rank r uses `chosen[r]`. The branches' gradients, or the error's message."""
    model = Branches(2)
    ddp = DistributedDataParallel(model, **arguments)
    try:
        for _ in range(2):
            model.zero_grad()
            ddp(_inputs(rank), chosen[rank]).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return [parameter.grad for parameter in model.parameters()]


def own_gradients(rank: int, _world_size: int, chosen: Sequence[Sequence[int]]) -> Gradients:
    """What the branches' gradients are before anything is averaged."""
    model = Branches(2)
    model(_inputs(rank), chosen[rank]).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def sent_bytes(rank: int, _world_size: int, arguments: Mapping[str, Any]) -> list[int]:
    """Of each all-reduce of an iteration, of two branches that all ranks use."""
    ddp = DistributedDataParallel(Branches(2), **arguments)
    with all_reduces() as sent:
        ddp(_inputs(rank), (0, 1)).square().mean().backward()
    return sent


def used_map(rank: int, _world_size: int, chosen: Sequence[Sequence[int]], count: int) -> list[int]:
    """How many ranks used each branch, as the reducer has added it up."""
    ddp = DistributedDataParallel(Branches(count), find_unused_parameters=True)
    ddp(_inputs(rank), chosen[rank]).square().mean().backward()
    counts: list[int] = ddp.reducer.tracker.used.tensor.tolist()  # type: ignore[attr-defined]  # usage.UnusedFoundInGraph
    return counts


class Shared(nn.Module):
    """A layer, and then another that is used twice, each time under a re-entrant activation checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Through the first layer, and twice through the other."""
        once = checkpoint(self.layer, self.first(inputs), use_reentrant=True)
        return checkpoint(self.layer, once, use_reentrant=True)  # type: ignore[no-any-return]


def train_shared(rank: int, _world_size: int, arguments: Mapping[str, Any]) -> str:
    """Three iterations of `Shared`: the error's message, or nothing."""
    ddp = DistributedDataParallel(Shared(), **arguments)
    try:
        for _ in range(3):
            ddp(_inputs(rank)).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def train_changing(rank: int, _world_size: int, arguments: Mapping[str, Any]) -> str:
    """Three iterations, of which the first uses more than the others: the error's message, or nothing."""
    ddp = DistributedDataParallel(Branches(2), **arguments)
    try:
        for chosen in ((0, 1), (0,), (0,)):
            ddp(_inputs(rank), chosen).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def accumulate(rank: int, _world_size: int, parts: int, divisor: float, waits: bool) -> tuple[Tensor, int]:  # noqa: FBT001
    """A batch in parts, each part's loss divided; `waits`: all parts but the last under `no_sync`.

    Returns:
        The gradient, and how many all-reduces there were.
    """
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    ddp = DistributedDataParallel(model)
    with all_reduces() as sent:
        for number, part in enumerate(_inputs(rank).chunk(parts), start=1):
            with ddp.no_sync() if waits and number < parts else nullcontext():
                (ddp(part).square().mean() / divisor).backward()
    return gradient(model.weight), len(sent)


def one_large_batch(rank: int, _world_size: int) -> Tensor:
    """The gradient of the same batch in one piece."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    ddp = DistributedDataParallel(model)
    ddp(_inputs(rank)).square().mean().backward()
    return gradient(model.weight)


def iteration_ms(_rank: int, _world_size: int, model: str, iterations: int, arguments: Mapping[str, Any]) -> float:
    """Median milliseconds of a forward and a backward pass."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, **arguments)
    times = []
    for _ in range(iterations + 2):
        dist.barrier()
        start = time.perf_counter()
        loss_fn(ddp).backward()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times[2:])


def _inputs(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(BATCH, WIDTH, generator=generator)
