"""Errors of every method over all iterations of the score: the mean, the worst, and the mean of each part."""

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from matplotlib.axes import Axes

from validation.residual_plot import MARKS, OURS

from .drawing import FOLDER, render, save

TITLE = "Every method over all iterations of the score"
SIZE = (8.0, 4.3)
PAGE = FOLDER.parent / "validation" / "score.md"
TICKS = (1, 2, 5, 10, 20, 50, 100)
MEANINGS = {
    "perfect scaling": "communication is free",
    "no overlap": "communication after computation",
    "naive overlap": "the longer of the two",
    "pipelined overlap": "bucket after bucket",
}
"""What each simpler method assumes."""


class Method(NamedTuple):
    """Absolute errors of one method, in percent."""

    mean: float
    worst: float
    by_part: Mapping[str, float]


Methods = Mapping[str, Method]


@cache
def panels() -> list[Methods]:
    """The table of methods on the page that `make score` writes."""
    table = PAGE.read_text().partition("## Every method over all iterations\n")[2].partition("\n## ")[0]
    names, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*$", table, re.M)
    )
    methods = {}
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        percents = {name: abs(float(cell.strip("*%"))) for name, cell in cells.items() if cell.endswith(("%", "%**"))}
        by_part = {name.strip("()"): percent for name, percent in percents.items() if name.startswith("(")}
        methods[cells["name"]] = Method(percents["mean error"], percents["worst error"], by_part)
    return [methods]


def draw(data: Methods, ax: Axes) -> Axes:
    """Draw one line for each method, from its mean to its worst error."""
    for lane, (name, method) in enumerate(data.items()):
        marker, colour = MARKS[name]
        ax.plot([method.mean, method.worst], [lane, lane], color=colour, linewidth=2.5, solid_capstyle="butt")
        ax.plot(method.mean, lane, marker, color=colour, markersize=9, markeredgewidth=2)
        ax.plot(method.worst, lane, "|", color=colour, markersize=14, markeredgewidth=2.5)
        ax.text(method.worst * 1.06, lane, f"at worst {method.worst:.0f} %", fontsize=8, color=colour, va="center")
        mean = f"on average {method.mean:.1f} %"
        ax.text(method.mean * 0.9, lane, mean, fontsize=8, color=colour, ha="right", va="center")
    ax.set_xscale("log")
    ax.set_xlim(0.9, 190)
    ax.set_xticks(TICKS, [f"{tick} %" for tick in TICKS])
    ax.minorticks_off()
    ax.set_yticks(range(len(data)), [f"{name}\n{MEANINGS[name]}" if name in MEANINGS else name for name in data])
    ax.set_ylim(len(data) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.set_xlabel("error of predicted iteration times")
    return ax


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    (methods,) = panels()
    ours = methods[OURS]
    rules = {name: method for name, method in methods.items() if name != OURS}
    closest = min(rules, key=lambda name: rules[name].mean)
    close = {name: [part for part, error in ours.by_part.items() if rule.by_part[part] <= error]
             for name, rule in rules.items()}  # fmt: skip
    some = [part for part in ours.by_part if any(part in parts for parts in close.values())]
    each = "; ".join(
        f"{name} {method.mean:.1f} %, {method.worst:.1f} % and {max(method.by_part.values()):.1f} %"
        for name, method in methods.items()
    )
    return (
        f"Our predictions are {ours.mean:.1f} % off on average and {ours.worst:.1f} % at worst; the closest simple "
        f"rule, {closest}, is {rules[closest].mean:.1f} % off, and every rule is "
        f"{min(rule.worst for rule in rules.values()):.1f} % off or more at worst. All iterations of the score, "
        f"predicted from the same inputs. In {len(some)} of {len(ours.by_part)} parts ({', '.join(some)}) some rule "
        f"is as close as ours or closer; no rule is so in more than {max(map(len, close.values()))}. Mean error, "
        f"worst error and mean error of the worst part: {each}. The numbers are those of "
        "[validation/score.md](../validation/score.md)."
    )


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE)


if __name__ == "__main__":
    save("all_methods", files())
