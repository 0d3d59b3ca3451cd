"""Drawing functions of all figures: colours, plain axes, and byte-for-byte reproducible files."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reference.files import write_atomically

FOLDER = Path(__file__).parent
DATA = FOLDER / "data"
COMPUTATION, EXPOSED, HIDDEN = "#219ebc", "#d1495b", "#8ecae6"
MEASURED, SECOND, THIRD = "#1b1b1b", "#edae49", "#8d99ae"
FORMATS = ("png", "svg")

Panel = TypeVar("Panel")


def render(
    draw: Callable[[Panel, Axes], Axes], panels: Sequence[Panel], *, size: tuple[float, float] = (5, 3.4)
) -> dict[str, bytes]:
    """Draw panels of `size` inches side by side; return the bytes of a PNG and an SVG, by format."""
    figure = Figure(figsize=(size[0] * len(panels), size[1]), layout="constrained")
    for panel, ax in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        draw(panel, ax)
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
