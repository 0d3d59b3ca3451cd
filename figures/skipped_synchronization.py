"""Gradients averaged every 1, 2, 4, 8 iterations: iteration time and loss (figures 10 and 11 of the paper)."""

import csv
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from ddplab.simulator.plot_colours import COMPUTATION, COPIES, EXPOSED, INK

from .drawing import DATA, Label, label_lines, plain, render, save
from .emulated_runs import Run
from .traces_and_fabrics import FABRICS

TITLE = "Skipping synchronisation"
SIZE = (5.0, 3.4)
EVERY = (1, 2, 4, 8)
GPUS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TICKS = (1, 2, 4, 8, 16)
COLOURS = dict(zip(EVERY, (INK, COMPUTATION, COPIES, EXPOSED), strict=True))
SMOOTHED = 25
"""Number of iterations that each point of a loss curve averages."""


class Lines(NamedTuple):
    """The lines of one panel, by the number of iterations from one synchronisation to the next."""

    title: str
    x: tuple[float, ...]
    by_every: dict[int, list[float]]
    is_latency: bool


def runs() -> Iterator[Run]:
    """All runs in virtual time."""
    for fabric in FABRICS:
        for every in EVERY:
            for gpus in GPUS:
                yield Run("ResNet-50", fabric, gpus, sync_every=every)


@cache
def panels() -> list[Lines]:
    """Emulated iteration time on each fabric, and measured loss."""
    losses = {every: _smooth(values) for every, values in _losses().items()}
    steps = tuple(float(step) for step in range(SMOOTHED, SMOOTHED + len(losses[1])))
    return [
        *(Lines(f"ResNet-50, {fabric}, virtual time", GPUS, _latency(fabric), is_latency=True) for fabric in FABRICS),
        Lines("a classifier on two ranks, measured", steps, losses, is_latency=False),
    ]


def _latency(fabric: str) -> dict[int, list[float]]:
    """Iterations as multiples of one GPU's."""
    one_gpu_ms = Run("ResNet-50", fabric, 1).iteration_ms
    return {
        every: [Run("ResNet-50", fabric, gpus, sync_every=every).iteration_ms / one_gpu_ms for gpus in GPUS]
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
    if data.is_latency:
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(data.x, [f"{gpus:.0f}" for gpus in data.x])
        ax.set_yticks(TICKS, [str(tick) for tick in TICKS])
        ax.minorticks_off()
        ax.set_xlim(0.9, 800)
        ax.set_ylim(0.9, 20)
    else:
        ax.set_xlim(0, data.x[-1] * 1.25)
        ax.set_ylim(0, 2.5)
    labels = []
    for every, values in data.by_every.items():
        marker = "o-" if data.is_latency else "-"
        ax.plot(data.x, values, marker, color=COLOURS[every], markersize=4, linewidth=1.2)
        labels.append(Label(f"every {every}", data.x[-1], values[-1], COLOURS[every]))
    label_lines(labels, ax)
    ax.set_xlabel("GPUs" if data.is_latency else f"iteration (mean of {SMOOTHED})")
    ax.set_ylabel("iteration, times that of one GPU" if data.is_latency else "loss")
    ax.set_title(data.title, loc="left", fontsize=10)
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    *latencies, loss = panels()
    saved = [[1 - panel.by_every[every][-1] / panel.by_every[1][-1] for every in EVERY[1:]] for panel in latencies]
    nccl, gloo = (", ".join(f"{fraction:.0%}" for fraction in of_panel) for of_panel in saved)
    ends = {every: values[-1] for every, values in loss.by_every.items()}
    shown = ", ".join(f"{every}: {value:.3f}" for every, value in ends.items())
    return (
        f"Averaging gradients only every {EVERY[-1]} iterations saves {saved[0][-1]:.0%} of an iteration on a fast "
        f"network and {saved[1][-1]:.0%} on a slow one ({GPUS[-1]} GPUs), and with an unchanged learning rate the "
        f"loss after equally many batches is {ends[EVERY[-1]]:.1f} instead of {ends[1]:.1f}. Gradients are averaged "
        "every 1, 2, 4 or 8 iterations, with `no_sync` in between. Left and middle: our reducer on emulated V100s in "
        "virtual time, with the traces and networks of the figures above; saved with 2, 4 and 8 iterations: "
        f"NCCL-like {nccl}; Gloo-like {gloo}. Right: measured; a classifier trained by our reducer on two processes "
        "with one optimiser step for each synchronisation. Final loss with an average every so many iterations: "
        f"{shown}. Each step uses the mean gradient of its batches, so fewer steps of the same size are taken. The "
        "paper shows the latencies for ResNet-50 (figure 10) and the loss for MNIST (figure 11)."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE)


if __name__ == "__main__":
    save("skipped_synchronization", files())
