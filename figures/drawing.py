"""Drawing functions of all figures: plain axes, labels at the data, and byte-for-byte reproducible files."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddplab.reference.files.writing import write_atomically

FOLDER = Path(__file__).parent
DATA = FOLDER / "data"
FORMATS = ("png", "svg")
LINE_HEIGHT = 0.07
"""Smallest distance of two labels, as a fraction of the axes' height."""

PERCENTS = (1, 2, 5, 10, 20, 50, 100)
"""Ticks of `draw_lanes`."""

Panel = TypeVar("Panel")


def render(
    draw: Callable[[Panel, Axes], Axes],
    panels: Sequence[Panel],
    *,
    size: tuple[float, float] = (5, 3.4),
    shared: Literal["", "x", "y"] = "",
) -> dict[str, bytes]:
    """Draw panels of `size` inches side by side; return the bytes of a PNG and an SVG, by format.

    Args:
        draw: Draws a panel on the given axes.
        panels: The data of each panel.
        size: Width and height of a panel.
        shared: The axis that all panels share; a shared `y` is labelled once, on the left.
    """
    figure = Figure(figsize=(size[0] * len(panels), size[1]), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False, sharex=shared == "x", sharey=shared == "y")[0]
    for panel, ax in zip(panels, all_axes, strict=True):
        draw(panel, ax)
        if shared == "y" and ax is not all_axes[0]:
            ax.set_ylabel("")
    files = {}
    with mpl.rc_context({"svg.hashsalt": "ddplab", "svg.fonttype": "none"}):
        for format_, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
            data = BytesIO()
            figure.savefig(data, format=format_, dpi=120, metadata=metadata)
            files[format_] = data.getvalue()
    return files


def save(name: str, files: dict[str, bytes], folder: Path = FOLDER) -> None:
    """Write the files as `NAME.png` and `NAME.svg`."""
    for format_, data in files.items():
        write_atomically(folder / f"{name}.{format_}", data)


def plain(ax: Axes) -> Axes:
    """Remove the upper and right border, and add a faint horizontal grid."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25)
    return ax


class Label(NamedTuple):
    """A label to the right of a line: its text, the line's last point, and the line's colour."""

    text: str
    x: float
    y: float
    colour: str


def label_lines(labels: Sequence[Label], ax: Axes) -> None:
    """Write each label beside the end of its line, moved up where labels would cover each other.

    Call it when the limits of the axes are final.
    """
    to_axes = ax.transData + ax.transAxes.inverted()
    placed = sorted((to_axes.transform((one.x, one.y))[1], one) for one in labels)
    lowest = -1.0
    for height, label in placed:
        lowest = max(height, lowest + LINE_HEIGHT)
        across = to_axes.transform((label.x, label.y))[0]
        ax.text(
            across + 0.02, lowest, label.text, transform=ax.transAxes, fontsize=8, color=label.colour, va="center"
        )  # fmt: skip


class Lane(NamedTuple):
    """One line of `draw_lanes`, in percent."""

    label: str
    mean: float
    worst: float
    colour: str
    marker: str = "o"


def draw_lanes(lanes: Sequence[Lane], ax: Axes, *, limits: tuple[float, float], xlabel: str) -> Axes:
    """Draw a line from the mean to the worst of each lane, on a logarithmic axis with these limits."""
    for place, lane in enumerate(lanes):
        colour = lane.colour
        ax.plot([lane.mean, lane.worst], [place, place], color=colour, linewidth=2.5, solid_capstyle="butt")
        ax.plot(lane.mean, place, lane.marker, color=colour, markersize=9, markeredgewidth=2)
        ax.plot(lane.worst, place, "|", color=colour, markersize=14, markeredgewidth=2.5)
        ax.text(lane.worst * 1.06, place, f"at worst {lane.worst:.0f} %", fontsize=8, color=colour, va="center")
        mean = f"on average {lane.mean:.1f} %"
        ax.text(lane.mean * 0.9, place, mean, fontsize=8, color=colour, ha="right", va="center")
    ax.set_xscale("log")
    ax.set_xlim(*limits)
    ax.set_xticks(PERCENTS, [f"{tick} %" for tick in PERCENTS])
    ax.minorticks_off()
    ax.set_yticks(range(len(lanes)), [lane.label for lane in lanes])
    ax.set_ylim(len(lanes) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.set_xlabel(xlabel)
    return ax
