"""Axes of the tutorials' pictures."""

from collections.abc import Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes


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
