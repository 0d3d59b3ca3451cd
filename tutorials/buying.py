"""Tutorial 9: pictures of predicted efficiencies."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from simulator import plot_colours
from simulator.predicted_iteration import Prediction

from .plots import mark_guess, new_axes

Scaled = Mapping[tuple[str, int], Prediction]
"""Predictions by network and number of GPUs."""


def efficiencies(prediction: Prediction) -> tuple[float, float, float]:
    """The efficiency in percent, and both ends of its interval."""
    low_ns, high_ns = prediction.interval_ns
    middle, low, high = (100 * prediction.compute_ns / ns for ns in (prediction.iteration_ns, high_ns, low_ns))
    return middle, low, high


def draw_scaling(scaled: Scaled, identical: Scaled, guesses: Mapping[str, float | None]) -> Axes:
    """Draw the efficiency of each network over the number of GPUs, with intervals; dotted for identical GPUs.

    Args:
        scaled: Predictions for GPUs that differ.
        identical: The same for GPUs that do not.
        guesses: The learner's percent at the largest number, by network; None: no guess.
    """
    ax = new_axes(8, 3.6)
    names = list(dict.fromkeys(name for name, _ in scaled))
    sizes = list(dict.fromkeys(gpus for _, gpus in scaled))
    for name, colour in zip(names, plot_colours.LINES, strict=False):
        middle, low, high = zip(*(efficiencies(scaled[name, gpus]) for gpus in sizes), strict=True)
        ax.fill_between(sizes, low, np.minimum(high, 100), color=colour, alpha=0.2, linewidth=0)
        ax.plot(sizes, middle, "o-", color=colour, label=name)
        ax.plot(sizes, [efficiencies(identical[name, gpus])[0] for gpus in sizes], ":", color=colour)
    ax.plot([], [], ":", color=plot_colours.INK, label="identical GPUs")
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, [str(gpus) for gpus in sizes])
    ax.set_ylim(0, 102)
    ax.set_xlabel("GPUs")
    ax.set_ylabel("efficiency, %")
    ax.legend(frameon=False, loc="lower left")
    for name, guess in guesses.items():
        mark_guess(ax, guess, "%", x=sizes[-1], colour=plot_colours.LINES[names.index(name)])
    return ax


def show_iteration(prediction: Prediction, title: str) -> None:
    """Draw and show the iteration of rank 0 with its efficiency behind the title, as a slider requires."""
    _, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
    prediction.plot(ax, ranks=[0])
    middle, low, high = efficiencies(prediction)
    ax.set_title(f"{title}: efficiency {middle:.0f} % ({low:.0f} to {min(high, 100):.0f} %)", loc="left")
    plt.show()


def interval(values: Sequence[float], unit: str, digits: int = 2) -> str:
    """A median and both ends of its interval in words, with this number of significant digits.

    More digits are printed if the three values would otherwise look equal.
    """
    while digits < 6 and len({f"{value:.{digits}g}" for value in values}) < len(set(values)):
        digits += 1
    middle, low, high = (f"{value:#.{digits}g}".rstrip(".") for value in values)
    return f"{middle} {unit} ({low} to {high})"
