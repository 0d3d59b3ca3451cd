"""Residual plot: the error of each prediction beside the errors of simpler predictions, with a band of +-10 %."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from ddplab.simulator.plot_colours import COMPRESSION, COMPUTATION, COPIES, EXPOSED, INK, SMALL

SMALL_ERROR = 0.1
"""Half-width of the band of small errors, as a fraction."""
OURS = "ddplab"
MARKS = {
    "perfect scaling": ("<", COMPUTATION),
    "no overlap": (">", EXPOSED),
    "naive overlap": ("x", COPIES),
    "pipelined overlap": ("+", COMPRESSION),
    "ring factor": ("d", EXPOSED),
    OURS: ("o", INK),
}
"""Marker and colour by method."""
GAP = 1.3
"""Distance of two groups, where that of two configurations of a group is 1."""


@dataclass(frozen=True, kw_only=True)
class Residual:
    """The errors of one configuration, as fractions: predicted / measured - 1."""

    error: float  # of our prediction
    baselines: Mapping[str, float] = field(default_factory=dict)  # of simpler predictions, by name
    interval: tuple[float, float] | None = None  # of both ends of our 90 % interval; None: not drawn


def draw_residuals(groups: Mapping[str, Sequence[Residual]], ax: Axes, *, named: bool = True) -> Axes:
    """Draw the errors in percent over one line for each configuration.

    Args:
        groups: The configurations, by the name that stands to the left of each group.
        ax: The axes to draw on; returned.
        named: Whether to name the marks above, and the errors below. False: other axes of the figure do.
    """
    ax.axvspan(-100 * SMALL_ERROR, 100 * SMALL_ERROR, color=SMALL, zorder=0)
    ax.axvline(0, color=INK, linewidth=0.6, zorder=1)
    middles, line = [], 0.0
    for residuals in groups.values():
        middles.append(line + (len(residuals) - 1) / 2)
        for residual in residuals:
            _draw_line(residual, line, ax)
            line += 1
        line += GAP - 1
        ax.axhline(line - GAP / 2, color=SMALL, linewidth=1, zorder=0)
    ax.set_yticks(middles, list(groups), fontsize=8)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(line - GAP / 2, -GAP / 2)
    ax.spines[["top", "right", "left"]].set_visible(False)
    if not named:
        return ax
    ax.set_xlabel("error of the prediction, %; grey: within 10 %; bars: 90 % intervals")
    shown = dict.fromkeys(name for residuals in groups.values() for one in residuals for name in one.baselines)
    _name_marks([OURS, *shown], ax)
    return ax


def _draw_line(residual: Residual, line: float, ax: Axes) -> None:
    for method, error in (*residual.baselines.items(), (OURS, residual.error)):
        marker, colour = MARKS[method]
        size = 4.5 if method == OURS else 4
        ax.plot(100 * error, line, marker, color=colour, markersize=size, markeredgewidth=1.1, zorder=2)
    if residual.interval is not None:
        low, high = residual.interval
        ax.plot([100 * low, 100 * high], [line, line], color=INK, linewidth=1, zorder=2)


def _name_marks(methods: Sequence[str], ax: Axes) -> None:
    """Name the marks in one row above the axes; labels at the data would cover each other near zero."""
    handles = [
        Line2D([], [], linestyle="", marker=MARKS[name][0], color=MARKS[name][1], markersize=4.5, label=name)
        for name in methods
    ]
    ax.legend(
        handles=handles, ncols=len(handles), fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(-0.02, 1.0),
        handletextpad=0.1, columnspacing=1.0, borderpad=0.1,
    )  # fmt: skip
