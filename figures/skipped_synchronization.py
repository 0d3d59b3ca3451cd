"""Gradients averaged every 1, 2, 4, 8 iterations: iteration time and loss (figures 10 and 11 of the paper)."""

import csv
from functools import cache
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from simulator import predict

from .drawing import COMPUTATION, DATA, EXPOSED, MEASURED, SECOND, plain, render, save
from .traces_and_fabrics import FABRICS, resnet50

TITLE = "Skipping synchronisation"
SIZE = (5.0, 3.4)
EVERY = (1, 2, 4, 8)
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COLOURS = dict(zip(EVERY, (MEASURED, COMPUTATION, SECOND, EXPOSED), strict=True))
SMOOTHED = 25
"""Number of iterations that each point of a loss curve averages."""


class Lines(NamedTuple):
    """The lines of one panel, by the number of iterations from one synchronisation to the next."""

    title: str
    x: tuple[float, ...]
    by_every: dict[int, list[float]]
    is_latency: bool


@cache
def panels() -> list[Lines]:
    """Simulated iteration time on each fabric, and measured loss."""
    losses = {every: _smooth(values) for every, values in _losses().items()}
    steps = tuple(float(step) for step in range(SMOOTHED, SMOOTHED + len(losses[1])))
    return [
        *(Lines(f"ResNet-50, {fabric}: simulated", GPUS, _latency(fabric), is_latency=True) for fabric in FABRICS),
        Lines("a classifier on two ranks: measured", steps, losses, is_latency=False),
    ]


def _latency(fabric: str) -> dict[int, list[float]]:
    trace, links = resnet50(), FABRICS[fabric]()
    return {
        every: [predict(trace, links, world_size=gpus, sync_every=every).iteration_ns / 1e6 for gpus in GPUS]
        for every in EVERY
    }


def _losses() -> dict[int, list[float]]:
    by_every: dict[int, list[float]] = {every: [] for every in EVERY}
    with (DATA / "skipped_losses.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            by_every[int(row["sync_every"])].append(float(row["loss"]))
    return by_every


def _smooth(values: list[float]) -> list[float]:
    smoothed: list[float] = np.convolve(values, np.ones(SMOOTHED) / SMOOTHED, mode="valid").tolist()
    return smoothed


def draw(data: Lines, ax: Axes) -> Axes:
    """Plot one line for each number of iterations from one synchronisation to the next."""
    for every, values in data.by_every.items():
        marker = "o-" if data.is_latency else "-"
        ax.plot(data.x, values, marker, color=COLOURS[every], markersize=4, linewidth=1.2, label=f"every {every}")
    if data.is_latency:
        ax.set_xscale("log", base=2)
        ax.set_xticks(data.x, [f"{gpus:.0f}" for gpus in data.x])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("GPUs" if data.is_latency else f"iteration (mean of {SMOOTHED})")
    ax.set_ylabel("iteration, ms" if data.is_latency else "loss")
    ax.set_title(data.title, loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=8)
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    *latencies, loss = panels()
    savings = "; ".join(
        f"{panel.title.partition(':')[0]} "
        + ", ".join(f"{1 - panel.by_every[every][-1] / panel.by_every[1][-1]:.0%}" for every in EVERY[1:])
        for panel in latencies
    )
    ends = ", ".join(f"{every}: {values[-1]:.3f}" for every, values in loss.by_every.items())
    return (
        "Gradients are averaged every 1, 2, 4 or 8 iterations, with `no_sync` in between. Left and middle: simulated "
        "from the V100's trace; averaging every 2, 4 and 8 iterations saves this fraction of an iteration on "
        f"{GPUS[-1]} GPUs: {savings}. Right: measured; a classifier trained by our reducer on two processes with one "
        "optimiser step for each synchronisation, as many batches and the same learning rate in all runs. Final loss "
        f"with an average every so many iterations: {ends}. Each step uses the mean gradient of its batches, so "
        "fewer steps of the same size are taken: without a larger learning rate the model learns less from as many "
        "samples. The paper shows such curves for MNIST (its figure 11)."
    )


def main() -> None:
    """Draw the figure and write its files."""
    save("skipped_synchronization", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
