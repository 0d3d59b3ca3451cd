"""Tutorial 12: pictures of sweeps over bucket caps."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from simulator import plot_colours

from .plots import log_ticks, new_axes, opened

CAPS_MB = (1, 10, 100, 1000)
Curve = Mapping[float, float]
"""Milliseconds by cap in MB."""


def _slower_percent(curve: Curve) -> list[float]:
    return [100 * (ms / min(curve.values()) - 1) for ms in curve.values()]


def draw_sweeps(measured: Mapping[str, Curve], spreads_ms: Mapping[str, Sequence[float]]) -> Axes:
    """Draw how much slower each cap is than the fastest of its sweep, with the published spreads."""
    ax = new_axes(8, 3.6)
    for (name, curve), colour in zip(measured.items(), plot_colours.LINES, strict=True):
        bars = [100 * spread / min(curve.values()) for spread in spreads_ms[name]]
        ax.errorbar(list(curve), _slower_percent(curve), bars, fmt="o-", capsize=3, color=colour, label=name)
    log_ticks(ax, CAPS_MB)
    ax.set_xlabel("cap, MB")
    ax.set_ylabel("% slower than its fastest")
    ax.legend(frameon=False, fontsize=9)
    return ax


def draw_predictions(measured: Mapping[str, Curve], predicted: Mapping[str, Curve]) -> Figure:
    """Draw each sweep beside its prediction, each relative to its own fastest cap."""
    figure, axes = plt.subplots(1, len(measured), figsize=(12, 2.8), layout="constrained", sharey=True)
    for ax, name, colour in zip(axes, measured, plot_colours.LINES, strict=True):
        ax.plot(list(measured[name]), _slower_percent(measured[name]), "o-", color=colour, label="measured")
        ax.plot(
            list(predicted[name]), _slower_percent(predicted[name]), "s--", color=colour, alpha=0.6, label="predicted"
        )
        ax.set_xscale("log")
        ax.set_title(name, fontsize=10)
        ax.set_xlabel("cap, MB")
        opened(ax)
    axes[0].set_ylabel("% slower than its fastest")
    axes[0].legend(frameon=False)
    return figure


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
