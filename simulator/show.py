"""Show: results as tables and JSON, and progress, for whoever sits at the terminal."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from reference.bucketing import cap_name
from reference.files import write_whole
from reference.trace import Trace

from .report import Report

notes = Console(stderr=True)
PIPED_WIDTH = 120
"""Columns of text where there is no terminal."""
RESTLESS = 0.1
"""Times by the clock say little where the machine's speed has changed by more."""
TEXT = ("name", "default", "meaning", "order", "hook", "trace", "fabric")
"""Columns that are not numbers."""


@contextmanager
def progress(first: str = "starting ranks") -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, elsewhere a line for each new step; to be told a word, how many are done, of how many."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task(first, total=None)
        said = ""

        def on_progress(word: str, done: int, total: int) -> None:
            nonlocal said
            bar.update(task, description=word, completed=done, total=total)
            if word != said and not notes.is_terminal:
                notes.print(word)
            said = word

        yield on_progress


def describe_trace(trace: Trace) -> dict[str, str]:
    """What a person wants to know of a trace at a glance."""
    iterations = trace.ranks[0].iterations
    times = sorted(iteration.duration_ns for iteration in iterations)
    return {
        "parameters": f"{len(trace.workload.parameters)}",
        "gradient MB": f"{sum(trace.sizes_bytes) / 2**20:.1f}",
        "ranks": str(len(trace.ranks)),
        "iterations": str(len(iterations)),
        "median iteration ms": f"{times[len(times) // 2] / 1e6:.1f}",
    }


def show_report(report: Report) -> None:
    """A table a model, then what all rows amount to; times in milliseconds."""
    for model in dict.fromkeys(row.model for row in report.rows):
        rows = [
            {
                "cap": cap_name(row.cap_mb),
                "order": row.order,
                "hook": row.hook,
                "buckets": str(row.buckets),
                "measured": f"{row.measured_ns / 1e6:.0f}",
                "quartiles": f"{row.quartiles_ns[0] / 1e6:.0f}-{row.quartiles_ns[1] / 1e6:.0f}",
                "paired": f"{row.paired_ns / 1e6:.0f}",
                "predicted": f"{row.predicted_ns / 1e6:.0f}",
                "error": f"{row.error:+.0%}",
                "paired error": f"{row.paired_error:+.1%}",
                "perfect scaling": f"{row.perfect_scaling_error:+.0%}",
                "no overlap": f"{row.no_overlap_error:+.0%}",
                "naive": f"{row.naive_overlap_error:+.0%}",
            }
            for row in report.rows
            if row.model == model
        ]
        show_table(
            rows,
            f"{model}: iteration in ms, the errors of the prediction and of three yardsticks, which are paired too",
            spared=("hook", "buckets", "quartiles", "naive", "perfect scaling", "no overlap", "paired"),
        )
    yardsticks = ", ".join(f"{name.replace('_', ' ')} {error:.1%}" for name, error in report.yardsticks.items())
    print(
        f"by the clock: mean absolute error {report.mape:.1%}, worst {report.worst_error:+.1%}; "
        f"the same work took {report.drift:+.1%} time compared with the calibration\n"
        f"paired, with the machine's speed beside each run taken out: mean absolute error {report.paired_mape:.1%} "
        f"({yardsticks}); ranked wrongly {report.sign_errors} of {report.pairs_apart} pairs that differ by more than "
        f"noise, fastest one found {report.fastest_found:.0%}, iterations inside the interval {report.coverage:.0%}"
    )
    if abs(report.drift) > RESTLESS:
        print(
            "the machine was not as fast as while it was calibrated: errors by the clock are the machine's more than "
            "the prediction's; run again while nothing else does"
        )


def show_table(rows: Sequence[dict[str, str]], title: str, *, spared: Sequence[str] = ()) -> None:
    """Rows as a table, their keys as its header; at least one row.

    Args:
        rows: From header to cell.
        title: Printed above.
        spared: Columns to leave out where there is too little room, these in turn.
    """
    console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
    names = fitting(rows, console.width, spared)
    print(title)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name, width in zip(names, widths(rows, names, console.width), strict=True):
        table.add_column(name, justify="left" if name in TEXT else "right", overflow="fold", width=width)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    console.print(table)
    if left_out := [name for name in rows[0] if name not in names]:
        print(f"left out, as {console.width} columns are too few: {', '.join(left_out)}")


def fitting(rows: Sequence[dict[str, str]], width: int, spared: Sequence[str]) -> list[str]:
    """The columns that stay, so that no word is broken: without as many of `spared`, from its start, as it takes."""
    names = list(rows[0])
    for name in spared:
        if sum(_longest(rows, column, str.split) + 1 for column in names) <= width:
            break
        names.remove(name)
    return names


def widths(rows: Sequence[dict[str, str]], names: Sequence[str], width: int) -> list[int]:
    """Of each column: its longest word, and from the left on what else it needs for one line, if there is room."""
    least = [_longest(rows, name, str.split) for name in names]
    room = width - sum(least) - len(least)  # a space after each
    given = []
    for name, word in zip(names, least, strict=True):
        more = max(0, min(room, _longest(rows, name, str.splitlines) - word))
        room -= more
        given.append(word + more)
    return given


def _longest(rows: Sequence[dict[str, str]], name: str, parts: Callable[[str], list[str]]) -> int:
    return max((len(part) for text in (name, *(row[name] for row in rows)) for part in parts(text)), default=0)


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """The result for programs, if they asked for it.

    Raises:
        OSError: It cannot be written.
    """
    if path is not None:
        write_whole(path, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
