"""Output of the subcommands: progress, tables, JSON, and the tables for traces and reports."""

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..reference.files.writing import milliseconds, printable, write_atomically
from ..reference.trace import Trace

if TYPE_CHECKING:
    from ..prediction_errors import ValidationReport, ValidationRow


class PrintableStream:
    """A text stream in which names from files cannot control the terminal.

    Characters that the encoding of the stream behind it lacks are written as Python escapes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; return its length."""
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


notes = Console(stderr=True, markup=False, emoji=False, highlight=False)
PIPED_WIDTH, LINE = 120, 80
"""Width of tables and of sentences, in characters, if the output is not a terminal."""
UNBROKEN = re.compile(r"`[^`]*`|\w+=\[[^]]*\]|\b[\d.]+ (?:%|[mun]?s|min|[MGT]B|GB/s|h)(?!\w)")
"""What stays on one line: a command, an argument that is a list (readers paste them), and a number with its unit."""
TEXT = (
    *("name", "input", "default", "meaning", "order", "hook", "part", "main cause", "trace", "fabric"),
    *("product", "device", "figure", "source"),
)
"""Table columns that hold text; all others hold numbers."""


@contextmanager
def progress(first: str = "starting ranks") -> Iterator[Callable[[str, int, int], None]]:
    """Show progress: as a bar on a terminal, at first with the label `first`, else as one line per step.

    Yields a function that reports progress; takes the label of the step, the parts done and the number of parts.
    """
    label = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), label, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as bar:
        task = bar.add_task(first, total=None)
        last = ""

        def on_progress(word: str, done: int, total: int) -> None:
            nonlocal last
            bar.update(task, description=printable(word), completed=done, total=total)
            if word != last and not notes.is_terminal:
                notes.print(printable(word))
            last = word

        yield on_progress


def say(sentence: str) -> None:
    """Print a sentence, if any, in lines that fit the terminal; what readers paste, and a long word, stay whole."""
    width = min(shutil.get_terminal_size((LINE, 24)).columns, PIPED_WIDTH) if sys.stdout.isatty() else LINE
    text = UNBROKEN.sub(lambda found: found[0].replace(" ", "\xa0"), sentence)
    how: dict[str, Any] = {"subsequent_indent": "  ", "break_on_hyphens": False, "break_long_words": False}
    if sentence:
        print(textwrap.fill(text, width, **how).replace("\xa0", " "))


def show_table(rows: Sequence[dict[str, str]], title: str, *, optional: Sequence[str] = ()) -> None:
    """Print rows, of which each maps the same columns to cells, as a table; there is at least one.

    Columns in `optional` are left out, in this order, until the table fits the terminal.
    """
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(width=width, color_system=None, markup=False, emoji=False, highlight=False)
    columns = fitting_columns(rows, console.width, optional)
    say(title)
    table = Table(box=None, padding=(0, 1, 0, 0))
    room = console.width - _least_width(rows, columns)  # goes to the columns from left to right
    for column in columns:
        word, line = _longest(rows, column, str.split), _longest(rows, column, str.splitlines)
        more = max(0, min(room, line - word))
        room -= more
        table.add_column(column, justify="left" if column in TEXT else "right", overflow="fold", width=word + more)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    console.print(table)
    if left_out := [column for column in rows[0] if column not in columns]:
        say(f"left out, because the terminal has {console.width} columns: {', '.join(left_out)}")


def fitting_columns(rows: Sequence[dict[str, str]], width: int, optional: Sequence[str]) -> list[str]:
    """Return the columns that fit into `width` without breaking a word; leave out optional columns as needed."""
    columns = list(rows[0])
    for column in optional:
        if _least_width(rows, columns) <= width:
            break
        columns = [one for one in columns if one != column]  # not every table has it
    return columns


def _least_width(rows: Sequence[dict[str, str]], columns: Sequence[str]) -> int:
    return sum(_longest(rows, column, str.split) + 1 for column in columns)  # a space follows each column


def _longest(rows: Sequence[dict[str, str]], column: str, parts: Callable[[str], list[str]]) -> int:
    cells = (column, *(row[column] for row in rows))
    return max((len(part) for cell in cells for part in parts(cell)), default=0)


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write the result for programs, if a path is given."""
    if path is not None:
        write_atomically(path, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())


# Traces


def describe_trace(trace: Trace) -> dict[str, str]:
    """Return sizes and times of a trace as a row of a table."""
    iterations = trace.ranks[0].iterations
    shape = trace.workload.input_shape
    return {
        "input": "unknown" if shape is None else " x ".join(map(str, shape)),
        "parameters": f"{len(trace.workload.parameters)}",
        "gradient MB": f"{sum(trace.sizes_bytes) / 2**20:.1f}",
        "ranks": str(len(trace.ranks)),
        "iterations": str(len(iterations)),
        "median iteration ms": milliseconds(median_high(iteration.duration_ns for iteration in iterations)),
    }


def save_trace(trace: Trace, out: Path, title: str) -> None:
    """Write a trace, and print its sizes and times under a title."""
    trace.save(out)
    show_table([describe_trace(trace)], title)


# Reports

WIDE_INTERVAL = 0.08
"""Half-width of predicted intervals above which they say little."""
BASELINES = ("naive overlap", "perfect scaling", "no overlap", "pipelined overlap")


def show_report(report: "ValidationReport") -> None:
    """Print a table and its summary; times in milliseconds."""
    title = f"{report.rows[0].model}: iteration in ms; errors of the prediction, and of four baselines"
    show_table(list(map(_report_row, report.rows)), title, optional=("hook", "buckets", "quartiles", *BASELINES))
    baselines = ", ".join(f"{name.replace('_', ' ')} {error:.1%}" for name, error in report.baselines.items())
    say(f"error: {report.mape:.1%} mean absolute, {report.worst_error:+.1%} worst (baselines: {baselines})")
    noise = "unknown, because there was one turn"
    if report.noise is not None:
        noise = f"nine in ten repeated measurements differ by less than {report.noise:.1%}"
    say(f"noise floor: {noise}")
    say(f"inside the interval: {report.coverage:.0%}; it reaches {report.half_width:.1%} to either side")
    if report.gain is not None:
        band, gain = "too few turns for an interval", report.gain
        if gain.interval is not None:
            band = "90 %: {:.1%} to {:.1%}".format(*gain.interval)
        say(f"gain of the plan over torch's default: {gain.measured:.1%} ({band}), predicted {gain.predicted:.1%}")
    if report.half_width > WIDE_INTERVAL:
        say(
            f"the predicted intervals are wide (more than {WIDE_INTERVAL:.0%} to either side): `ddplab predict "
            "--explain` on the trace and fabric says why; run again while nothing else runs"
        )


def _report_row(row: "ValidationRow") -> dict[str, str]:
    return {
        "cap": row.configuration.cap,
        "order": row.order,
        "hook": row.hook,
        "buckets": str(row.buckets),
        "measured": milliseconds(row.measured_ns),
        "quartiles": "-".join(milliseconds(ns) for ns in row.quartiles_ns),
        "predicted": milliseconds(row.predicted_ns),
        "interval": "-".join(milliseconds(ns) for ns in row.interval_ns),
        **({} if row.torchs_multiple is None else {"torch's / ours": f"{row.torchs_multiple:.3f}"}),
        "error": f"{row.error:+.1%}",
        "perfect scaling": f"{row.perfect_scaling_error:+.0%}",
        "no overlap": f"{row.no_overlap_error:+.0%}",
        "naive overlap": f"{row.naive_overlap_error:+.1%}",
        "pipelined overlap": f"{row.pipelined_overlap_error:+.1%}",
    }
