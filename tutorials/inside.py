"""Tutorial 4: what ranks do there, the launch order as a pure function, and pictures of buckets."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from ddplab import DistributedDataParallel
from ddplab.reference.comm_hooks.allreduce import allreduce
from ddplab.reference.trace import Iteration
from ddplab.simulator import plot_colours

from .plots import new_axes

INPUTS = 8


def plans_that_differ(rank: int, _world_size: int) -> None:
    """Construct with a different plan on each rank, which raises on all of them."""
    DistributedDataParallel(
        nn.Linear(INPUTS, 1), plan=[["weight"], ["bias"]] if rank == 0 else [["bias"], ["weight"]]
    )


def accumulated(_rank: int, _world_size: int) -> tuple[int, float]:
    """All-reduces of a batch in four parts, and the largest difference from the gradient of the whole batch."""
    launched: list[int] = []

    def counting(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        launched.append(bucket.index())
        return allreduce(None, bucket)

    layer, batch = nn.Linear(INPUTS, 1, bias=False), torch.randn(8, INPUTS)
    ddp: Any = DistributedDataParallel(layer)
    ddp.register_comm_hook(None, counting)
    for number, part in enumerate(batch.chunk(4)):
        with ddp.no_sync() if number < 3 else nullcontext():
            (ddp(part).square().mean() / 4).backward()  # a mean over 4 parts
    launches, in_parts = len(launched), layer.weight.grad
    layer.weight.grad = None
    ddp(batch).square().mean().backward()
    assert in_parts is not None
    assert layer.weight.grad is not None
    return launches, torch.dist(in_parts, layer.weight.grad).item()


class Branches(nn.Module):
    """Rank 0 uses the left branch, rank 1 the right one, and no rank uses the third."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.neither = (nn.Parameter(torch.ones(1)) for _ in range(3))

    def forward(self, rank: int) -> Tensor:
        """Use the rank's branch."""
        return 1 * (self.right if rank else self.left)


def two_branches(rank: int, _world_size: int, options: dict[str, Any]) -> dict[str, float | None]:
    """Average the gradients of `Branches` in two iterations."""
    ddp = DistributedDataParallel(branches := Branches(), **options)
    for _ in range(2):
        ddp.zero_grad()
        ddp(rank).sum().backward()
    return {name: None if one.grad is None else one.grad.item() for name, one in branches.named_parameters()}


def uneven(rank: int, _world_size: int) -> tuple[int, float]:
    """Train with three batches on rank 0 and five on rank 1; steps, and the sum of the weights afterwards."""
    layer, steps = nn.Linear(INPUTS, 1), 0
    ddp: Any = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for batch in torch.randn(3 + 2 * rank, 4, INPUTS):
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
            steps += 1
    return steps, layer.weight.sum().item()


def launches_after(ready: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of a launched bucket and the bucket that became ready just before, in launch order.

    Args:
        ready: Bucket indices in ready order.
    """
    launched: list[tuple[int, int]] = []
    for place, bucket in enumerate(ready):
        full = set(ready[: place + 1])
        while len(launched) in full:
            launched.append((len(launched), bucket))
    return launched


class Event(NamedTuple):
    """One step of the reducer, as an observer of the notebook records it.

    Attributes:
        what: "gradient", or a state that a bucket enters: a key of `STATES`. Anything else concerns no bucket.
        number: Parameter or bucket. None: neither.
        pending: Gradients that each bucket still waits for.
    """

    what: str
    number: int | None
    pending: tuple[int, ...]


STATES = {
    "ready": plot_colours.COPIES,
    "launched": plot_colours.HIDDEN,
    "done": plot_colours.FORWARD,
    "copied out": plot_colours.COMPUTATION,
}
"""States of a bucket that has all gradients, in their order, with colours."""


def draw_diary(diary: Sequence[Event]) -> Axes:
    """Draw the state of each bucket after each event; a number counts the gradients that a bucket still waits for."""
    buckets = range(len(diary[0].pending))
    ax = new_axes(9, 0.45 * len(buckets) + 1.6)
    states: dict[int, str] = {}
    for place, event in enumerate(diary):
        if event.what in STATES and event.number is not None:
            states[event.number] = event.what
        for bucket in buckets:
            state = states.get(bucket)
            colour = "white" if state is None else STATES[state]
            ax.add_patch(Rectangle((place, bucket - 0.4), 1, 0.8, facecolor=colour, edgecolor=plot_colours.QUIET))
            if state is None:
                ax.text(place + 0.5, bucket, str(event.pending[bucket]), ha="center", va="center", fontsize=9)
    for state, colour in STATES.items():
        ax.add_patch(Rectangle((0, 0), 0, 0, facecolor=colour, label=state))
    ax.legend(frameon=False, ncols=len(STATES), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    words = [event.what if event.number is None else f"{event.what} {event.number}" for event in diary]
    ax.set_xticks([place + 0.5 for place in range(len(diary))], words, rotation=60, ha="right", fontsize=8)
    ax.set_yticks(buckets, [f"bucket {bucket}" for bucket in buckets])
    ax.set_xlim(0, len(diary))
    ax.set_ylim(len(buckets) - 0.5, -0.5)
    ax.tick_params(length=0)
    return ax


def draw_buckets(iteration: Iteration) -> Axes:
    """Draw when the all-reduce of each bucket ran, and how long its result waited to be copied out."""
    ax = new_axes(7, 2.8)
    last = _ms(iteration, iteration.buckets[-1].ready_ns)
    for number, bucket in enumerate(iteration.buckets):
        moments = (bucket.launched_ns, bucket.done_ns, bucket.copied_out_ns)
        launched, done, copied_out = (_ms(iteration, moment) for moment in moments)
        hidden = min(done, max(launched, last))
        waiting = "result waits" if number == 0 else None
        ax.barh(number, hidden - launched, left=launched, color=plot_colours.HIDDEN, height=0.5)
        ax.barh(number, done - hidden, left=hidden, color=plot_colours.EXPOSED, height=0.5)
        ax.barh(number, copied_out - done, left=done, color=plot_colours.COPIES, height=0.5, label=waiting)
    ax.barh(0, 0, color=plot_colours.HIDDEN, label="all-reduce, hidden")
    ax.barh(0, 0, color=plot_colours.EXPOSED, label="exposed")
    ax.axvline(last, color=plot_colours.COMPUTATION, label="last gradient ready")
    ax.legend(frameon=False, ncols=4, fontsize=9, loc="lower left", bbox_to_anchor=(0, 1))
    ax.set_yticks(range(len(iteration.buckets)))
    ax.set_xlim(left=0)
    ax.set_ylim(len(iteration.buckets) - 0.5, -0.5)
    ax.set_xlabel("ms of the backward pass")
    ax.set_ylabel("bucket")
    return ax


def _ms(iteration: Iteration, moment_ns: int | None) -> float:
    """Milliseconds of the backward pass at a recorded moment."""
    assert moment_ns is not None
    return (moment_ns - iteration.backward_start_ns) / 1e6
