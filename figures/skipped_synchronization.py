"""Figures 10 and 11 of the paper: gradients averaged every 1, 2, 4, 8 iterations; what it saves and what it costs."""

import csv
from functools import cache
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from simulator import predict

from .drawing import COMPUTATION, DATA, EXPOSED, MEASURED, SECOND, plain, render, save
from .setting import FABRICS, resnet50

TITLE = "Skipping synchronisation"
SIZE = (5.0, 3.4)
EVERY = (1, 2, 4, 8)
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COLOURS = dict(zip(EVERY, (MEASURED, COMPUTATION, SECOND, EXPOSED), strict=True))
SMOOTHED = 25
"""Steps that a point of a loss curve is the mean of."""


class Lines(NamedTuple):
    """By how often gradients are averaged."""

    title: str
    x: tuple[float, ...]
    by_every: dict[int, list[float]]
    is_latency: bool


@cache
def panels() -> list[Lines]:
    """Latency, simulated; loss, measured."""
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
    """A line for each."""
    for every, values in data.by_every.items():
        marker = "o-" if data.is_latency else "-"
        ax.plot(data.x, values, marker, color=COLOURS[every], markersize=4, linewidth=1.2, label=f"every {every}")
    if data.is_latency:
        ax.set_xscale("log", base=2)
        ax.set_xticks(data.x, [f"{gpus:.0f}" for gpus in data.x])
    ax.set_ylim(bottom=0)
    ax.set_xlabel("GPUs" if data.is_latency else f"iteration; mean of {SMOOTHED}")
    ax.set_ylabel("iteration, ms" if data.is_latency else "loss")
    ax.set_title(data.title, loc="left", fontsize=10)
    ax.legend(frameon=False, fontsize=8)
    return plain(ax)


def caption() -> str:
    """In numbers."""
    *latencies, loss = panels()
    saved = "; ".join(
        f"{panel.title.partition(':')[0]} "
        + ", ".join(f"{1 - panel.by_every[every][-1] / panel.by_every[1][-1]:.0%}" for every in EVERY[1:])
        for panel in latencies
    )
    ends = ", ".join(f"{every}: {values[-1]:.3f}" for every, values in loss.by_every.items())
    return (
        "Gradients are averaged every so many iterations, under `no_sync` in between. Left and middle, simulated "
        f"from the V100's trace: what every 2, 4 and 8 save of an iteration at {GPUS[-1]} GPUs: {saved}. Right, "
        "measured: the same classifier trained by our reducer on two processes, one optimiser step for each "
        f"synchronisation, all with as many batches and the same learning rate; loss at the end, {ends}. Each step "
        "is on the mean of its batches, so fewer steps of the same size are made: without a larger learning rate "
        "that learns less from as many samples. The paper shows such curves for MNIST (its figure 11)."
    )


def main() -> None:
    """Draw it again."""
    save("skipped_synchronization", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
