"""The board: any predictor's answers on the rows of the score, beside those of ddplab and of simple rules.

    python -m validation.board                                               # all methods, from their kept answers
    python -m validation.board --method module:function [--out answers.csv]  # any method, run here

`data/board` has the inputs of each row as plain files and, apart from them, the measured times; its README describes
them. Our own method and simple ones are in `board_methods`.
"""

import argparse
import csv
import io
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib import import_module
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

from ddplab.cli.terminal_output import progress, show_table
from ddplab.reference.files.reading import Schema
from ddplab.reference.files.writing import write_atomically
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric
from ddplab.simulator.baseline_predictions import BASELINES

from .comparison import Comparison, Part, mean_absolute
from .score_page import Table

BOARD = Path(__file__).parent / "data" / "board"


class Row(Schema):
    """The inputs of one row: what was known before the iteration on `gpus` GPUs was measured."""

    name: str  #: unique, such as "i: DGX V100, ResNet-50, 25 MB, 16 GPUs"
    part: Part  #: part of the score, "b" to "i"
    system: str  #: name of the case or of the run
    gpu: str | None  #: GPU or node, as the catalogue or the case names it
    gpus: int  #: number of GPUs to predict, one rank each
    gpus_per_node: int
    known_gpus: int  #: on how many GPUs the known iteration was measured
    known_ms: float  #: the known iteration, milliseconds
    model: str | None  #: name, or module:callable, of the model
    trace: str  #: file in `traces`: when the gradients of the known iteration are ready
    fabric: str  #: file in `fabrics`: links, or measured all-reduces
    settings: dict[str, Any]  #: buckets and other settings of the reducer, arguments of `ddplab.predict`
    source: str
    licence: str

    def load_trace(self) -> Trace:
        """Read the trace; rows of one file share it."""
        return _trace(self.trace)

    def load_fabric(self) -> Fabric:
        """Read the fabric."""
        return Fabric.load(BOARD / "fabrics" / self.fabric)


@cache
def _trace(name: str) -> Trace:
    return Trace.load(BOARD / "traces" / name)


@cache
def rows() -> tuple[Row, ...]:
    """The inputs of all rows."""
    return tuple(map(Row.model_validate_json, (BOARD / "inputs.jsonl").read_text().splitlines()))


@cache
def truths() -> Mapping[str, float]:
    """Measured milliseconds by name of the row."""
    with (BOARD / "truth.csv").open(newline="") as file:
        return {line["name"]: float(line["measured_ms"]) for line in csv.DictReader(file)}


Answer = float | tuple[float, float, float] | None
"""Milliseconds, or milliseconds and the ends of a 90 % interval. None, or a ValueError that tells why: the method
cannot take the row."""
Method = Callable[[Row], Answer]


# Answers

COLUMNS = ("name", "ms", "low_ms", "high_ms", "seconds", "why")
NO_REASON = "no reason given"


@dataclass(frozen=True)
class Answered:
    """What a method answered to one row."""

    ms: float | None  #: None: it cannot take the row
    interval_ms: tuple[float, float] | None
    seconds: float
    why: str = ""  #: why it cannot take the row

    @classmethod
    def by(cls, method: Method, row: Row) -> Self:
        """Run a method; a ValueError tells why it cannot take the row."""
        start, why = time.perf_counter(), ""
        try:
            answer = method(row)
        except ValueError as error:
            answer, why = None, str(error)
        seconds = time.perf_counter() - start
        if answer is None:
            return cls(None, None, seconds, why or NO_REASON)
        return cls(answer[0], answer[1:], seconds) if isinstance(answer, tuple) else cls(answer, None, seconds)


@dataclass(frozen=True)
class Answers:
    """All answers of a method by name of the row, its revision, and when it answered."""

    method: str
    revision: str
    date: str
    of: Mapping[str, Answered]

    def taken(self) -> list[Row]:
        """The rows that the method takes."""
        return [row for row in rows() if row.name in self.of and self.of[row.name].ms is not None]

    def to_csv(self) -> bytes:
        """Return the content of a file of answers, whose first line describes the method."""
        text = io.StringIO(f"# {self.method}, {self.revision}, {self.date}\n")
        text.seek(0, io.SEEK_END)
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(COLUMNS)
        for name, one in self.of.items():
            times = (one.ms, *(one.interval_ms or (None, None)))
            lines.writerow(
                (name, *("" if ms is None else f"{ms:.6g}" for ms in times), f"{one.seconds:.3g}", one.why)
            )
        return text.getvalue().encode()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of answers; if it has no line about the method, the peer of this name has the revision."""
        lines = path.read_text().splitlines()
        about = (
            lines.pop(0).lstrip("# ")
            if lines[0].startswith("#")
            else f"{path.stem}, {_revision(f'validation.peers.{path.stem}')}, "
        )
        of = {
            line["name"]: Answered(
                float(line["ms"]) if line["ms"] else None,
                (float(line["low_ms"]), float(line["high_ms"])) if line["low_ms"] else None,
                float(line["seconds"]),
                line.get("why") or ("" if line["ms"] else NO_REASON),
            )
            for line in csv.DictReader(lines)
        }
        method, revision, when = about.rsplit(", ", 2)
        return cls(method, revision, when, of)


def answer(method: Method, name: str) -> Answers:
    """Run a method on all rows; `name` is its module:function."""
    of = {}
    with progress("rows of the board") as on_progress:
        for number, row in enumerate(rows()):
            on_progress("rows of the board", number, len(rows()))
            of[row.name] = Answered.by(method, row)
    return Answers(name, _revision(name.partition(":")[0]), date.today().isoformat(), of)


def _revision(module: str) -> str:
    """Return the `REVISION` of a module, of which peers have one."""
    try:
        return str(getattr(import_module(module), "REVISION", ""))
    except ModuleNotFoundError:
        return ""


def kept_answers() -> dict[str, Answers]:
    """Return the answers in `data/board/answers` by name, those of ddplab and of simple methods first."""
    first = ["ddplab", *(name.replace(" ", "_") for name in BASELINES), "links_only"]
    paths = {path.stem: path for path in sorted((BOARD / "answers").glob("*.csv"))}
    return {name: Answers.load(paths[name]) for name in sorted(paths, key=[*first, *paths].index)}


# Scores

LEAST_ROWS = 5
"""Fewest rows of a system that get a line."""


def score(method: Method, name: str = "method") -> Table:
    """Run a method and return its table."""
    return method_table(answer(method, name), Answers.load(BOARD / "answers" / "ddplab.csv"))


def compared(answers: Answers, of: Iterable[Row]) -> list[Comparison]:
    """Compare the answers to some rows with the truths; rows that the method does not take are left out."""
    measured, pairs = truths(), [(row, answers.of.get(row.name)) for row in of]
    return [
        Comparison(
            part=row.part,
            case=row.system,
            group=row.name,
            label="",
            calibrated_from="",
            predicted_ns=one.ms * 1e6,
            measured_ns=measured[row.name] * 1e6,
            interval_ns=one.interval_ms and (one.interval_ms[0] * 1e6, one.interval_ms[1] * 1e6),
        )
        for row, one in pairs
        if one is not None and one.ms is not None
    ]


def method_table(answers: Answers, reference: Answers) -> Table:
    """One line for all rows that the method takes, for each part, and for each system of five rows or more.

    In brackets stand the figures of another method on the same rows.
    """
    taken = answers.taken()
    parts, systems = dict[str, list[Row]](), dict[str, list[Row]]()
    for row in taken:
        parts.setdefault(f"({row.part})", []).append(row)
        systems.setdefault(f"({row.part}) {row.system}", []).append(row)
    large = {name: of for name, of in systems.items() if len(of) >= LEAST_ROWS}
    return [
        {"name": name, "rows": str(len(of))} | _beside(_figures(answers, of), _figures(reference, of))
        for name, of in ({"all": taken} | dict(sorted((parts | large).items()))).items()
    ]


def _figures(answers: Answers, of: Sequence[Row]) -> dict[str, str]:
    found, seconds = compared(answers, of), [answers.of[row.name].seconds for row in of]
    within = [one for one in found if one.interval_ns]
    return {
        "mean error": _mean(found),
        "worst error": f"{max((one.error for one in found), key=abs):+.1%}",
        "inside": f"{sum(one.is_inside for one in within)}/{len(within)}" if within else "",
        "interval score": f"{fmean(one.interval_score for one in within):.0%}" if within else "",
        "seconds, median": f"{median(seconds):.2g}",
        "seconds, all": f"{sum(seconds):.3g}",
    }


def _beside(figures: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    return {name: text and f"{text} ({others[name] or '-'})" for name, text in figures.items()}


def _mean(found: Sequence[Comparison]) -> str:
    return f"{mean_absolute([one.error for one in found]):.1%}" if found else ""


BESIDE = {
    "ddplab": "ddplab",
    "pipelined": "pipelined_overlap",
    "overlap only": "naive_overlap",
    "links only": "links_only",
}
"""Methods whose mean errors on the same rows stand beside that of each method, by column."""


def board_table(kept: Mapping[str, Answers]) -> Table:
    """One line for each method: its errors, and those of others on the rows that it takes."""
    table = []
    for name, answers in kept.items():
        if not (taken := answers.taken()):
            continue
        figures = _figures(answers, taken)
        table.append(
            {
                "name": name.replace("_", " "),
                "revision": answers.revision[:8],
                "date": answers.date,
                "rows": str(len(taken)),
                "mean error": figures["mean error"],
                **{column: _mean(compared(kept[other], taken)) for column, other in BESIDE.items() if other in kept},
                **{column: figures[column] for column in ("worst error", "inside", "seconds, median")},
                "left out": str(len(rows()) - len(taken)),
            }
        )
    return table


ALL_NOTE = "All methods; ddplab to links only: mean errors of these on the same rows; overlap only is naive overlap"


def left_out(answers: Answers) -> list[str]:
    """Return a line for each reason for which a method leaves rows out, the commonest first, with their number."""
    given = [answers.of.get(row.name, Answered(None, None, 0, "no answer")) for row in rows()]
    why = Counter(one.why for one in given if one.ms is None)
    return [f"  {count} rows left out: {text}" for text, count in why.most_common()]


def parts_table(kept: Mapping[str, Answers]) -> Table:
    """One line for each method: its mean error in each part, over the rows that it takes."""
    parts = list(dict.fromkeys(sorted(row.part for row in rows())))
    table = []
    for name, answers in kept.items():
        found = {part: compared(answers, [row for row in rows() if row.part == part]) for part in parts}
        cells = {f"({part})": f"{_mean(of)} of {len(of)}" if of else "" for part, of in found.items()}
        table.append({"name": name.replace("_", " "), **cells})
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of a method, or that of all methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", help="module:function that takes a Row and returns an Answer")
    parser.add_argument("--out", type=Path, help="file for the answers, .csv")
    options = parser.parse_args(arguments)
    kept = kept_answers()
    if options.method is None:
        show_table(board_table(kept), ALL_NOTE)
        for name, of_method in kept.items():
            if lines := left_out(of_method):
                print(f"\n{name}", *lines, sep="\n")
        show_table(parts_table(kept), "\nMean errors by part")
        return
    module, _, function = options.method.partition(":")
    try:
        answers = answer(getattr(import_module(module), function), options.method)
    except (ImportError, AttributeError) as error:
        sys.exit(f"board: --method: expected module:function, got {options.method}: {error}")
    if options.out:
        write_atomically(options.out, answers.to_csv())
    if any(one.ms is not None for one in answers.of.values()) and "ddplab" in kept:
        show_table(method_table(answers, kept["ddplab"]), "In brackets: ddplab on the same rows")
    print("", *left_out(answers), sep="\n")


if __name__ == "__main__":
    main()
