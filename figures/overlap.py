"""Parts of an iteration with and without overlap of computation and communication (figure 6 of the paper)."""

from collections.abc import Iterator
from functools import cache
from math import inf
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from ddplab.simulator.plot_colours import COMPUTATION, EXPOSED, FORWARD, INK

from .drawing import plain, render, save
from .emulated_runs import BY_CLOCK, CLOCK_RUNS, Run, clock_rows
from .traces_and_fabrics import FABRICS, MODELS, RESNET_ITERATION_NS, resnet50

TITLE = "What overlap saves"
SIZE = (4.3, 3.6)
GPUS = 32
CLAIMS = {
    ("ResNet-50", "NCCL-like"): 0.380,
    ("BERT-Large", "NCCL-like"): 0.352,
    ("ResNet-50", "Gloo-like"): 0.268,
    ("BERT-Large", "Gloo-like"): 0.215,
}
"""Time that overlap saves in the paper (section 5.1), as a fraction of the iteration without overlap."""


class Pair(NamedTuple):
    """One iteration without and with overlap, in milliseconds; both have the same forward and backward pass.

    Attributes:
        name: Model or number of GPUs.
        forward_ms: Forward pass.
        computation_ms: Everything that a rank computes, with the forward pass.
        without_ms: Iteration without overlap.
        with_ms: Iteration with overlap.
    """

    name: str
    forward_ms: float
    computation_ms: float
    without_ms: float
    with_ms: float

    @property
    def saved(self) -> float:
        """Time that overlap saves, as a fraction of the iteration without overlap."""
        return 1 - self.with_ms / self.without_ms


class Pairs(NamedTuple):
    """The pairs of one panel."""

    title: str
    fabric: str
    pairs: tuple[Pair, ...]


def runs() -> Iterator[Run]:
    """All runs in virtual time."""
    for fabric in FABRICS:
        for model in MODELS:
            for overlaps in (False, True):
                yield Run(model, fabric, GPUS, overlaps=overlaps)


@cache
def panels() -> list[Pairs]:
    """Committed runs by the clock, and one panel in virtual time for each fabric."""
    return [
        Pairs("Gloo over links, by the clock", "by the clock", tuple(map(_by_clock, CLOCK_RUNS))),
        *map(_in_virtual_time, FABRICS),
    ]


def _by_clock(ranks: str) -> Pair:
    """A single bucket is sent after the backward pass, so it is the run without overlap."""
    rows, recorded = clock_rows(ranks), resnet50().ranks[0].iterations[0]
    return Pair(
        ranks,
        (recorded.forward_end_ns - recorded.forward_start_ns) / 1e6,
        RESNET_ITERATION_NS / 1e6,
        rows[inf].measured_ns / 1e6,
        rows[25.0].measured_ns / 1e6,
    )


def _in_virtual_time(fabric: str) -> Pairs:
    pairs = tuple(_emulated(model, fabric) for model in MODELS)
    return Pairs(f"{fabric}, {GPUS} GPUs, virtual time", fabric, pairs)


def _emulated(model: str, fabric: str) -> Pair:
    without, overlapped = (Run(model, fabric, GPUS, overlaps=overlaps) for overlaps in (False, True))
    prediction = overlapped.predict()
    return Pair(
        model,
        prediction.breakdown["forward"] / 1e6,
        prediction.compute_ns / 1e6,
        without.iteration_ms,
        overlapped.iteration_ms,
    )


def draw(data: Pairs, ax: Axes) -> Axes:
    """Draw two bars for each pair, without and with overlap, in percent of the iteration without overlap."""
    places = np.arange(len(data.pairs))
    for place, pair in zip(places, data.pairs, strict=True):
        percent = 100 / pair.without_ms
        for shift, total in ((-0.2, pair.without_ms), (0.2, pair.with_ms)):
            ax.bar(place + shift, percent * pair.forward_ms, 0.36, color=FORWARD)
            backward = pair.computation_ms - pair.forward_ms
            ax.bar(place + shift, percent * backward, 0.36, bottom=percent * pair.forward_ms, color=COMPUTATION)
            ax.bar(
                place + shift, percent * (total - pair.computation_ms), 0.36, bottom=percent * pair.computation_ms,
                color=EXPOSED,
            )  # fmt: skip
        top = percent * pair.with_ms
        ax.text(place + 0.2, top + 1, f"\u2212{pair.saved:.0%}", ha="center", va="bottom", fontsize=9, color=INK)
    if data.fabric == "by the clock":
        first, ends = (
            data.pairs[0],
            (0.0, data.pairs[0].forward_ms, data.pairs[0].computation_ms, data.pairs[0].without_ms),
        )
        names = ("forward", "backward", "exposed\ncomm.")
        for name, low, high in zip(names, ends, ends[1:], strict=False):
            middle = 100 * (low + high) / 2 / first.without_ms
            ax.text(-0.2, middle, name, ha="center", va="center", fontsize=6.5, color=INK)
        ax.set_xlabel("left bar: one bucket; right bar: buckets of 25 MiB", fontsize=8)
    else:
        ax.set_xlabel("left bar: no overlap; right bar: overlap", fontsize=8)
    ax.set_xticks(places, [pair.name.replace(", ", ",\n") for pair in data.pairs])
    ax.set_ylabel("% of the iteration without overlap")
    ax.set_ylim(0, 106)
    ax.set_title(data.title, loc="left", fontsize=10)
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    clock, *virtual = panels()
    by_clock = ", ".join(f"{pair.saved:.1%} on {pair.name}" for pair in clock.pairs)
    savings = "; ".join(
        f"{panel.fabric} {pair.name} {pair.saved:.1%} (paper {CLAIMS[pair.name, panel.fabric]:.1%})"
        for panel in virtual
        for pair in panel.pairs
    )
    all_saved = [pair.saved for panel in virtual for pair in panel.pairs]
    return (
        f"Overlap saves {clock.pairs[0].saved:.0%} of an iteration of ResNet-50 on 4 emulated V100s over 10 Gbit/s, "
        f"by the clock, and {min(all_saved):.0%} to {max(all_saved):.0%} on {GPUS} in virtual time; the paper's "
        f"savings of {min(CLAIMS.values()):.0%} to {max(CLAIMS.values()):.0%} are not reproduced. Left: {BY_CLOCK}; "
        f"one bucket is sent after the backward pass, so nothing overlaps: {by_clock}. Middle and right: our reducer "
        "on emulated V100s in virtual time, 8 in a node, with buckets of 25 MiB; without overlap, all gradients "
        "become ready at the end of the backward pass, in the same buckets. ResNet-50: the same trace. BERT-Large: "
        "synthesised at the peak rates of the V100's data sheet (batch 8, 128 tokens), so its computation is short. "
        "NCCL-like: NVLink inside a node and one 100 Gbit/s adapter for each node (sources: "
        "figures/traces_and_fabrics.py); modelled, because NCCL runs on GPUs only. Gloo-like: a ring with the "
        "latency and rate of Gloo as calibrated on two processes over links of 10 Gbit/s. Saved, as a fraction of "
        f"the iteration without overlap: {savings}. Overlap saves at most the shorter of the backward pass and the "
        "communication, so the saving is largest where both are equal. We do not know the paper's batch sizes, and "
        "its adapters have 100 Gbit/s for Gloo as well."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE, shared="y")


if __name__ == "__main__":
    save("overlap", files())
