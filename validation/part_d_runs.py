"""Part (d): the committed runs of `ddplab validate`, one folder of `validation/runs` each.

Measurements are read from the report of a run. Predictions are computed again with the current simulator, from the
trace and the calibration that were recorded before the target runs.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reference.bucketing import Order, cap_name
from reference.files import first_problem
from reference.trace import Trace
from simulator import Fabric
from simulator.measure.report import (
    Configuration,
    Measurement,
    Report,
    Row,
    SpeedCheck,
    make_row,
    model_folder,
    predict_targets,
    summarize,
)

from .comparison import RANKING_BASELINES, CaseScore, Comparison, FastestChoice, fastest

RUNS = Path(__file__).parent / "runs"
BASELINES = ("perfect scaling", "no overlap", "naive overlap")


class _ReportPart(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RecordedTurn(_ReportPart):
    """A `Measurement` as written; runs before 22 November 2026 have one total for both parts of the speed check."""

    times_ns: tuple[int, ...]
    reference: SpeedCheck | None = None
    reference_ns: int | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _has_one_reference(self) -> Self:
        if (self.reference is None) == (self.reference_ns is None):
            raise ValueError("expected exactly one of reference and reference_ns")
        return self

    def as_measurement(self, predicted: SpeedCheck) -> Measurement:
        """The turn with a speed check in two parts.

        A total is split in proportion to the predicted speed check: both parts became slower by the same factor.
        """
        if self.reference is not None:
            return Measurement(self.times_ns, self.reference)
        assert self.reference_ns is not None
        slower = self.reference_ns / predicted.total_ns
        parts = SpeedCheck(round(slower * predicted.compute_ns), round(slower * predicted.all_reduce_ns))
        return Measurement(self.times_ns, parts)


class RecordedRow(_ReportPart):
    """Configuration and measurements of a row of the report; an infinite cap is written as null."""

    model: str
    cap_mb: float | None
    order: str = Field(pattern=f"^({'|'.join(get_args(Order))})$")
    hook: str
    turns: tuple[RecordedTurn, ...] = Field(min_length=1)

    @property
    def configuration(self) -> Configuration:
        """The predicted configuration."""
        cap = float("inf") if self.cap_mb is None else self.cap_mb
        return Configuration(cap, self.order, self.hook)  # type: ignore[arg-type]  # the pattern ensures an Order


class RecordedReport(_ReportPart):
    """The fields of a written report that are used here: its errors at the time, and all measurements."""

    mape: float
    paired_mape: float
    predictions_sha256: str
    rows: tuple[RecordedRow, ...] = Field(min_length=1)


@dataclass(frozen=True)
class CommittedRun:
    """One committed run.

    Attributes:
        name: Name of its folder.
        recorded: The report as it was written.
        current: The same measurements beside predictions of the current simulator.
        source: Source of the calibration.
    """

    name: str
    recorded: RecordedReport
    current: Report
    source: str


def load_runs(folder: Path = RUNS) -> list[CommittedRun]:
    """Read all runs in a folder, in the order of their names, and predict them again.

    Raises:
        ValueError: A file is missing or malformed. The message is one line with file, field and reason.
    """
    return [_load(path.parent) for path in sorted(folder.glob("*/report.json"))]


@cache
def committed_runs() -> tuple[CommittedRun, ...]:
    """The runs of this repository; they are predicted once in a process, in up to half a minute."""
    return tuple(load_runs())


def _load(folder: Path) -> CommittedRun:
    recorded = _read(folder / "report.json")
    rows: list[Row] = []
    source = ""
    for model in dict.fromkeys(row.model for row in recorded.rows):
        files = model_folder(folder, model)
        trace, fabric = Trace.load(files / "trace.json.gz"), Fabric.load(files / "fabric.json")
        of_model = [row for row in recorded.rows if row.model == model]
        configurations = [row.configuration for row in of_model]
        targets = predict_targets(trace, fabric, configurations, trace.workload.world_size)
        rows += [
            make_row(model, configuration, target, [turn.as_measurement(target.speed_check) for turn in row.turns])
            for configuration, target, row in zip(configurations, targets, of_model, strict=True)
        ]
        source = fabric.source.partition(";")[0].removeprefix("measured: ")
    return CommittedRun(folder.name, recorded, summarize(rows, recorded.predictions_sha256), source)


def _read(path: Path) -> RecordedReport:
    try:
        return RecordedReport.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: not a report of `ddplab validate`: {first_problem(error)}") from None


def score(run: CommittedRun) -> CaseScore:
    """Compare predictions with measured times, and find the fastest configuration of each model."""
    rows = [
        Comparison(
            part="d",
            case=run.name,
            group=row.model,
            label=_name(row),
            calibrated_from=run.source,
            predicted_ns=row.predicted_ns,
            measured_ns=row.measured_ns,
            baselines_ns={name: _baseline_ns(row, name) for name in BASELINES},
        )
        for row in run.current.rows
    ]
    models = dict.fromkeys(row.model for row in run.current.rows)
    return CaseScore(tuple(rows), tuple(_fastest_choice(run, model) for model in models))


def _name(row: Row) -> str:
    return f"{cap_name(row.cap_mb)} {row.order}" + ("" if row.hook == "none" else f", {row.hook}")


def _baseline_ns(row: Row, name: str) -> float:
    """The time that a baseline predicts, computed from its error, which the report compares with the paired time."""
    error: float = getattr(row, f"{name.replace(' ', '_')}_error")
    return (1 + error) * row.paired_ns


def _fastest_choice(run: CommittedRun, model: str) -> FastestChoice:
    """Compare paired times, as configurations were measured one after the other; a tie if quartiles overlap."""
    rows = {_name(row): row for row in run.current.rows if row.model == model}
    times = {
        name: {
            "measured": row.paired_ns,
            "predicted": row.predicted_ns,
            **{baseline: _baseline_ns(row, baseline) for baseline in RANKING_BASELINES},
        }
        for name, row in rows.items()
    }
    measured = fastest(times, "measured")
    first = rows[measured]
    others = [row for name, row in rows.items() if name != measured]
    return FastestChoice(
        part="d",
        case=run.name,
        label=model,
        predicted=fastest(times, "predicted"),
        measured=measured,
        lead=min((row.paired_ns / first.paired_ns - 1 for row in others), default=0.0),
        is_tie=not (others and all(row.paired_quartiles_ns[0] > first.paired_quartiles_ns[1] for row in others)),
        baselines={name: fastest(times, name) for name in RANKING_BASELINES},
    )
