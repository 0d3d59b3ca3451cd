"""Tutorial 5: unused parameters, the errors that they cause, gradient accumulation, and pictures of gradients."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddplab import models
from reference.data_parallel import DistributedDataParallel

from .averaging import gradient
from .counting import all_reduces
from .plots import draw_table, mark_guess, new_axes

WIDTH, BATCH = 8, 16
Gradients = list[Tensor | None]


class Branches(nn.Module):
    """Layers side by side; each call uses the chosen ones."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, 1, bias=False) for _ in range(count))

    def forward(self, inputs: Tensor, chosen: Sequence[int]) -> Tensor:
        """Return the sum of the outputs of the chosen layers."""
        return torch.stack([self.branches[number](inputs) for number in chosen]).sum(0)


def train_branches(
    rank: int, _world_size: int, chosen: Sequence[Sequence[int]], arguments: Mapping[str, Any]
) -> Gradients | str:
    """Run two iterations of two branches; rank r uses `chosen[r]`.

    Returns:
        The gradients of the branches, or the message of the error.
    """
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
    """Gradients of the branches on this rank, without averaging."""
    model = Branches(2)
    model(_inputs(rank), chosen[rank]).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def sent_bytes(rank: int, _world_size: int, arguments: Mapping[str, Any]) -> list[int]:
    """Bytes of each all-reduce in an iteration of two branches that all ranks use."""
    ddp = DistributedDataParallel(Branches(2), **arguments)
    with all_reduces() as sent:
        ddp(_inputs(rank), (0, 1)).square().mean().backward()
    return sent


def used_map(rank: int, _world_size: int, chosen: Sequence[Sequence[int]], count: int) -> list[int]:
    """Number of ranks that used each branch, from the reducer."""
    ddp = DistributedDataParallel(Branches(count), find_unused_parameters=True)
    ddp(_inputs(rank), chosen[rank]).square().mean().backward()
    counts: list[int] = ddp.reducer.tracker.used.tensor.tolist()  # type: ignore[attr-defined]  # UnusedFoundInGraph
    return counts


class Shared(nn.Module):
    """A layer, followed by another that is used twice, each time in a re-entrant activation checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        """Apply the first layer once and the other one twice."""
        once = checkpoint(self.layer, self.first(inputs), use_reentrant=True)
        return checkpoint(self.layer, once, use_reentrant=True)  # type: ignore[no-any-return]


def train_shared(rank: int, _world_size: int, arguments: Mapping[str, Any]) -> str:
    """Run three iterations of `Shared`; return the message of the error, or an empty string."""
    ddp = DistributedDataParallel(Shared(), **arguments)
    try:
        for _ in range(3):
            ddp(_inputs(rank)).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def train_changing(rank: int, _world_size: int, arguments: Mapping[str, Any]) -> str:
    """Run three iterations, of which only the first uses all branches; return the error's message, or ""."""
    ddp = DistributedDataParallel(Branches(2), **arguments)
    try:
        for chosen in ((0, 1), (0,), (0,)):
            ddp(_inputs(rank), chosen).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def accumulate(rank: int, _world_size: int, parts: int, divisor: float, waits: bool) -> tuple[Tensor, int]:  # noqa: FBT001
    """Accumulate gradients over the parts of a batch, with the loss of each part divided by `divisor`.

    Args:
        rank: This rank.
        parts: Number of parts.
        divisor: Divisor of each loss.
        waits: Run all parts except the last under `no_sync`.

    Returns:
        The gradient; the number of all-reduces.
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
    """Gradient of the same batch as a whole."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    ddp = DistributedDataParallel(model)
    ddp(_inputs(rank)).square().mean().backward()
    return gradient(model.weight)


def processor_ms(_rank: int, _world_size: int, model: str, iterations: int, arguments: Mapping[str, Any]) -> float:
    """Milliseconds of processor time of a forward and backward pass on this rank's thread: the least of all.

    Processor time leaves out waiting, for other ranks and for a free core, so a busy machine changes it little.
    """
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, **arguments)
    times = []
    for _ in range(iterations + 2):
        dist.barrier()
        start = time.thread_time()
        loss_fn(ddp).backward()
        times.append(time.thread_time() - start)
    return 1e3 * min(times[2:])


def graph_nodes(model: str) -> int:
    """Number of nodes of the graph behind the loss of a model, which a search visits."""
    module, loss_fn = models.build(model)
    seen, waiting = set(), [loss_fn(module).grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return len(seen)


Case = tuple[tuple[int, ...], tuple[int, ...]]
"""The layers that rank 0 uses, and those that rank 1 uses."""


def draw_gradients(gradients: Mapping[Case, Sequence[Gradients]], own: Tensor, guess: str | None) -> Axes:
    """Draw which gradient of the second layer each rank has, for each case.

    Args:
        gradients: By case and rank.
        own: Gradient of rank 0 before averaging.
        guess: The learner's word for rank 1's gradient in the second case.
    """

    def word(one: Tensor | None) -> str:
        if one is None:
            return "None"
        return "half of rank 0's" if torch.equal(one, own / 2) else "average of both"

    used = {True: "rank {} uses it", False: "rank {} does not"}
    rows = [", ".join(used[1 in chosen].format(rank) for rank, chosen in enumerate(case)) for case in gradients]
    words = [[word(of_rank[1]) for of_rank in of_ranks] for of_ranks in gradients.values()]
    ax = draw_table(new_axes(7, 2.4), words, rows, ["rank 0 has", "rank 1 has"])
    mark_guess(ax, guess, x=1.95, y=1.82)
    return ax


def draw_bitmap(chosen: Case, counts: Sequence[int]) -> Axes:
    """Draw the layers that each rank uses, and their sum after the all-reduce."""
    layers = range(len(counts))
    used = [[str(int(layer in of_rank)) for layer in layers] for of_rank in chosen]
    rows = [*(f"rank {rank}" for rank in range(len(chosen))), "sum"]
    columns = [f"layer {layer}" for layer in layers]
    return draw_table(new_axes(4.5, 1.8), [*used, list(map(str, counts))], rows, columns)


def _inputs(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(BATCH, WIDTH, generator=generator)
