"""Part (d): committed runs of `ddplab validate`, one folder of `validation/runs` each.

Their measurements stay; predictions are made anew, from the trace and the calibration that were recorded before.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reference.bucketing import Order, cap_name
from reference.schema import first_problem
from reference.trace import Trace
from simulator import Fabric
from simulator.measure.report import (
    Configuration,
    Measurement,
    Report,
    SpeedCheck,
    make_row,
    model_folder,
    predict_targets,
    summarize,
)
from simulator.measure.report import Row as Compared

from .rows import RULES, Scored, ScoreRow, WinnerTally, winner

RUNS = Path(__file__).parent / "runs"
YARDSTICKS = ("perfect scaling", "no overlap", "naive overlap")


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Turn(_Read):
    """A `simulator.measure.report.Measurement`; runs of before 22 November 2026 have one figure for the reference."""

    times_ns: tuple[int, ...]
    reference: SpeedCheck | None = None
    reference_ns: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _has_a_reference(self) -> Self:
        if (self.reference is None) == (self.reference_ns is None):
            raise ValueError("expected reference or reference_ns, one of both")
        return self

    def beside(self, predicted: SpeedCheck) -> Measurement:
        """With a reference in two parts: where one figure was kept, both parts were as much slower as the whole."""
        if self.reference is not None:
            return Measurement(self.times_ns, self.reference)
        assert self.reference_ns is not None
        slower = self.reference_ns / predicted.total_ns
        parts = SpeedCheck(round(slower * predicted.compute_ns), round(slower * predicted.all_reduce_ns))
        return Measurement(self.times_ns, parts)


class Turns(_Read):
    """Of a `simulator.measure.report.Row`, what was measured and of what; an infinite cap is written as null."""

    model: str
    cap_mb: float | None
    order: str = Field(pattern="|".join(get_args(Order)))
    hook: str
    turns: tuple[Turn, ...] = Field(min_length=1)

    @property
    def configuration(self) -> Configuration:
        """As it was predicted."""
        cap = float("inf") if self.cap_mb is None else self.cap_mb
        return Configuration(cap, self.order, self.hook)  # type: ignore[arg-type]  # the pattern says so


class Reported(_Read):
    """The parts of a `Report` that are read back: what was predicted before, and what was measured."""

    mape: float
    paired_mape: float
    predictions_sha256: str
    rows: tuple[Turns, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Run:
    """A committed run.

    Attributes:
        name: Of its folder.
        reported: Its report as it was written.
        now: The same measurements beside predictions of the simulator as it is.
        source: Of the calibration.
    """

    name: str
    reported: Reported
    now: Report
    source: str


def load_runs(folder: Path = RUNS) -> list[Run]:
    """All runs, by name, with predictions made anew; none where there are none.

    Raises:
        ValueError: A file that cannot be used; one line, which names file, field and reason.
    """
    return [_load(path.parent) for path in sorted(folder.glob("*/report.json"))]


@cache
def committed_runs() -> tuple[Run, ...]:
    """The runs of this repository, predicted once a process: that takes half a minute."""
    return tuple(load_runs())


def _load(folder: Path) -> Run:
    reported = _read(folder / "report.json")
    compared: list[Compared] = []
    source = ""
    for model in dict.fromkeys(row.model for row in reported.rows):
        files = model_folder(folder, model)
        trace, fabric = Trace.load(files / "trace.json.gz"), Fabric.load(files / "fabric.json")
        rows = [row for row in reported.rows if row.model == model]
        configurations = [row.configuration for row in rows]
        said = predict_targets(trace, fabric, configurations, trace.workload.world_size)
        compared += [
            make_row(model, configuration, predicted, [turn.beside(predicted.speed_check) for turn in row.turns])
            for configuration, predicted, row in zip(configurations, said, rows, strict=True)
        ]
        source = fabric.source.partition(";")[0].removeprefix("measured: ")
    return Run(folder.name, reported, summarize(compared, reported.predictions_sha256), source)


def _read(path: Path) -> Reported:
    try:
        return Reported.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: not a report of `ddplab validate`: {first_problem(error)}") from None


def score(run: Run) -> Scored:
    """Predictions beside what the clock said, and of each model which configuration is the fastest."""
    rows = [
        ScoreRow(
            part="d",
            case=run.name,
            group=row.model,
            what=_name(row),
            calibrated=run.source,
            predicted_ns=row.predicted_ns,
            measured_ns=row.measured_ns,
            yardsticks_ns={name: _yardstick_ns(row, name) for name in YARDSTICKS},
        )
        for row in run.now.rows
    ]
    models = dict.fromkeys(row.model for row in run.now.rows)
    return Scored(tuple(rows), tuple(_contest(run, model) for model in models))


def _name(row: Compared) -> str:
    return f"{cap_name(row.cap_mb)} {row.order}" + ("" if row.hook == "none" else f", {row.hook}")


def _yardstick_ns(row: Compared, name: str) -> float:
    """What a yardstick says; the report has its error against the paired time."""
    error: float = getattr(row, f"{name.replace(' ', '_')}_error")
    return (1 + error) * row.paired_ns


def _contest(run: Run, model: str) -> WinnerTally:
    """By paired times, as configurations had their turns one after the other; a tie where quartiles overlap."""
    entrants = {_name(row): row for row in run.now.rows if row.model == model}
    times = {
        name: {
            "measured": row.paired_ns,
            "predicted": row.predicted_ns,
            **{rule: _yardstick_ns(row, rule) for rule in RULES},
        }
        for name, row in entrants.items()
    }
    fastest = winner(times, "measured")
    first = entrants[fastest]
    others = [row for name, row in entrants.items() if name != fastest]
    return WinnerTally(
        part="d",
        case=run.name,
        what=model,
        predicted=winner(times, "predicted"),
        measured=fastest,
        lead=min((row.paired_ns / first.paired_ns - 1 for row in others), default=0.0),
        is_tie=not (others and all(row.paired_quartiles_ns[0] > first.paired_quartiles_ns[1] for row in others)),
        yardsticks={rule: winner(times, rule) for rule in RULES},
    )
