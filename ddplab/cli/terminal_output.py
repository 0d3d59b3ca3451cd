"""Output of the subcommands: progress, tables, JSON, and the tables for traces, reports and calibrations."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from reference.bucketing import cap_name
from reference.files.writing import printable, write_atomically
from reference.trace import Trace
from simulator.fabric import Fabric, Linear, Processor

if TYPE_CHECKING:
    from ..validation.machine_conditions import Conditions
    from ..validation.validation_report import ValidationReport, ValidationRow


class PrintableStream:
    """A text stream in which names from files cannot control the terminal.

    Args:
        stream: Receives the text. Characters that its encoding lacks are written as Python escapes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write text; return its length."""
        encoding = self._stream.encoding or "utf-8"
        self._stream.write(printable(text).encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


notes = Console(stderr=True, markup=False, emoji=False, highlight=False)
PIPED_WIDTH = 120
"""Width of tables, in characters, if the output is not a terminal."""
TEXT = (
    *("name", "input", "default", "meaning", "order", "hook", "part", "main cause", "trace", "fabric"),
    *("product", "device", "figure", "source"),
)
"""Table columns that hold text; all others hold numbers."""


@contextmanager
def progress(first: str = "starting ranks") -> Iterator[Callable[[str, int, int], None]]:
    """Show progress: as a bar on a terminal, else as one line per step.

    Args:
        first: Label to show until the first step is reported.

    Yields:
        A function that reports progress; takes the label of the step, the parts done and the number of parts.
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


def show_table(rows: Sequence[dict[str, str]], title: str, *, optional: Sequence[str] = ()) -> None:
    """Print rows as a table, with their keys as the header.

    Args:
        rows: At least one; each maps the same columns to cells.
        title: Printed above the table.
        optional: Columns to leave out, in this order, until the table fits the terminal.
    """
    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(width=width, color_system=None, markup=False, emoji=False, highlight=False)
    columns = fitting_columns(rows, console.width, optional)
    print(title)
    table = Table(box=None, padding=(0, 1, 0, 0))
    room = console.width - _least_width(rows, columns)  # goes to the columns from left to right
    for column in columns:
        word, line = _longest(rows, column, str.split), _longest(rows, column, str.splitlines)
        more = max(0, min(room, line - word))
        room -= more
        side: JustifyMethod = "left" if column in TEXT else "right"
        table.add_column(column, justify=side, overflow="fold", width=word + more)
    for row in rows:
        table.add_row(*(row[column] for column in columns))
    console.print(table)
    if left_out := [column for column in rows[0] if column not in columns]:
        print(f"left out, because the terminal has {console.width} columns: {', '.join(left_out)}")


def fitting_columns(rows: Sequence[dict[str, str]], width: int, optional: Sequence[str]) -> list[str]:
    """Return the columns that fit into `width` without breaking a word; leave out optional columns as needed."""
    columns = list(rows[0])
    for column in optional:
        if _least_width(rows, columns) <= width:
            break
        columns.remove(column)
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
    times = sorted(iteration.duration_ns for iteration in iterations)
    shape = trace.workload.input_shape
    return {
        "input": "unknown" if shape is None else " x ".join(map(str, shape)),
        "parameters": f"{len(trace.workload.parameters)}",
        "gradient MB": f"{sum(trace.sizes_bytes) / 2**20:.1f}",
        "ranks": str(len(trace.ranks)),
        "iterations": str(len(iterations)),
        "median iteration ms": f"{times[len(times) // 2] / 1e6:.1f}",
    }


def save_trace(trace: Trace, out: Path, title: str) -> None:
    """Write a trace, and print its sizes and times under a title."""
    trace.save(out)
    show_table([describe_trace(trace)], title)


# Reports

WIDE_INTERVAL = 0.08
"""Half-width of predicted intervals above which they say little."""
NOISY_DRIFT = 0.1
"""Change of the machine's speed since calibration above which errors by the clock are not meaningful."""
BASELINES = ("naive overlap", "perfect scaling", "no overlap", "pipelined overlap")


def show_report(report: "ValidationReport", *, extrapolated: bool = False) -> None:
    """Print a table per model, and a summary of all rows; times in milliseconds.

    `extrapolated` is whether the network was calibrated with other numbers of ranks.
    """
    paired = "" if report.drift is None else " (paired)"
    for model in dict.fromkeys(row.model for row in report.rows):
        rows = [_report_row(row) for row in report.rows if row.model == model]
        title = f"{model}: iteration in ms; errors of the prediction, and of four baselines{paired}"
        show_table(rows, title, optional=("hook", "buckets", "quartiles", *BASELINES, "paired"))
    baselines = ", ".join(f"{name.replace('_', ' ')} {error:.1%}" for name, error in report.baselines.items())
    errors = f"{report.mape:.1%} mean absolute, {report.worst_error:+.1%} worst"
    if report.drift is None:
        print(f"error: {errors} (mean absolute error of baselines: {baselines})")
    else:
        print(
            f"error by the clock: {errors}; speed checks took {report.drift:+.1%} time compared with the calibration"
        )
        paired = f"{report.paired_mape:.1%} mean absolute (baselines: {baselines})"
        print(f"paired error, without the change of the machine's speed: {paired}")
    noise = "noise"
    if report.noise is not None:
        noise += f" (nine in ten repeated measurements differ by less than {report.noise:.1%})"
    print(
        f"ranked wrongly: {report.sign_errors} of {report.pairs_apart} pairs that differ by more than {noise}; "
        f"fastest configuration found: {report.fastest_found:.0%}; "
        f"iterations inside the interval: {report.coverage:.0%}, which reaches {report.half_width:.1%} to either side"
    )
    if report.conditions is not None:
        print(conditions_sentence(report.conditions))
    if report.drift is not None and abs(report.drift) > NOISY_DRIFT:
        print(
            "the machine's speed has changed since the calibration, so errors by the clock are mostly due to this "
            "change; run again while nothing else runs"
        )
    if report.half_width > WIDE_INTERVAL:
        reason = "iterations of the calibration varied; run again while nothing else runs"
        if extrapolated:
            reason = "the network was calibrated with fewer ranks; calibrate it with more"
        print(f"the predicted intervals are wide (more than {WIDE_INTERVAL:.0%} to either side), because {reason}")


def conditions_sentence(now: "Conditions") -> str:
    """Describe how well the machine kept up with emulated devices."""
    late = [f"{ns / 1e6:.2f}" for ns in now.overslept_ns]
    return (
        f"conditions: processor idle {now.idle:.0%}; sleeps ended late by {late[0]} ms (median), {late[1]} ms "
        f"(90 % quantile) and {late[2]} ms (99 %); slow-down of the device {now.device_slow_down:.3f}, of the "
        f"network {now.network_slow_down:.3f}; the host prolongs an iteration by {now.host_ns / 1e6:.1f} ms, "
        "which the predictions contain"
    )


def _report_row(row: "ValidationRow") -> dict[str, str]:
    """Return a row of the printed table; emulated devices keep their speed and are not paired with speed checks."""
    digits, is_paired = (0, True) if row.drift is not None else (1, False)
    cells = {
        "cap": cap_name(row.cap_mb),
        "order": row.order,
        "hook": row.hook,
        "buckets": str(row.buckets),
        "measured": f"{row.measured_ns / 1e6:.{digits}f}",
        "quartiles": "-".join(f"{ns / 1e6:.{digits}f}" for ns in row.quartiles_ns),
        "paired": f"{row.paired_ns / 1e6:.0f}",
        "predicted": f"{row.predicted_ns / 1e6:.{digits}f}",
        **({} if row.torchs_multiple is None else {"torch's / ours": f"{row.torchs_multiple:.3f}"}),
        "error": f"{row.error:+.{digits}%}",
        "paired error": f"{row.paired_error:+.1%}",
        "perfect scaling": f"{row.perfect_scaling_error:+.0%}",
        "no overlap": f"{row.no_overlap_error:+.0%}",
        "naive overlap": f"{row.naive_overlap_error:+.{digits}%}",
        "pipelined overlap": f"{row.pipelined_overlap_error:+.{digits}%}",
    }
    return cells if is_paired else {name: cell for name, cell in cells.items() if not name.startswith("paired")}


# Calibrations

NOISY_SPREAD = 1.0
"""Half-width of the band of repeated all-reduces, a fraction of the median, above which the machine is noisy."""
PARTS = {"compress": "before its collectives", "recompress": "between them", "decompress": "after them"}
"""Parts of a comm hook's computation, and when each runs."""


def show_calibration(fabric: Fabric, model: str, title: str) -> None:
    """Print tables of collectives, comm hooks and slow-downs, and the other costs; `±` is half of a 90 % band."""
    factors = {row.size_bytes: row.factor for row in fabric.sharing}
    broadcasts = {(row.world_size, row.size_bytes): row for row in fabric.broadcast}
    several, largest = len(fabric.world_sizes) > 1, max(fabric.world_sizes)
    rows = [
        {
            **({"ranks": str(row.world_size)} if several else {}),
            "bytes": f"{row.size_bytes:,}",
            "all-reduce ms": f"{row.ns / 1e6:.3f}",
            "±": f"{row.spread:.0%}",
            "two at a time": f"x {factors[row.size_bytes]:.2f}"
            if row.size_bytes in factors and row.world_size == largest
            else "",
            "broadcast ms": f"{broadcasts[row.world_size, row.size_bytes].ns / 1e6:.3f}",
            "± ": f"{broadcasts[row.world_size, row.size_bytes].spread:.0%}",
        }
        for row in fabric.all_reduce
    ]
    show_table(rows, title, optional=("± ", "broadcast ms"))
    if median(row.spread for row in fabric.all_reduce) > NOISY_SPREAD:
        print(
            "all-reduces varied, probably because other programs were running; calibrate again while nothing else "
            "runs"
        )
    processor = fabric.processor
    show_hooks(processor, f"computation of comm hooks for a bucket of {model}'s gradients")
    show_contention(processor, f"slow-down of {model}'s computation and of collectives that run at the same time")
    print(
        f"issuing a collective: {processor.launch_ns / 1e3:.0f} us\n"
        f"computation stays slowed after a collective: {processor.lingers_ns / 1e6:.1f} ms\n"
        f"search for unused parameters: {processor.search_ns_per_parameter / 1e3:.1f} us per parameter\n"
        f"rebuild of buckets: {processor.rebuild_ns / 1e6:.1f} ms"
    )


def show_contention(processor: Processor, title: str) -> None:
    """Print a row for each message size and number of collectives in flight, if they were measured."""
    rows = [
        {
            "bytes": f"{row.size_bytes:,}",
            "in flight": f"{row.running}",
            "computation": f"x {row.compute:.2f}",
            "±": f"{row.compute_error:.0%}",
            "collective": f"x {row.collective:.2f}",
            "± ": f"{row.collective_error:.0%}",
        }
        for row in processor.contention
    ]
    if rows:
        show_table(rows, title)


def show_hooks(processor: Processor, title: str) -> None:
    """Print a row for each part of a hook with a cost."""
    costs = [(hook.name, part, getattr(hook, part)) for hook in processor.hooks for part in PARTS]
    rows = [
        {
            "hook": name,
            "part": f"{part}, {PARTS[part]}",
            "us per bucket": f"{cost.fixed_ns / 1e3:.0f}",
            "us per MiB": f"{cost.ns_per_byte * 2**20 / 1e3:.0f}",
            "GB/s": f"{1 / cost.ns_per_byte:.2f}" if cost.ns_per_byte else "",
        }
        for name, part, cost in costs
        if cost != Linear()
    ]
    if rows:
        show_table(rows, title)
