"""One run of `make demo`: predictions checked in virtual time, by the clock, and on the processor."""

import gzip
import json
from functools import cache
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from simulator.measure.demo import draw_rung, ladder_table

from .drawing import DATA, render, save

TITLE = "One run of `make demo`"
SIZE = (4.7, 3.9)


@cache
def reports() -> dict[str, dict[str, Any]]:
    """The reports of the run by name, as in `Ladder`."""
    loaded: dict[str, dict[str, Any]] = json.loads(gzip.decompress((DATA / "demo.json.gz").read_bytes()))
    return loaded


@cache
def panels() -> list[pd.DataFrame]:
    """Rows of each report."""
    return [pd.DataFrame(report["rows"]).fillna({"cap_mb": float("inf")}) for report in reports().values()]


def draw(data: pd.DataFrame, ax: Axes) -> Axes:
    """Plot measured and predicted time of each configuration, as `make demo` does."""
    return draw_rung(data, ax)


def table() -> str:
    """Markdown table of all configurations, for the README."""
    rows = ladder_table(list(reports().values()))
    lines = [" | ".join(rows[0]), " | ".join("---" if name in TEXT else "---:" for name in rows[0])]
    lines += [" | ".join(row.values()) for row in rows]
    return "".join(f"| {line} |\n" for line in lines)


TEXT = ("run", "cap", "order")
"""Columns of the table that are no numbers."""


def caption() -> str:
    """Caption whose numbers are computed from the data."""
    virtual, wall, processor = reports().values()
    largest_ns = max(abs(row["predicted_ns"] - row["measured_ns"]) for row in virtual["rows"])
    sentences = [
        f"In virtual time the real reducer differs from the prediction by {largest_ns} ns at most.",
        f"By the clock, the mean error is {_errors(wall)}.",
        f"On the processor, it is {_errors(processor)}, after correction for the change of the machine's speed; two "
        f"measurements of one configuration differ by {processor['noise']:.1%} there.",
    ]
    return " ".join(sentences)


def _errors(report: dict[str, Any]) -> str:
    baselines = report["yardsticks"]
    return (
        f"{report['paired_mape']:.1%} (no overlap: {baselines['no_overlap']:.1%}, perfect scaling: "
        f"{baselines['perfect_scaling']:.1%})"
    )


def main() -> None:
    """Draw the figure and write its files."""
    save("demo", render(draw, panels(), size=SIZE))


if __name__ == "__main__":
    main()
    print(table())
