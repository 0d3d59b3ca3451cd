"""The picture of the score: predicted against measured, and the errors below."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from .rows import TITLES, Part, ScoreRow

COLORS: dict[Part, str] = {"a": "#8d99ae", "b": "#2a9d8f", "c": "#d1495b", "d": "#edae49"}
BAND = 0.1
MS = 1e6


def draw(rows: Sequence[ScoreRow], ax: Axes) -> Axes:
    """One dot a row that counts, on logarithmic axes in milliseconds, with the diagonal."""
    shown = [row.measured_ns / MS for row in rows if row.counts]
    ends = [min(shown) / 2, max(shown) * 2]
    ax.plot(ends, ends, color="#1b1b1b", linewidth=0.8)
    for part, title in TITLES.items():
        members = [row for row in rows if row.part == part and row.counts]
        ax.scatter(
            [row.measured_ns / MS for row in members],
            [row.predicted_ns / MS for row in members],
            s=14,
            color=COLORS[part],
            label=f"({part}) {title}",
            alpha=0.7,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylabel("predicted, ms")
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    return _plain(ax)


def draw_errors(rows: Sequence[ScoreRow], ax: Axes) -> Axes:
    """The error of each of these rows in percent over its measured time, with a band of 10 %."""
    ax.axhspan(-100 * BAND, 100 * BAND, color="#eeeeee")
    for part in TITLES:
        members = [row for row in rows if row.part == part and row.counts]
        times, errors = [row.measured_ns / MS for row in members], [100 * row.error for row in members]
        ax.scatter(times, errors, s=14, color=COLORS[part], alpha=0.7)
    ax.set_xscale("log")
    ax.set_xlabel("measured, ms")
    ax.set_ylabel("error, %; grey: within 10 %")
    return _plain(ax)


def _plain(ax: Axes) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    return ax
