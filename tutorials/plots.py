"""Axes of the tutorials' pictures."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from ddplab.simulator import plot_colours

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
