"""Axes of the tutorials' pictures."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from simulator import plot_colours


def new_axes(width: float = 7, height: float = 3) -> Axes:
    """A new picture of this size in inches, open above and on the right."""
    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    return opened(ax)


def opened(ax: Axes) -> Axes:
    """The axes without their upper and right spines."""
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def log_ticks(ax: Axes, values: Sequence[float]) -> Axes:
    """Scale the horizontal axis logarithmically, with ticks at these values only."""
    ax.set_xscale("log")
    ax.set_xticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
    return ax


def draw_table(ax: Axes, words: Sequence[Sequence[str]], rows: Sequence[str], columns: Sequence[str]) -> Axes:
    """Draw words as a table of boxes; boxes with the same word have the same shade.

    Args:
        ax: Axes to draw on; returned.
        words: By row and column; at most four different ones.
        rows: Labels of the rows, from the top.
        columns: Labels of the columns.
    """
    shades = ("white", plot_colours.HIDDEN, plot_colours.FORWARD, plot_colours.COPIES)
    seen = list(dict.fromkeys(word for row in words for word in row))
    for place, row in enumerate(words):
        for number, word in enumerate(row):
            colour = shades[seen.index(word)]
            ax.add_patch(
                Rectangle((number, place), 1, 1, facecolor=colour, edgecolor=plot_colours.INK, linewidth=0.8)
            )
            ax.text(number + 0.5, place + 0.5, word, ha="center", va="center")
    ax.set_xlim(0, len(columns))
    ax.set_ylim(len(rows), 0)
    ax.set_xticks([number + 0.5 for number in range(len(columns))], columns)
    ax.set_yticks([place + 0.5 for place in range(len(rows))], rows)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return ax
