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
