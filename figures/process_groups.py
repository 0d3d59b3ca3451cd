"""Iteration time with buckets assigned in turn to 1, 3 and 5 process groups (figure 12 of the paper)."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from simulator.plot_colours import COMPUTATION, COPIES, EXPOSED

from .drawing import plain, render, save
from .emulated_runs import Run
from .traces_and_fabrics import FABRICS, MODELS

TITLE = "Round-robin process groups"
SIZE = (3.2, 3.2)
GROUPS = (1, 3, 5)
GPUS = (8, 16, 32)
CAP_MB = 5.0
"""Small enough for several buckets in each process group."""


class Grouped(NamedTuple):
    """Iterations as a fraction of that with one process group, by number of groups, one for each of `GPUS`."""

    title: str
    by_groups: dict[int, list[float]]


def runs() -> Iterator[Run]:
    """All runs in virtual time."""
    for fabric in FABRICS:
        for model in MODELS:
            for groups in GROUPS:
                for gpus in GPUS:
                    yield Run(model, fabric, gpus, CAP_MB, process_groups=groups)


@cache
def panels() -> list[Grouped]:
    """One panel for each model and fabric."""
    return [_grouped(model, fabric) for fabric in FABRICS for model in MODELS]


def _grouped(model: str, fabric: str) -> Grouped:
    times = {
        groups: [Run(model, fabric, gpus, CAP_MB, process_groups=groups).iteration_ms for gpus in GPUS]
        for groups in GROUPS
    }
    return Grouped(
        f"{model}, {fabric}",
        {
            groups: [ms / one_group for ms, one_group in zip(row, times[1], strict=True)]
            for groups, row in times.items()
        },
    )


def draw(data: Grouped, ax: Axes) -> Axes:
    """Draw one bar for each number of process groups, grouped by number of GPUs; each bar names its groups."""
    places = np.arange(len(GPUS))
    for number, ((groups, fractions), colour) in enumerate(
        zip(data.by_groups.items(), (COMPUTATION, COPIES, EXPOSED), strict=True)
    ):
        shifted = places + 0.28 * (number - 1)
        ax.bar(shifted, [100 * one for one in fractions], 0.26, color=colour)
        for place in shifted:
            ax.text(place, 3, str(groups), ha="center", va="bottom", fontsize=9)
    ax.set_xticks(places, [str(gpus) for gpus in GPUS])
    ax.set_ylim(0, 108)
    ax.set_xlabel("GPUs; in the bars: process groups")
    ax.set_ylabel("iteration, % of that with one group")
    ax.set_title(data.title, loc="left", fontsize=10)
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    saved = {panel.title: 1 - panel.by_groups[5][-1] for panel in panels()}
    best = max(saved, key=saved.__getitem__)
    savings = "; ".join(f"{title} {fraction:.1%}" for title, fraction in saved.items())
    return (
        f"Five process groups save up to {saved[best]:.0%} of an iteration where latency dominates ({best}, "
        f"{GPUS[-1]} GPUs), and nothing where computation hides communication. Our reducer on emulated V100s in "
        f"virtual time, with the traces and networks of the figures above and buckets of {CAP_MB:g} MiB assigned to "
        f"the process groups in turn. Saved with five groups on {GPUS[-1]} GPUs: {savings}. Collectives that run at "
        "the same time share the bandwidth of the modelled links, so more groups can only hide latency. The paper "
        "measured 1, 3 and 5 such groups (figure 12)."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE, shared="y")


if __name__ == "__main__":
    save("process_groups", files())
