"""Parts (f) and (g): the committed runs of `ddplab validate`, one folder of `validation/runs` each.

Part (f) has the runs on emulated accelerators, (g) those in which the processor computed. Measurements are read from
the report of a run. Predictions are computed again with the current simulator, from the trace and the calibration
that were recorded before the target runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path

import numpy as np

from ddplab.validation.validation_report import (
    TargetPrediction,
    ValidationReport,
    ValidationRow,
    make_row,
    pairs_apart,
    predict_targets,
    summarize,
)
from reference.bucketing import cap_name
from simulator import Fabric
from simulator.baseline_predictions import BASELINES, FEWER_BUCKETS, RANKING_BASELINES
from simulator.fabric.uncertainty import BAND

from .comparison import CaseScore, Comparison, Part

RUNS = Path(__file__).parent / "runs"


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
    recorded: ValidationReport
    current: ValidationReport
    source: str

    @property
    def part(self) -> Part:
        """The part of the score to which the run belongs."""
        return "g" if self.recorded.scale_model is None else "f"


def load_runs(folder: Path = RUNS) -> list[CommittedRun]:
    """Read all runs in a folder, in the order of their names, and predict them again.

    The intervals of each run are made with the error of the other runs in the same part of the score.

    Raises:
        ValueError: A file is missing or malformed. The message is one line with file, field and reason.
    """
    predicted = [_predict_again(path.parent) for path in sorted(folder.glob("*/report.json"))]
    runs = [one.run() for one in predicted]
    others = [[other for other in runs if other.part == run.part and other.name != run.name] for run in runs]
    return [
        one.run(model_error(of_part)) if of_part else run
        for one, of_part, run in zip(predicted, others, runs, strict=True)
    ]


def model_error(runs: Sequence[CommittedRun]) -> float:
    """Return the `model_error` of these runs: what nine in ten of their paired errors do not exceed."""
    errors = [abs(row.paired_error) for run in runs for row in run.current.rows]
    return float(np.quantile(errors, BAND))


@cache
def committed_runs() -> tuple[CommittedRun, ...]:
    """The runs of this repository; they are predicted once in a process, in up to half a minute."""
    return tuple(load_runs())


@dataclass(frozen=True)
class _PredictedRun:
    """A committed run and the predictions of the current simulator, by model.

    Attributes:
        name: Name of its folder.
        recorded: The report as it was written.
        world_size: Number of ranks.
        models: For each model its rows, their predictions, and the fabric of the predictions.
    """

    name: str
    recorded: ValidationReport
    world_size: int
    models: list[tuple[list[ValidationRow], list[TargetPrediction], Fabric]]

    def run(self, error: float | None = None) -> CommittedRun:
        """Compare with the measurements; intervals are made with this `model_error`, or that of the fabric."""
        scale = self.recorded.scale
        rows: list[ValidationRow] = []
        for recorded, targets, fabric in self.models:
            with_error = fabric if error is None else fabric.with_processor(model_error=error)
            spread = with_error.iteration_spread(self.world_size)
            for row, target in zip(recorded, targets, strict=True):
                turns = [
                    replace(turn, times_ns=tuple(round(ns * scale.dilation) for ns in turn.times_ns))
                    for turn in row.turns
                ]
                in_model = make_row(row.model, row.configuration, _with_spread(target, spread), turns)
                rows.append(in_model.in_original(scale))
        source = self.models[-1][2].source.partition(";")[0].removeprefix("measured: ")
        return CommittedRun(self.name, self.recorded, summarize(rows, self.recorded.predictions_sha256), source)


def _with_spread(target: TargetPrediction, spread: float) -> TargetPrediction:
    """Return the prediction with an interval of this half-width, a fraction; unchanged if it is 0."""
    median_ns = target.prediction.iteration_ns
    interval_ns = round(max(0.0, median_ns * (1 - spread))), round(median_ns * (1 + spread))
    return replace(target, prediction=replace(target.prediction, interval_ns=interval_ns)) if spread else target


def _predict_again(folder: Path) -> _PredictedRun:
    recorded = ValidationReport.load(folder)
    models, world_size = [], 1
    for model in dict.fromkeys(row.model for row in recorded.rows):
        rows = [row for row in recorded.rows if row.model == model]
        trace, fabric = recorded.inputs(folder, model)
        in_model = [row.configuration.in_model(recorded.scale) for row in rows]
        world_size = recorded.world_size or trace.workload.world_size
        targets = predict_targets(trace, fabric, in_model, world_size, speed_check=rows[0].speed_check)
        models.append((rows, targets, fabric))
    return _PredictedRun(folder.name, recorded, world_size, models)


def score(run: CommittedRun) -> CaseScore:
    """Compare predictions with measured times.

    Rankings are those of the report: pairs of configurations that differ by more than noise. The fastest of all is
    seldom measurably faster than the second.
    """
    return CaseScore(
        tuple(
            Comparison(
                part=run.part,
                case=run.name,
                group=row.model,
                label=_name(row),
                calibrated_from=run.source,
                predicted_ns=row.predicted_ns,
                measured_ns=row.measured_ns,
                baselines_ns={name: _baseline_ns(row, name) for name in BASELINES},
            )
            for row in run.current.rows
        )
    )


def _name(row: ValidationRow) -> str:
    return f"{cap_name(row.cap_mb)} {row.order}" + ("" if row.hook == "none" else f", {row.hook}")


def _baseline_ns(row: ValidationRow, name: str) -> float:
    """The time that a baseline predicts, computed from its error, which the report compares with the paired time."""
    error: float = getattr(row, f"{name.replace(' ', '_')}_error")
    return (1 + error) * row.paired_ns


@dataclass(frozen=True)
class Ranking:
    """Pairs of configurations that differ by more than noise, and how many of them each method ranks wrongly."""

    pairs: int
    wrong: int
    wrong_by_baseline: Mapping[str, int]


def ranking(runs: Sequence[CommittedRun]) -> Ranking:
    """Count the pairs of several runs."""
    pairs = [pair for run in runs for pair in pairs_apart(run.current.rows)]

    def wrong(predicted: Callable[[ValidationRow], float]) -> int:
        return sum((a.paired_ns < b.paired_ns) != (predicted(a) <= predicted(b)) for a, b in pairs)

    by_baseline: dict[str, Callable[[ValidationRow], float]] = {
        name: partial(_baseline_ns, name=name) for name in BASELINES if name in RANKING_BASELINES
    }
    by_baseline[FEWER_BUCKETS] = attrgetter("buckets")
    return Ranking(
        len(pairs), wrong(attrgetter("predicted_ns")), {name: wrong(ns) for name, ns in by_baseline.items()}
    )
