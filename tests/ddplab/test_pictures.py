"""Pictures that commands write: no text covers another or leaves the picture, and no axes are squeezed."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

ROOT = Path(__file__).parents[2]
TRACE = ROOT / "validation" / "runs" / "gru-1gbit-3ranks" / "trace.json.gz"

LEAST_SHARE = 1 / 3
"""Least width of axes, as a share of their column of the figure."""
UNSEEN = 1.0
"""Overlap in pixels that nobody sees."""


def faults(figure: Figure) -> list[str]:
    """What a reader would see: texts that overlap or are cut off, and axes without room."""
    FigureCanvasAgg(figure).draw()
    hidden = {label for ax in figure.axes for axis in (ax.xaxis, ax.yaxis) for label in _labels_outside(axis)}
    texts = {
        text: text.get_window_extent()
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and text not in hidden and not _is_off(text)
    }
    found = [
        f"{one.get_text()!r} and {other.get_text()!r} overlap"
        for one, other in combinations(texts, 2)
        if _overlap(texts[one], texts[other]) > UNSEEN and not _are_parallel_lines(one, other)
    ]
    whole = figure.bbox.padded(UNSEEN)
    for text, extent in texts.items():
        if not (whole.contains(*extent.min) and whole.contains(*extent.max)):
            found.append(f"{text.get_text()!r} is cut off")
    for ax in figure.axes:
        place = ax.get_subplotspec()
        if place is not None and ax.get_label() != "<colorbar>":
            columns = len(place.colspan) / place.get_gridspec().ncols
            if ax.bbox.width < LEAST_SHARE * columns * figure.bbox.width:
                found.append(f"the axes {ax.get_title(loc='left')!r} are {ax.bbox.width:.0f} pixels wide")
    return found


def _labels_outside(axis: Axis) -> list[Text]:
    """Labels of ticks beyond the limits, which are not drawn."""
    low, high = sorted(axis.get_view_interval())
    ticks = [*axis.majorTicks, *axis.minorTicks]
    return [label for tick in ticks if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)]


def _is_off(text: Text) -> bool:
    """Whether the text names axes whose frame and labels are switched off."""
    return text.axes is not None and not text.axes.axison and text not in text.axes.texts


def _are_parallel_lines(one: Text, other: Text) -> bool:
    """Whether slanted texts, whose extents overlap, stand side by side with room for a line between their anchors."""
    if one.get_rotation() != other.get_rotation() or one.get_rotation() % 90 == 0:
        return False
    (x, y), angle = _anchor(other) - _anchor(one), np.radians(one.get_rotation())
    return bool(abs(y * np.cos(angle) - x * np.sin(angle)) >= one.get_fontsize() * one.figure.dpi / 72)


def _anchor(text: Text) -> np.ndarray:
    return np.array(text.get_transform().transform(text.get_unitless_position()))


def _overlap(one: Bbox, other: Bbox) -> float:
    width = min(one.x1, other.x1) - max(one.x0, other.x0)
    return min(width, min(one.y1, other.y1) - max(one.y0, other.y0))


COMMANDS = (
    ("predict", TRACE, "--fabric", "pod.yaml", "--world-size", 64, "--timeline", "picture.png"),
    ("predict", TRACE, "--fabric", "pod.yaml", "--caps", "0.01", "--timeline", "picture.png"),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(str(word) for word in words if word != TRACE))
def test_a_picture_of_a_command_can_be_read(printed, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    Path("pod.yaml").write_text("levels:\n  network: {latency_us: 5, gb_per_s: 12}\n")
    drawn = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **named: drawn.append(figure) or savefig(figure, *args, **named)
    )
    printed(*words)
    assert [fault for figure in drawn for fault in faults(figure)] == []
    assert len(drawn) == 1
