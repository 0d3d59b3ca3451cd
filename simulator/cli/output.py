"""Output: tables, JSON, progress bars, pictures."""

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
from reference.schema import write_atomically
from reference.trace import Trace

from ..fabric import Fabric, Linear, Processor
from ..measure.report import Report

notes = Console(stderr=True)
PIPED_WIDTH = 120
"""Columns of text where there is no terminal."""
NOISY_DRIFT = 0.1
"""Change of the machine's speed since calibration above which wall-clock errors say little."""
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
    yardsticks = ", ".join(f"{name.replace('_', ' ')} {error:.1%}" for name, error in report.baselines.items())
    print(
        f"by the clock: mean absolute error {report.mape:.1%}, worst {report.worst_error:+.1%}; "
        f"the same work took {report.drift:+.1%} time compared with the calibration\n"
        f"paired, with the machine's speed beside each run taken out: mean absolute error {report.paired_mape:.1%} "
        f"({yardsticks}); ranked wrongly {report.sign_errors} of {report.pairs_apart} pairs that differ by more than "
        f"noise, fastest one found {report.fastest_found:.0%}, iterations inside the interval {report.coverage:.0%}"
    )
    if abs(report.drift) > NOISY_DRIFT:
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
        write_atomically(path, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())


NOISY_OUTLIERS = 0.1
"""Fraction of all-reduces that are outliers above which the machine counts as noisy."""
PARTS = {
    "compress": "before its collectives",
    "recompress": "between them",
    "decompress": "after them",
}
"""Of a hook, and when it does them."""


def show_calibration(fabric: Fabric, model: str, title: str) -> None:
    """Tables of collectives and of comm hooks, and sentences on the rest; `±` is half of a 90 % band.

    Outliers are all-reduces that took over twice the median: a machine that has many is not quiet.

    Args:
        fabric: As `calibrate` returned it.
        model: Whose computation it was measured with.
        title: Of the first table.
    """
    show_table(collective_rows(fabric), title, spared=("outliers", "± ", "broadcast ms"))
    outliers, repeats = sum(row.outliers for row in fabric.all_reduce), sum(row.repeats for row in fabric.all_reduce)
    if outliers > NOISY_OUTLIERS * repeats:
        print(
            f"{outliers} of {repeats} all-reduces took over twice the median: something else used the machine; "
            "calibrate again without it"
        )
    processor = fabric.processor
    if rows := list(hook_rows(processor)):
        show_table(rows, f"comm hooks compute, for a bucket of the gradients of {model}")
    if rows := contention_rows(processor):
        show_table(rows, f"computation of {model} and collectives beside each other take, of their times alone")
    print(
        f"issuing a collective takes {processor.launch_ns / 1e3:.0f} us, computation stays slow for "
        f"{processor.lingers_ns / 1e6:.1f} ms after one, the search for unused parameters "
        f"{processor.search_ns_per_parameter / 1e3:.1f} us a parameter, "
        f"the rebuild of buckets {processor.rebuild_ns / 1e6:.1f} ms"
    )


def collective_rows(fabric: Fabric) -> list[dict[str, str]]:
    """One a message size."""
    factors = {row.size_bytes: row.factor for row in fabric.sharing}
    broadcasts = {row.size_bytes: row for row in fabric.broadcast}
    return [
        {
            "bytes": f"{row.size_bytes:,}",
            "all-reduce ms": f"{row.ns / 1e6:.3f}",
            "±": f"{row.spread:.0%}",
            "outliers": f"{row.outliers} of {row.repeats}",
            "two at a time": f"x {factors[row.size_bytes]:.2f}",
            "broadcast ms": f"{broadcasts[row.size_bytes].ns / 1e6:.3f}",
            "± ": f"{broadcasts[row.size_bytes].spread:.0%}",
        }
        for row in fabric.all_reduce
    ]


def contention_rows(processor: Processor) -> list[dict[str, str]]:
    """One a message size and number in flight."""
    return [
        {
            "bytes": f"{row.size_bytes:,}",
            "in flight": f"{row.running}",
            "computation": f"x {row.compute:.2f}",
            "±": f"{row.compute_error:.0%}",
            "a collective": f"x {row.collective:.2f}",
            "± ": f"{row.collective_error:.0%}",
        }
        for row in processor.contention
    ]


def hook_rows(processor: Processor) -> Iterator[dict[str, str]]:
    """One a hook and part of it that costs anything."""
    for hook in processor.hooks:
        parts: dict[str, Linear] = {part: getattr(hook, part) for part in PARTS}
        for part, cost in parts.items():
            if cost != Linear():
                yield {
                    "hook": hook.name,
                    "part": f"{part}, {PARTS[part]}",
                    "a bucket us": f"{cost.fixed_ns / 1e3:.0f}",
                    "a MiB us": f"{cost.ns_per_byte * 2**20 / 1e3:.0f}",
                    "GB/s": f"{1 / cost.ns_per_byte:.2f}" if cost.ns_per_byte else "",
                }
