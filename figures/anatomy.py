"""Anatomy of the reducer: one recorded iteration of ResNet-18, with each bucket from ready to copied out."""

from functools import cache
from typing import NamedTuple

from matplotlib.axes import Axes

from ddplab import Trace
from ddplab.reference.trace import Iteration
from ddplab.simulator.plot_colours import COMPUTATION, COPIES, EXPOSED, FORWARD, HIDDEN, INK, QUIET

from .drawing import DATA, plain, render, save

TITLE = "Anatomy of the reducer"
SIZE = (9.0, 3.6)
MS = 1e6


class Anatomy(NamedTuple):
    """Moments of one iteration, in milliseconds from the start of the forward pass.

    Attributes:
        phases: Start and end of forward pass, backward pass and optimiser step, by name.
        ready: When each gradient was ready.
        buckets: When each bucket was ready, launched, done and copied out.
    """

    phases: dict[str, tuple[float, float]]
    ready: list[float]
    buckets: list[tuple[float, float, float, float]]


@cache
def panels() -> list[Anatomy]:
    """The last recorded iteration of rank 0; recorded by `python -m figures.measure anatomy`."""
    return [_anatomy(Trace.load(DATA / "anatomy.json.gz").ranks[0].iterations[-1])]


def _anatomy(iteration: Iteration) -> Anatomy:
    start = iteration.forward_start_ns

    def ms(time_ns: int | None) -> float:
        assert time_ns is not None
        return (time_ns - start) / MS

    return Anatomy(
        {
            "forward": (0.0, ms(iteration.forward_end_ns)),
            "backward": (ms(iteration.backward_start_ns), max(ms(ready) for ready in iteration.ready_ns)),
            "optimiser": (ms(iteration.optimizer_start_ns), ms(iteration.optimizer_end_ns)),
        },
        [ms(ready) for ready in iteration.ready_ns],
        [
            (ms(one.ready_ns), ms(one.launched_ns), ms(one.done_ns), ms(one.copied_out_ns))
            for one in iteration.buckets
        ],
    )


def draw(data: Anatomy, ax: Axes) -> Axes:
    """Draw computation in the first lane, and one lane below for each bucket."""
    for (name, (begin, end)), colour in zip(data.phases.items(), (FORWARD, COMPUTATION, QUIET), strict=True):
        ax.barh(0, end - begin, left=begin, height=0.7, color=colour)
        ax.text((begin + end) / 2, -0.55, name, ha="center", va="bottom", fontsize=8)
    ax.vlines(data.ready, -0.35, 0.35, color=INK, linewidth=0.5)
    for lane, (ready, launched, done, copied_out) in enumerate(data.buckets, start=1):
        ax.barh(lane, launched - ready, left=ready, height=0.25, color=QUIET)
        hidden = min(done, max(launched, max(data.ready)))
        ax.barh(lane, hidden - launched, left=launched, height=0.7, color=HIDDEN)
        ax.barh(lane, done - hidden, left=hidden, height=0.7, color=EXPOSED)
        ax.barh(lane, copied_out - done, left=done, height=0.7, color=COPIES)
        if lane == 1:
            ax.text((launched + done) / 2, lane, "all-reduce", ha="center", va="center", fontsize=7)
            ax.text((done + copied_out) / 2, lane, "done, then copied out", ha="center", va="center", fontsize=7)
    ax.set_yticks(range(len(data.buckets) + 1), ["compute", *(f"bucket {n}" for n in range(len(data.buckets)))])
    ax.set_ylim(len(data.buckets) + 0.6, -1.1)
    ax.set_xlim(left=0)
    ax.set_xlabel("ms; ticks: a gradient is ready")
    plain(ax)
    ax.grid(visible=False)
    return ax


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    (one,) = panels()
    last = max(one.ready)
    early = sum(launched < last for _, launched, _, _ in one.buckets)
    return (
        f"{early} of {len(one.buckets)} buckets are sent while the backward pass still runs (pink; exposed: red). "
        f"Measured: one iteration of ResNet-18 in {len(one.buckets)} buckets on "
        "one of two Gloo processes, from a trace of our recorder. "
        f"{len(one.ready)} gradients become ready in {last - one.phases['backward'][0]:.0f} ms, because the "
        'backward pass shares two cores with the all-reduces (alone it takes a third of that: "When gradients are '
        'ready"). The buckets are launched in bucket order. '
        "After the backward pass the reducer waits for the buckets in order and copies the averages out until "
        f"{one.buckets[-1][3]:.0f} ms; then the optimiser steps."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE)


if __name__ == "__main__":
    save("anatomy", files())
