"""Pictures of a report, as SVG: curves by number of GPUs, time against cost, and stacked bars."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import floor, log, log10
from typing import Any, NamedTuple

Row = Mapping[str, Any]
"""An element of `sizes` or of `systems` in `CapacityPlan.to_json`."""
Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 300, 74, 436, 26, 256
"""Size of a picture, and the ends of its axes."""
TICK_X, TICK_Y = 46, 22
"""Least distances between labels of an axis."""
COLOURS = ("forward", "computation", "exposed", "hidden", "copies", "compression", "quiet")
"""Names of colours in `plot_colours` and, in the page, of CSS variables; `ink` is that of the text."""
LINES = ("computation", "exposed", "copies", "compression", "ink")
"""Colours of systems and of causes, the first one first; as `plot_colours.LINES`."""
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
    "M-4-4h8v8h-8z",
    "M0-5l5 9h-10z",
    "M0-6l5 6-5 6-5-6z",
    "M0 5l5-9h-10z",
)
"""Shapes of the points of systems, which repeat the meaning of their colours."""


class Axis(NamedTuple):
    """An axis: the values at its ends, where these lie in the picture, labelled values, and their format."""

    low: float
    high: float
    start: float
    end: float
    labels: Sequence[float]
    form: str = ",.12g"
    is_log: bool = True

    def at(self, value: float) -> float:
        """Return where a value lies, or the nearer end of the axis."""
        low, high, value = (
            log(one) if self.is_log else one for one in (self.low, self.high, min(self.high, max(self.low, value)))
        )
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def labelled(self, room: float) -> list[tuple[float, str]]:
        """Return places and words of labels, as many as there is room for."""
        kept: list[tuple[float, str]] = []
        for value in self.labels:
            if not kept or abs(self.at(value) - kept[-1][0]) >= room:
                kept.append((self.at(value), format(value, self.form)))
        return kept


def throughput_picture(document: Row) -> str:
    """Return throughput by number of GPUs: bands, ideal lines, knees, and the throughput that the deadline needs."""
    sizes, asked = document["sizes"], document["question"]
    needed = [] if asked["deadline_hours"] is None else [asked["samples"] / asked["deadline_hours"] / 3600]
    ends = [row[f"samples_per_s_{end}"] for row in sizes for end in ("low", "high")]
    x, y = (
        _gpus(sizes),
        _amounts([*ends, *(full for row in sizes for _, full in _ideal([row])), *needed], BOTTOM, TOP),
    )

    def drawn(number: int, system: Row, rows: Sequence[Row]) -> str:
        ideal = _line([(x.at(count), y.at(full)) for count, full in _ideal(rows)], "ideal")
        return ideal + _curve(x, y, "samples_per_s", number, rows) + knee(number, system, rows)

    def knee(number: int, system: Row, rows: Sequence[Row]) -> str:
        marks = ""
        if system["knee_earliest"] is not None:
            last = RIGHT if system["knee_latest"] is None else x.at(system["knee_latest"])
            marks += f'<path class="knee" d="M{x.at(system["knee_earliest"])} {BOTTOM - 6 - 8 * number}H{last}"/>'
        if system["knee"] is not None:
            at = x.at(system["knee"])
            up = next(y.at(row["samples_per_s"]) for row in rows if row["world_size"] == system["knee"])
            marks += f'<path class="ideal" d="M{at} {up}V{BOTTOM}"/><text x="{at + 4}" y="{BOTTOM - 14}">knee</text>'
        return marks

    limits = "".join(_level(y, value, "deadline") for value in needed)
    return _chart("Throughput by number of GPUs", x, y, "GPUs", "samples/s", _systems(document, drawn) + limits)


def _ideal(rows: Sequence[Row]) -> Points:
    """Return numbers of GPUs with the throughput at an efficiency of 1."""
    return [(row["world_size"], row["samples_per_s"] / row["efficiency"]) for row in rows if row["efficiency"]]


def efficiency_picture(document: Row) -> str:
    """Return efficiency by number of GPUs: bands and the target."""
    target = document["systems"][0]["target_efficiency"]
    least = floor(10 * min(0.9, target, *(row["efficiency_low"] for row in document["sizes"]))) / 10
    x, labels = _gpus(document["sizes"]), [step / 20 for step in range(round(20 * least), 21)]
    y = Axis(least, 1.0, BOTTOM, TOP, labels, ".0%", is_log=False)
    curves = _systems(document, lambda number, _, rows: _curve(x, y, "efficiency", number, rows))
    inside = curves + _level(y, target, f"target {target:.3%}".replace(".000", ""))
    return _chart("Efficiency by number of GPUs", x, y, "GPUs", "", inside)


def costs_picture(document: Row) -> str:
    """Return time against cost: intervals, and a line through the choices that no other beats in both."""
    sizes, asked = document["sizes"], document["question"]
    x = _amounts([row[f"hours_{end}"] for row in sizes for end in ("low", "high")], LEFT, RIGHT)
    y = _amounts([row[f"cost_{end}"] for row in sizes for end in ("low", "high")], BOTTOM, TOP)

    def point(number: int, row: Row) -> str:
        across, up = x.at(row["hours"]), y.at(row["cost"])
        return (
            f'<path d="M{x.at(row["hours_low"])} {up}H{x.at(row["hours_high"])}'
            f'M{across} {y.at(row["cost_low"])}V{y.at(row["cost_high"])}"/>{_marker(number, row, across, up)}'
        )

    front = sorted((row for row in sizes if row["on_front"]), key=lambda row: float(row["hours"]))
    through = [(x.at(row["hours"]), y.at(row["cost"])) for row in front]
    inside = f'<g class="limit">{_line(through)}</g>'
    inside += _systems(document, lambda number, _, rows: "".join(point(number, row) for row in rows))
    for row, (across, up) in zip(front, through, strict=True):
        inside += f'<text x="{across}" y="{up + 24}" text-anchor="middle" font-size="11">{row["world_size"]:,}</text>'
    if (hours := asked["deadline_hours"]) is not None and x.low <= hours <= x.high:
        inside += f'<path class="limit" d="M{x.at(hours)} {TOP}V{BOTTOM}"/>'
        inside += f'<text x="{x.at(hours) + 4}" y="{BOTTOM - 6}">deadline</text>'
    if asked["budget"] is not None:
        inside += _level(y, asked["budget"], "budget")
    return _chart("Cost by duration", x, y, "hours", document["currency"], inside)


def stacked_bars(bars: Mapping[str, Mapping[str, float]], colours: Mapping[str, str]) -> str:
    """Return stacked bars on one scale, each below its words, and a legend.

    Args:
        bars: The sizes of the parts of each bar.
        colours: The colour of each part; parts of one colour share an entry of the legend.
    """
    whole = max(sum(parts.values()) for parts in bars.values()) or 1
    shown = []
    for words, parts in bars.items():
        left, rects = 0.0, ""
        for name in colours:
            width = 1000 * parts.get(name, 0) / whole
            rects += f'<rect x="{left:.2f}" width="{width:.2f}" height="20" fill="var(--{colours[name]})"/>'
            left += width
        shown.append(
            f'<p>{escape(words)}</p><svg class="bar" role="img" aria-label="{escape(words)}" viewBox="0 0 1000 20" '
            f'preserveAspectRatio="none">{rects}</svg>'
        )
    used = [name for name in colours if any(parts.get(name) for parts in bars.values())]
    entries = {
        f'<rect x="-7" y="-7" width="14" height="14" fill="var(--{colour})"/>': ", ".join(
            name.replace("_", " ") for name in used if colours[name] == colour
        )
        for colour in dict.fromkeys(colours[name] for name in used)
    }
    return f'<div class="bars">{"".join(shown)}</div>{_legend(entries)}'


def legend(systems: Sequence[Row]) -> str:
    """Return a legend with colour and marker of each system."""
    entries = {
        f'<g class="series" style="{_colour(number)}">{_marker(number)}</g>': one["system"]
        for number, one in enumerate(systems)
    }
    return _legend(entries)


def _legend(entries: Mapping[str, str]) -> str:
    items = (
        f'<li><svg viewBox="-7 -7 14 14" aria-hidden="true">{sign}</svg> {escape(words)}</li>'
        for sign, words in entries.items()
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _amounts(values: Sequence[float], start: float, end: float) -> Axis:
    """Return a logarithmic axis between two of 1, 2, 5, 10, 20, ... that contains these values."""
    powers = range(floor(log10(min(values))) - 1, floor(log10(max(values))) + 2)
    steps = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
    first = max(step for step in steps if step <= min(values))
    last = next(step for step in steps if step >= max(values) and step > first)
    labels = [step for step in steps if first <= step <= last]
    tens = [step for step in labels if f"{step:e}".startswith("1")]
    return Axis(first, last, start, end, tens if len(tens) > 3 else labels, ",.12g" if last < 1e7 else ".0e")


def _gpus(sizes: Sequence[Row]) -> Axis:
    counts = sorted({row["world_size"] for row in sizes})
    return Axis(counts[0] / 1.2, counts[-1] * 1.2, LEFT, RIGHT, counts)


def _chart(label: str, x: Axis, y: Axis, x_name: str, y_name: str, inside: str) -> str:
    """Return a picture with its axes."""
    across = "".join(
        f'<path class="axis" d="M{at} {BOTTOM}v5"/>'
        f'<text x="{at}" y="{BOTTOM + 20}" text-anchor="middle">{words}</text>'
        for at, words in x.labelled(TICK_X)
    )
    up = "".join(
        f'<path class="axis" d="M{LEFT} {at}H{RIGHT}"/>'
        f'<text x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{words}</text>'
        for at, words in y.labelled(TICK_Y)
    )
    return (
        f'<svg role="img" aria-label="{escape(label)}, with 90 % intervals" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f'<path class="axis" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>{across}{up}{inside}'
        f'<text x="{RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{x_name}</text>'
        f'<text x="{LEFT}" y="{TOP - 12}">{escape(y_name)}</text></svg>'
    )


def _systems(document: Row, drawn: Callable[[int, Row, Sequence[Row]], str]) -> str:
    """Draw each system, from its number, its plan, and its rows of `sizes`."""
    parts = []
    for number, one in enumerate(document["systems"]):
        rows = [row for row in document["sizes"] if row["system"] == one["system"]]
        parts.append(f'<g class="series" style="{_colour(number)}">{drawn(number, one, rows)}</g>')
    return "".join(parts)


def _curve(x: Axis, y: Axis, field: str, number: int, rows: Sequence[Row]) -> str:
    """Return the curve of one system with its band and points."""
    across = [x.at(row["world_size"]) for row in rows]
    low, middle, high = ([y.at(row[field + end]) for row in rows] for end in ("_low", "", "_high"))
    ranges = "".join(f"M{at} {below}V{above}" for at, below, above in zip(across, low, high, strict=True))
    points = (_marker(number, row, at, up) for row, at, up in zip(rows, across, middle, strict=True))
    band = [*zip(across, low, strict=True), *zip(across[::-1], high[::-1], strict=True)]
    curve = _line(list(zip(across, middle, strict=True)))
    return f'{_line(band, "band")}<path class="range" d="{ranges}"/>{curve}{"".join(points)}'


def _line(points: Points, kind: str = "") -> str:
    tag = "polygon" if kind == "band" else "polyline"
    return f'<{tag} class="{kind}" points="{" ".join(f"{x},{y}" for x, y in points)}"/>'


def _level(y: Axis, value: float, words: str) -> str:
    """Return a horizontal line for a limit, if it lies in the picture."""
    if not y.low <= value <= y.high:
        return ""
    return (
        f'<path class="limit" d="M{LEFT} {y.at(value)}H{RIGHT}"/>'
        f'<text x="{RIGHT}" y="{y.at(value) - 4}" text-anchor="end">{words}</text>'
    )


def _marker(number: int, row: Row | None = None, x: float = 0, y: float = 0) -> str:
    title = "" if row is None else f"<title>{escape(row['system'])}: {row['world_size']:,} GPUs</title>"
    return f'<path d="{MARKERS[number % len(MARKERS)]}" transform="translate({x} {y})">{title}</path>'


def _colour(number: int) -> str:
    return f"--c: var(--{LINES[number % len(LINES)]})"
