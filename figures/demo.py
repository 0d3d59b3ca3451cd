"""One run of `make demo`: predictions checked in virtual time, by the clock, and on the processor."""

import gzip
import json
from functools import cache
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from ddplab.validation.demo import ladder_sentences, ladder_table
from ddplab.validation.validation_report import draw_validation

from .drawing import DATA, render, save

TITLE = "One run of `make demo`"
SIZE = (5.6, 3.0)


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
    """Draw the errors of each configuration, as `make demo` does."""
    return draw_validation(data, ax)


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
    return " ".join(ladder_sentences(list(reports().values())))


def files() -> dict[str, bytes]:
    """The files of the figure, by format."""
    return render(draw, panels(), size=SIZE, shared="x")


if __name__ == "__main__":
    save("demo", files())
    print(table())
