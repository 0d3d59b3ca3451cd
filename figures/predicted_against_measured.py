"""Predicted against measured iteration time of every configuration of the committed runs."""

from functools import cache
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes

from simulator.measure.report import Row
from validation.part_fg_runs import committed_runs

from .drawing import COMPUTATION, EXPOSED, MEASURED, SECOND, THIRD, plain, render, save

TITLE = "Predicted against measured"
SIZE = (6.4, 4.4)
TICKS_MS = (200, 300, 500, 700, 1_000, 1_500)
COLOURS = (COMPUTATION, EXPOSED, SECOND, THIRD, "#2a9d8f", "#9d4edd")


class Dots(NamedTuple):
    """Milliseconds of one model's configurations: measured by the clock, predicted, and predicted interval."""

    measured_ms: list[float]
    predicted_ms: list[float]
    interval_ms: list[tuple[float, float]]


class Scatter(NamedTuple):
    """The configurations of all models, by model."""

    by_model: dict[str, Dots]

    def errors(self) -> list[float]:
        """Predicted / measured - 1 of each configuration."""
        pairs = [
            (measured, predicted)
            for dots in self.by_model.values()
            for measured, predicted in zip(dots.measured_ms, dots.predicted_ms, strict=True)
        ]
        return [predicted / measured - 1 for measured, predicted in pairs]


@cache
def panels() -> list[Scatter]:
    """Current predictions from each run's own trace and calibration, beside its measurements."""
    rows = [row for run in committed_runs() for row in run.current.rows]
    names = dict.fromkeys(row.model for row in rows)
    by_model = {_label(name): _dots([row for row in rows if row.model == name]) for name in names}
    return [Scatter(by_model)]


def _label(model: str) -> str:
    """Return the name of a model; the trace of the emulated V100s calls its model published."""
    return "ResNet-50, emulated V100s" if model == "published" else model.rpartition(":")[2]


def _dots(rows: list[Row]) -> Dots:
    return Dots(
        [row.measured_ns / 1e6 for row in rows],
        [row.predicted_ns / 1e6 for row in rows],
        [(row.interval_ns[0] / 1e6, row.interval_ns[1] / 1e6) for row in rows],
    )


def draw(data: Scatter, ax: Axes) -> Axes:
    """Plot one dot for each configuration on logarithmic axes, and the diagonal."""
    shown = [ms for dots in data.by_model.values() for ms in (*dots.measured_ms, *dots.predicted_ms)]
    ends = [min(shown) / 1.2, max(shown) * 1.2]
    ax.plot(ends, ends, color=MEASURED, linewidth=0.8)
    for (model, dots), colour in zip(data.by_model.items(), COLOURS, strict=False):
        predicted = np.array(dots.predicted_ms)
        lows, highs = (np.array(edge) for edge in zip(*dots.interval_ms, strict=True))
        errors = [np.maximum(0, predicted - lows), np.maximum(0, highs - predicted)]
        ax.errorbar(
            dots.measured_ms, predicted, yerr=errors, fmt="o", color=colour, markersize=4, linewidth=0.7, label=model
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks(TICKS_MS, [str(tick) for tick in TICKS_MS])
    ax.set_yticks(TICKS_MS, [str(tick) for tick in TICKS_MS])
    ax.minorticks_off()
    ax.set_xlabel("measured, ms")
    ax.set_ylabel("predicted, ms; bars: 90 % interval")
    ax.legend(frameon=False, fontsize=8)
    return plain(ax)


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    (scatter,) = panels()
    errors = scatter.errors()
    return (
        f"Measured by the clock: {len(errors)} configurations (bucket caps and bucket orders) of "
        f"{len(scatter.by_model)} models on two to sixteen real Gloo ranks, over loopback and virtual links, on two "
        "cores; some models compute, others are emulated and sleep for the times of a GPU. Predicted: from one trace "
        "and one calibration for each run, recorded beforehand. Mean absolute error "
        f"{np.mean(np.abs(errors)):.1%}, worst {max(errors, key=abs):+.1%}. The full score, with published "
        "measurements on GPUs, is in [validation/score.md](../validation/score.md)."
    )


def main() -> None:
    """Draw the figure and write its files."""
    save("predicted_against_measured", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
