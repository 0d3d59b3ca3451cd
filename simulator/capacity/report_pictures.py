"""Pictures of a report: curves by number of GPUs and time against cost, by matplotlib, and stacked bars."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from io import StringIO
from math import nan
from typing import TYPE_CHECKING, Any

from .. import plot_colours

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

Row = Mapping[str, Any]
"""An element of `sizes` or of `systems` in `CapacityPlan.to_json`."""

COLOURS = ("forward", "computation", "exposed", "hidden", "copies", "compression", "quiet", "ink")
"""Names of colours in `plot_colours` and, in the page, of CSS variables."""
LINES = ("computation", "exposed", "copies", "compression", "ink")
"""Colours of systems and of causes, the first one first; as `plot_colours.LINES`."""
MARKERS, SIGNS = "os^Dv", "●■▲◆▼"
"""Shapes of the points of systems, which repeat the meaning of their colours, in pictures and in legends."""
SIZE_INCHES = (4.6, 3.0)
LEAST_RATIO = 1.6
"""Least ratio of two labelled numbers of GPUs."""
LEAST_RANGE = 0.001
"""Least distance of the ends of an axis, as a fraction of the upper one."""


def svg(draw: "Callable[[Row, Axes], None]", document: Row, label: str) -> str:
    """Return a picture as SVG, with the colours of the page; `label` says what it shows."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    drawn = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": label, "text.parse_math": False, "font.size": 9}):
        figure = Figure(SIZE_INCHES, layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
        axes.margins(0.06, 0.12)
        draw(document, axes)
        for (low, high), set_limits in (
            (axes.dataLim.intervalx, axes.set_xlim),
            (axes.dataLim.intervaly, axes.set_ylim),
        ):
            if high - low < LEAST_RANGE * high:  # a single point; matplotlib would make the axis too short to label
                set_limits(low / LEAST_RATIO, high * LEAST_RATIO)
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
    picture = drawn.getvalue()[drawn.getvalue().index("<svg") :].replace("#000000", plot_colours.INK)
    for name in COLOURS:
        picture = picture.replace(getattr(plot_colours, name.upper()), f"var(--{name})")
    return picture.replace("<svg ", f'<svg role="img" aria-label="{escape(label)}, with 90 % intervals" ', 1)


def draw_throughput(document: Row, axes: "Axes") -> None:
    """Draw throughput by number of GPUs: bands, ideal lines, knees, and the throughput that the deadline needs."""
    asked = document["question"]
    _number_axes(axes, document, "samples/s")
    for style, system, rows in _systems(document):
        _curve(axes, "samples_per_s", style, rows)
        ideal = [row["samples_per_s"] / row["efficiency"] if row["efficiency"] else nan for row in rows]
        axes.plot([row["world_size"] for row in rows], ideal, "--", color=style["color"], linewidth=1)
        if (first := system["knee_earliest"]) is not None:
            last = system["knee_latest"] or rows[-1]["world_size"]
            axes.axvspan(first, last, color=style["color"], alpha=0.1, linewidth=0)
        if (knee := system["knee"]) is not None:
            axes.axvline(knee, color=style["color"], linewidth=1, linestyle="--")
            axes.annotate("knee", (knee, 0.93), (4, 0), ("data", "axes fraction"), **OFFSET)
    if asked["deadline_hours"] is not None:
        _limit(axes, asked["samples"] / asked["deadline_hours"] / 3600, "deadline")


def draw_efficiency(document: Row, axes: "Axes") -> None:
    """Draw efficiency by number of GPUs: bands and the target."""
    target = document["systems"][0]["target_efficiency"]
    _number_axes(axes, document, "efficiency")
    axes.set_yscale("linear")
    axes.yaxis.set_major_formatter("{x:.0%}")
    for style, _, rows in _systems(document):
        _curve(axes, "efficiency", style, rows)
    _limit(axes, target, f"target {target:.3%}".replace(".000", ""))


def draw_costs(document: Row, axes: "Axes") -> None:
    """Draw time against cost: intervals, and a line through the choices that no other beats in both."""
    asked = document["question"]
    axes.set(xscale="log", yscale="log", xlabel="hours", ylabel=document["currency"])
    _plain_labels(axes.xaxis, axes.yaxis)
    front = sorted((row for row in document["sizes"] if row["on_front"]), key=lambda row: float(row["hours"]))
    axes.plot([row["hours"] for row in front], [row["cost"] for row in front], ":", color=plot_colours.INK)
    for row in front:
        axes.annotate(f"{row['world_size']:,}", (row["hours"], row["cost"]), (0, -14), ha="center", **OFFSET)
    for style, _, rows in _systems(document):
        across, up = (_middle_and_errors(rows, field) for field in ("hours", "cost"))
        axes.errorbar(across[0], up[0], up[1], across[1], linestyle="", linewidth=1, **style)
    if asked["deadline_hours"] is not None:
        axes.axvline(asked["deadline_hours"], color=plot_colours.INK, linestyle=":")
        axes.annotate("deadline", (asked["deadline_hours"], 0.93), (4, 0), ("data", "axes fraction"), **OFFSET)
    if asked["budget"] is not None:
        _limit(axes, asked["budget"], "budget")


OFFSET: dict[str, Any] = {"textcoords": "offset points"}


def _systems(document: Row) -> Iterator[tuple[dict[str, Any], Row, list[Row]]]:
    """Yield colour and marker, plan and rows of `sizes` of each system."""
    for number, one in enumerate(document["systems"]):
        colour = getattr(plot_colours, LINES[number % len(LINES)].upper())
        rows = [row for row in document["sizes"] if row["system"] == one["system"]]
        yield {"color": colour, "marker": MARKERS[number % len(MARKERS)], "markersize": 4}, one, rows


def _number_axes(axes: "Axes", document: Row, amount: str) -> None:
    """Make axes for an amount by number of GPUs, of which as many are labelled as there is room for."""
    labelled: list[int] = []
    for count in sorted({row["world_size"] for row in document["sizes"]}):
        if not labelled or count >= LEAST_RATIO * labelled[-1]:
            labelled.append(count)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel=amount)
    _plain_labels(axes.xaxis, axes.yaxis)
    axes.set_xticks(labelled, [f"{count:,}" for count in labelled], rotation=30 if len(labelled) > 6 else 0)


def _plain_labels(*both: "Axis") -> None:
    """Label powers of ten, and their multiples where there are few, by plain numbers."""
    from matplotlib.ticker import NullLocator

    for axis in both:
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter("{x:,.12g}")


def _middle_and_errors(rows: Sequence[Row], field: str) -> tuple[list[float], list[list[float]]]:
    middle = [row[field] for row in rows]
    low, high = ([row[field + end] for row in rows] for end in ("_low", "_high"))
    below = [max(0.0, one - other) for one, other in zip(middle, low, strict=True)]
    above = [max(0.0, other - one) for one, other in zip(middle, high, strict=True)]
    return middle, [below, above]


def _curve(axes: "Axes", field: str, style: dict[str, Any], rows: Sequence[Row]) -> None:
    """Draw the curve of one system with its band and points."""
    counts = [row["world_size"] for row in rows]
    middle, errors = _middle_and_errors(rows, field)
    axes.errorbar(counts, middle, errors, elinewidth=0.7, linewidth=1.8, **style)
    low, high = ([row[field + end] for row in rows] for end in ("_low", "_high"))
    axes.fill_between(counts, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _limit(axes: "Axes", value: float, words: str) -> None:
    """Draw a horizontal line for a limit."""
    axes.axhline(value, color=plot_colours.INK, linestyle=":")
    axes.annotate(words, (1, value), (0, 3), ("axes fraction", "data"), ha="right", **OFFSET)


def stacked_bars(bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> str:
    """Return stacked bars on one scale, each below its words, and a legend.

    Args:
        bars: The sizes of the parts of each bar.
        colours: The colour of each part; parts of one colour share an entry of the legend.
    """
    whole = max(sum(parts.values()) for parts in bars.values()) or 1
    shown = ""
    for words, parts in bars.items():
        pieces = "".join(
            f'<span style="width: {100 * parts.get(name, 0) / whole:.3f}%; background: var(--{colour})"></span>'
            for name, colour in colours.items()
        )
        shown += f'<p>{escape(words)}</p><div class="bar" role="img" aria-label="{escape(words)}">{pieces}</div>'
    used = [name for name in colours if any(parts.get(name) for parts in bars.values())]
    entries = [
        (colour, "■", ", ".join(name.replace("_", " ") for name in used if colours[name] == colour))
        for colour in dict.fromkeys(colours[name] for name in used)
    ]
    return f'<div class="bars">{shown}</div>{_legend(entries)}'


def legend(systems: Sequence[Row]) -> str:
    """Return a legend with colour and marker of each system."""
    return _legend(
        (LINES[number % len(LINES)], SIGNS[number % len(SIGNS)], one["system"]) for number, one in enumerate(systems)
    )


def _legend(entries: "Sequence[tuple[str, str, str]] | Iterator[tuple[str, str, str]]") -> str:
    items = (
        f'<li><span aria-hidden="true" style="color: var(--{colour})">{sign}</span> {escape(words)}</li>'
        for colour, sign, words in entries
    )
    return f'<ul class="legend">{"".join(items)}</ul>'
