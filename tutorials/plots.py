"""Axes of the tutorials' pictures."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from simulator import plot_colours

from .exercises import shown


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


def mark_guess(
    ax: Axes,
    guess: Any,
    unit: str = "",
    *,
    x: float | None = None,
    y: float | None = None,
    scale: float = 1,
    colour: str = plot_colours.INK,
) -> None:
    """Mark the learner's guess in a finished picture, as in "you: 120 ms"; draw nothing if it is None.

    A point outside the axes is marked at their edge, by an arrow head.

    Args:
        ax: Axes whose limits are final.
        guess: The guess.
        unit: Its unit.
        x: Horizontal coordinate of the mark. None: the guess is this coordinate.
        y: Vertical coordinate of the mark. None: the guess is this coordinate.
        scale: Length of one unit of the guess on its axis.
        colour: Colour of the mark, for pictures with several curves.
    """
    if guess is None:
        return
    ax.autoscale_view()  # otherwise matplotlib computes the limits when the picture is drawn
    to_part = ax.transData - ax.transAxes
    part = to_part.transform((scale * guess if x is None else x, scale * guess if y is None else y))
    inside = np.clip(part, 0, 1)
    beyond = zip("<>v^", (part[0] < 0, part[0] > 1, part[1] < 0, part[1] > 1), strict=True)
    marker = next((arrow for arrow, is_beyond in beyond if is_beyond), "D")
    point = to_part.inverted().transform(inside)
    ax.plot(*point, marker, color=colour, clip_on=False, zorder=6, scalex=False, scaley=False)
    is_right = inside[0] > 0.5
    ax.annotate(
        f"you: {shown(guess)} {unit}".rstrip(),
        tuple(point),
        (-8 if is_right else 8, 0),
        textcoords="offset points",
        ha="right" if is_right else "left",
        va="center",
        color=colour,
        zorder=6,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.6},
    )


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
