"""Tutorial 7: its model, for `--model tutorials.replaying:convnet`, its measurements on ranks, and its pictures."""

import statistics
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

from ddplab import Fabric, Prediction, RankPool, Trace
from ddplab.calibration.calibrate import measure_collectives
from ddplab.models import Model
from ddplab.prediction_errors import ValidationRow
from ddplab.reference.bucketing import MIB
from ddplab.simulator import plot_colours
from ddplab.simulator.results.timeline_plot import draw_timeline

from .plots import mark_guess

CHANNELS, BATCH, SIDE = (32, 64, 128, 256), 4, 32
WIDTH, LAYERS, CLASSES = 1024, 5, 100


def convnet() -> Model:
    """Build a network whose largest gradients are ready first: four convolutions, then matrices of 4 MiB each."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in CHANNELS:
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        inputs = outputs
    layers += [nn.Flatten(), nn.Linear(inputs * (SIDE // 2 ** len(CHANNELS)) ** 2, WIDTH), nn.ReLU()]
    for _ in range(LAYERS - 1):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    layers.append(nn.Linear(WIDTH, CLASSES))
    images, labels = torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(CLASSES, (BATCH,))
    return nn.Sequential(*layers), lambda module: nn.functional.cross_entropy(module(images), labels)


SIZES_BYTES = [2**power for power in (12, 18, 22, 25)]
"""Messages of which `collectives` times the all-reduce."""


def passes_ms(trace: Trace) -> tuple[float, float]:
    """Milliseconds of the forward and the backward pass of the last iteration of rank 0."""
    one = trace.ranks[0].iterations[-1]
    return (one.forward_end_ns - one.forward_start_ns) / 1e6, (one.backward_end_ns - one.backward_start_ns) / 1e6


def collectives(pool: RankPool) -> Fabric:
    """Measure collectives, copies and launches, with few repetitions and without the model's slow-downs."""
    return measure_collectives(pool, SIZES_BYTES, 2)


def all_reduce_ms(fabric: Fabric, mib: float) -> float:
    """Milliseconds of an all-reduce of two ranks."""
    return fabric.all_reduce_ns(int(mib * MIB), 2) / 1e6


TOO_BUSY = "this machine is too busy: the costs above do not repeat"
DIFFER_AT_MOST = 0.1
"""Largest difference of two turns of training, as a fraction of the shorter one, at which a time is printed."""


def too_busy(*, calm: bool, differ: float) -> str:
    """Why no time of training is printed, empty if times are: costs must repeat, and turns `differ` little."""
    if calm and differ > DIFFER_AT_MOST:
        return f"this machine is too busy: turns differ by more than {DIFFER_AT_MOST:.0%}"
    return "" if calm else TOO_BUSY


METHODS = {
    "ddplab": ("error", "o", plot_colours.INK),
    "perfect scaling": ("perfect_scaling_error", "v", plot_colours.QUIET),
    "no overlap": ("no_overlap_error", "^", plot_colours.EXPOSED),
    "naive overlap": ("naive_overlap_error", "s", plot_colours.COPIES),
    "pipelined overlap": ("pipelined_overlap_error", "D", plot_colours.FORWARD),
}
"""By method: the field of a row with its error, a marker and a colour."""
BAND_PERCENT = 10
DODGE = 0.14
"""Horizontal distance of two methods, where two rows are 1 apart."""


def mean_error(rows: Sequence[ValidationRow], method: str) -> float:
    """Mean absolute error of a method, as a fraction."""
    return statistics.fmean(abs(getattr(row, METHODS[method][0])) for row in rows)


def draw_rungs(rungs: Mapping[str, Sequence[ValidationRow]], guess_percent: float | None) -> Figure:
    """Draw the errors of the rungs side by side, by their titles; see `draw_residuals`.

    Args:
        rungs: Rows by title.
        guess_percent: The learner's guess of the error of the naive overlap on the last rung.
    """
    figure, axes = plt.subplots(1, len(rungs), figsize=(11, 3.8), layout="constrained", sharey=True)
    for ax, (title, rows) in zip(axes, rungs.items(), strict=True):
        draw_residuals(rows, ax)
        ax.set_title(title, loc="left", fontsize=10)
    axes[0].set_ylabel("error, %")
    axes[0].set_ylim(-65, 65)
    mark_guess(axes[-1], guess_percent, "%", x=0.5, colour=METHODS["naive overlap"][2])
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False, fontsize=9
    )
    return figure


def show_timeline(prediction: Prediction) -> None:
    """Draw and show the iteration of rank 0, as a slider requires."""
    _, ax = plt.subplots(figsize=(9, 2.8), layout="constrained")
    draw_timeline(prediction, ax, ranks=[0])
    plt.show()


def draw_residuals(rows: Sequence[ValidationRow], ax: Axes) -> Axes:
    """Draw the error of each method for each row in percent, over a band of 10 % to either side.

    The markers of a row stand side by side, so that equal errors do not hide each other.
    """
    ax.axhspan(-BAND_PERCENT, BAND_PERCENT, color=plot_colours.SMALL, zorder=0)
    ax.axhline(0, color=plot_colours.INK, linewidth=0.8, zorder=1)
    for number, (name, (field, marker, colour)) in enumerate(METHODS.items()):
        errors = [100 * getattr(row, field) for row in rows]
        places = [place + (number - len(METHODS) // 2) * DODGE for place in range(len(rows))]
        ax.plot(places, errors, marker, color=colour, label=name, zorder=2)
    words = [row.configuration.cap + ("" if row.order == "ready" else f"\n{row.order}") for row in rows]
    ax.set_xticks(range(len(rows)), words)
    ax.margins(x=0.15)
    if not rows:
        ax.text(0.5, 0.6, "not reported", transform=ax.transAxes, ha="center")
    ax.spines[["top", "right"]].set_visible(False)
    return ax
