"""Parts (f) and (g): the committed runs of `ddplab validate`, one folder of `validation/runs` each.

Part (f) has the runs on emulated accelerators, (g) those in which the processor computed. Measurements are read from
the report of a run. Predictions are computed again with the current simulator, from the trace and the calibration
that were recorded before the target runs.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple, Self

import numpy as np

from ddplab.prediction_errors import (
    TargetPrediction,
    ValidationReport,
    ValidationRow,
    make_row,
    measurement_noise,
    policy_of,
    predict_target,
    summarize,
)
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric
from ddplab.simulator.baseline_predictions import BASELINES
from ddplab.simulator.fabric.cost_curves import BAND
from ddplab.simulator.fabric.processor_costs import MODEL_ERROR
from ddplab.training_runs import Turn

from .comparison import FEWER_BUCKETS, RANKING_BASELINES, CaseScore, Comparison, Part
from .emulated import EMULATED_MODEL_ERROR, LaboratoryReport
from .scale_model import ORIGINAL, ScaleModel

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
    recorded: LaboratoryReport
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
    """Return the error of medians in these runs: what nine in ten of their errors do not exceed."""
    errors = [abs(row.error) for run in runs for row in run.current.rows]
    return float(np.quantile(errors, BAND))


@cache
def committed_runs() -> tuple[CommittedRun, ...]:
    """The runs of this repository; they are predicted once in a process, in up to half a minute."""
    return tuple(load_runs())


@dataclass(frozen=True)
class _PredictedRun:
    """A committed run and the predictions of the current simulator.

    Attributes:
        name: Name of its folder.
        recorded: The report as it was written.
        world_size: Number of ranks.
        targets: The prediction of each row.
        fabric: The fabric of the predictions.
        own_spread: Spread of the iterations of one training run around their own median, a fraction.
    """

    name: str
    recorded: LaboratoryReport
    world_size: int
    targets: list[TargetPrediction]
    fabric: Fabric
    own_spread: float

    def run(self, error: float | None = None) -> CommittedRun:
        """Compare with the measurements; intervals are made with this error of medians, or that of the product."""
        scale = self.recorded.scale_model or ORIGINAL
        has_spread = self.fabric.iteration_spread(self.world_size) > 0
        spread = float(np.hypot(self.own_spread, error)) if has_spread and error is not None else 0.0
        rows: list[ValidationRow] = []
        for row, target in zip(self.recorded.rows, self.targets, strict=True):
            turns = [Turn(tuple(round(ns * scale.dilation) for ns in turn.times_ns)) for turn in row.turns]
            in_model = make_row(row.model, row.configuration, _with_spread(target, spread), turns)
            rows.append(scale.original_row(in_model))
        source = self.fabric.source.partition(";")[0].removeprefix("measured: ")
        return CommittedRun(self.name, self.recorded, summarize(rows, self.recorded.predictions_sha256), source)


def _with_spread(target: TargetPrediction, spread: float) -> TargetPrediction:
    """Return the prediction with an interval of this half-width, a fraction; unchanged if it is 0."""
    median_ns, least_ns = target.prediction.iteration_ns, target.prediction.least_ns
    interval_ns = round(max(least_ns, median_ns * (1 - spread))), round(median_ns * (1 + spread))
    return target._replace(prediction=replace(target.prediction, interval_ns=interval_ns)) if spread else target


class RunFiles(NamedTuple):
    """The files of a run; trace and fabric were recorded before the target runs, and are those of the scale model."""

    recorded: LaboratoryReport
    trace: Trace
    fabric: Fabric
    world_size: int
    scale: ScaleModel

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the files of a folder."""
        recorded = LaboratoryReport.load(folder)
        trace, fabric = Trace.load(folder / "trace.json.gz"), Fabric.load(folder / "fabric.json")
        world_size = recorded.world_size or trace.workload.world_size
        return cls(recorded, trace, fabric, world_size, recorded.scale_model or ORIGINAL)


def _predict_again(folder: Path) -> _PredictedRun:
    recorded, trace, fabric, world_size, scale = RunFiles.read(folder)
    policies = [policy_of(scale.configuration(row.configuration)) for row in recorded.rows]
    targets = [predict_target(trace, fabric, policy, world_size) for policy in policies]
    return _PredictedRun(folder.name, recorded, world_size, targets, fabric, _own_spread(folder, recorded))


def _own_spread(folder: Path, recorded: LaboratoryReport) -> float:
    """Return the spread of a run without the error of medians, which older fabric files state beside it."""
    processor = json.loads((folder / "fabric.json").read_text()).get("processor", {})
    spread = float(processor.get("iteration_spread") or 0.0)
    usual = MODEL_ERROR if recorded.scale_model is None else EMULATED_MODEL_ERROR
    return spread if "model_error" in processor else float(max(0.0, spread**2 - usual**2) ** 0.5)


def interval_score(row: ValidationRow, interval_ns: tuple[float, float]) -> float:
    """Return the mean interval score of the iterations, as a fraction of their median; less is better.

    The score of an iteration is the width of the interval and, outside of it, 2 / 0.1 times the distance from it:
    the proper score for an interval that should contain 90 % (Gneiting and Raftery 2007, equation 43).
    """
    low, high = interval_ns
    outside = [max(low - ns, ns - high, 0) for ns in row.times_ns]
    return (high - low + 2 / (1 - BAND) * fmean(outside)) / row.measured_ns


def mean_interval_score(report: ValidationReport) -> float:
    """Return the mean of `interval_score` over the rows, with the interval of each."""
    return fmean(interval_score(row, row.interval_ns) for row in report.rows)


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
    return f"{row.configuration.cap} {row.order}" + ("" if row.hook == "none" else f", {row.hook}")


def _baseline_ns(row: ValidationRow, name: str) -> float:
    """The time that a baseline predicts, computed from its error."""
    error: float = getattr(row, f"{name.replace(' ', '_')}_error")
    return (1 + error) * row.measured_ns


def pairs_apart(rows: Sequence[ValidationRow]) -> list[tuple[ValidationRow, ValidationRow]]:
    """Return the pairs of configurations whose quartiles do not overlap and that differ by more than noise."""
    noise = measurement_noise(rows) or 0.0

    def are_apart(pair: tuple[ValidationRow, ValidationRow]) -> bool:
        low, high = sorted(pair, key=attrgetter("measured_ns"))
        return low.quartiles_ns[1] < high.quartiles_ns[0] and high.measured_ns > (1 + noise) * low.measured_ns

    return list(filter(are_apart, combinations(rows, 2)))


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
        return sum((a.measured_ns < b.measured_ns) != (predicted(a) <= predicted(b)) for a, b in pairs)

    by_baseline: dict[str, Callable[[ValidationRow], float]] = {
        name: partial(_baseline_ns, name=name) for name in BASELINES if name in RANKING_BASELINES
    }
    by_baseline[FEWER_BUCKETS] = attrgetter("buckets")
    return Ranking(
        len(pairs), wrong(attrgetter("predicted_ns")), {name: wrong(ns) for name, ns in by_baseline.items()}
    )
