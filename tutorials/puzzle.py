"""Tutorial 8: pictures of published sweeps over bucket caps, and of their predictions."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddplab.simulator import plot_colours

from .plots import log_ticks, mark_guess, new_axes, opened
from .published import Curve, Sweep

CAPS_MB = (1, 10, 100, 1000)


def _slower_percent(curve: Curve) -> list[float]:
    return [100 * (ms / min(curve.values()) - 1) for ms in curve.values()]


def draw_sweeps(sweeps: Mapping[str, Sweep], guesses_mb: Mapping[str, Sequence[float] | None]) -> Axes:
    """Draw how much slower each cap is than the fastest of its sweep, with the published spreads.

    Args:
        sweeps: By name.
        guesses_mb: The caps that the learner expects to be the fastest, by name; a row of marks below the sweeps.
    """
    ax = new_axes(9, 3.6)
    colours = dict(zip(sweeps, plot_colours.LINES, strict=True))
    for name, sweep in sweeps.items():
        curve = sweep.measured_ms
        bars = [100 * row.spread_ms / min(curve.values()) for row in sweep.rows]
        label = f"{name}, {sweep.reducer.node}"
        ax.errorbar(list(curve), _slower_percent(curve), bars, fmt="o-", capsize=3, color=colours[name], label=label)
    log_ticks(ax, CAPS_MB)
    ax.set_xlabel("cap, MB")
    ax.set_ylabel("% slower than its fastest")
    ax.set_yticks(range(0, 16, 5))
    ax.legend(frameon=False, fontsize=9)
    given = {name: caps for name, caps in guesses_mb.items() if caps}
    if given:
        ax.set_ylim(bottom=-4 - 1.5 * len(given))
    for row, (name, caps) in enumerate(given.items()):
        for cap in caps:
            mark_guess(ax, cap, y=-4 - 1.5 * row, colour=colours[name])
    return ax


def draw_predictions(sweeps: Mapping[str, Sweep], predicted: Mapping[str, Curve]) -> Figure:
    """Draw each sweep beside its prediction, each relative to its own fastest cap."""
    figure, axes = plt.subplots(1, len(sweeps), figsize=(12, 2.8), layout="constrained", sharey=True)
    for ax, (name, sweep), colour in zip(axes, sweeps.items(), plot_colours.LINES, strict=True):
        measured, ours = _slower_percent(sweep.measured_ms), _slower_percent(predicted[name])
        ax.plot(list(sweep.measured_ms), measured, "o-", color=colour, label="measured")
        ax.plot(list(predicted[name]), ours, "s--", color=colour, alpha=0.6, label="predicted")
        ax.set_xscale("log")
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("cap, MB")
        opened(ax)
    axes[0].set_ylabel("% slower than its fastest")
    axes[0].legend(frameon=False)
    return figure


def draw_errors(sweeps: Mapping[str, Sweep], predicted: Mapping[str, Curve], also: Mapping[str, Curve]) -> Axes:
    """Draw the error of each prediction in percent.

    Args:
        sweeps: What was measured.
        predicted: Predictions, one for each sweep.
        also: Further predictions, drawn dashed, by the name of their sweep.
    """
    ax = new_axes(8, 3.4)
    for (name, sweep), colour in zip(sweeps.items(), plot_colours.LINES, strict=True):
        for style, curves, label in (("o-", predicted, name), ("s--", also, f"{name}, slowed by 3")):
            if name in curves:
                errors = [100 * (curves[name][cap] / ms - 1) for cap, ms in sweep.measured_ms.items()]
                ax.plot(list(sweep.measured_ms), errors, style, color=colour, label=label)
    ax.axhline(0, color=plot_colours.INK, linewidth=0.8)
    log_ticks(ax, CAPS_MB)
    ax.set_xlabel("cap, MB")
    ax.set_ylabel("error of the prediction, %")
    ax.legend(frameon=False, fontsize=9, ncols=2)
    return ax


def draw_knobs(tables: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """Draw one table for each start: how much slower each cap is than the fastest, with one knob changed in a row."""
    figure, axes = plt.subplots(1, len(tables), figsize=(12, 4), layout="constrained")
    for ax, (start, table) in zip(axes, tables.items(), strict=True):
        slower = np.array([_slower_percent(curve) for curve in table.values()])
        ax.imshow(slower, cmap="Reds", vmin=0, vmax=8, aspect="auto")
        for (row, column), percent in np.ndenumerate(slower):
            is_fastest = percent < 0.1
            word, weight = ("fastest", "bold") if is_fastest else (f"+{percent:.1f} %", "normal")
            ax.text(column, row, word, ha="center", va="center", fontsize=9, weight=weight)
        ax.set_xticks(range(len(CAPS_MB)), [f"{cap} MB" for cap in CAPS_MB])
        ax.set_yticks(range(len(table)), list(table))
        ax.set_title(start, loc="left", fontsize=10)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    return figure


def draw_rates(rates: Sequence[float], by_rate: Sequence[Curve], fits: float) -> Axes:
    """Draw how much slower each cap is than the fastest over the rate of the link, and the rate at which all fits."""
    ax = new_axes(8, 3.2)
    for place, (cap, colour) in enumerate(zip(CAPS_MB, plot_colours.LINES, strict=False)):
        ax.plot(rates, [_slower_percent(curve)[place] for curve in by_rate], "o-", color=colour, label=f"{cap} MB")
    ax.axvline(fits, color=plot_colours.QUIET, linestyle=":")
    log_ticks(ax, (20, 30, 40, 60, 80))
    ax.set_xlabel("link, GB/s")
    ax.set_ylabel("% slower than the fastest")
    ax.legend(frameon=False)
    return ax
