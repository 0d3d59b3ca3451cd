"""Prediction errors: predictions and baselines compared with measurements, and the report of `ddplab validate`."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter

from .calibration.repeated_timing import interval_of_median
from .reference.bucketing import Order, cap_name
from .reference.files.value_ranges import Nanoseconds
from .reference.files.writing import write_atomically
from .reference.trace import Trace
from .simulator.baseline_predictions import BASELINES as BASELINE_NAMES
from .simulator.baseline_predictions import baselines_ns
from .simulator.fabric import Fabric
from .simulator.fabric.cost_curves import NORMAL_HALF_BAND
from .simulator.predicted_iteration import Prediction
from .simulator.prediction import predict
from .simulator.schedule.comm_hook_messages import named_hook
from .simulator.schedule.policy import Policy
from .training_runs import Turn

BASELINES = tuple(name.replace(" ", "_") for name in BASELINE_NAMES)
"""Simpler predictions to compare with."""
Cap = Annotated[
    Annotated[float, Field(ge=0)] | Literal["default", "plan"],
    BeforeValidator(lambda cap: math.inf if cap is None else cap),
    PlainSerializer(lambda cap: None if cap == math.inf else cap),
]
"""A bucket cap in MiB, infinite for a single bucket, which is null in JSON, because JSON has no infinity. Or
"default", which means torch's default buckets, or "plan", those of a plan."""


@dataclass(frozen=True)
class Configuration:
    """Buckets, bucket order and comm hook of a target run; the hook's name is one that `named_hook` takes."""

    cap_mb: Cap
    order: Order = "ready"
    hook: str = "none"

    @property
    def cap(self) -> str:
        """The cap in words."""
        return self.cap_mb if isinstance(self.cap_mb, str) else cap_name(self.cap_mb)


def policy_of(configuration: Configuration, explicit: Mapping[str, Sequence[Sequence[int]]] | None = None) -> Policy:
    """Return the settings of the reducer; `explicit` has the buckets of the caps that are names."""
    hook = named_hook(configuration.hook)
    if isinstance(configuration.cap_mb, str):
        return Policy(plan=tuple(map(tuple, (explicit or {})[configuration.cap_mb])), hook=hook)
    return Policy(bucket_cap_mb=configuration.cap_mb, order=configuration.order, hook=hook)


class TargetPrediction(NamedTuple):
    """What is predicted about a target run before it starts; also the nanoseconds of an iteration by baseline."""

    prediction: Prediction
    baselines_ns: Mapping[str, int]


def predict_target(trace: Trace, fabric: Fabric, policy: Policy, world_size: int) -> TargetPrediction:
    """Predict one configuration, also with the baselines."""
    how: dict[str, Any] = {"world_size": world_size, "policy": policy}
    prediction = predict(trace, fabric, assume=False, **how)
    simpler = baselines_ns(trace, fabric, **how) | {"no overlap": prediction.no_overlap_ns}  # here with copies
    return TargetPrediction(prediction, {name.replace(" ", "_"): ns for name, ns in simpler.items()})


@dataclass(frozen=True)
class ValidationRow:
    """A configuration's prediction compared with its measurement, in ns; each error is predicted / measured - 1."""

    model: str
    cap_mb: Cap  #: as in `Configuration`, and so are `order` and `hook`
    order: Order
    hook: str
    buckets: int
    turns: Annotated[tuple[Turn, ...], Field(min_length=1)]
    measured_ns: int  #: median of the measured iterations
    quartiles_ns: tuple[int, int]  #: first and third quartile of the measured iterations
    predicted_ns: Nanoseconds  #: median of the predicted iterations
    interval_ns: tuple[int, int]  #: ends of the predicted 90 % interval
    coverage: float  #: fraction of the measured iterations that lie inside the interval
    error: float
    perfect_scaling_error: float  #: of a baseline of `simulator.baseline_predictions`, as the other three are
    no_overlap_error: float
    naive_overlap_error: float
    pipelined_overlap_error: float

    @property
    def configuration(self) -> Configuration:
        """The predicted configuration."""
        return Configuration(self.cap_mb, self.order, self.hook)

    @cached_property
    def times_ns(self) -> list[int]:
        """All measured iterations."""
        return [ns for turn in self.turns for ns in turn.times_ns]

    @cached_property
    def turns_ns(self) -> list[float]:
        """The median of each turn."""
        return [statistics.median(turn.times_ns) for turn in self.turns]

    @property
    def torchs_multiple(self) -> float | None:
        """Iteration of torch's class as a multiple of ours: the median of the turns. None: it did not train."""
        pairs = [(turn.torchs_ns, turn.times_ns) for turn in self.turns if turn.torchs_ns]
        return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs) if pairs else None

    @property
    def half_width(self) -> float:
        """Half of the interval's width, as a fraction of the prediction."""
        low, high = self.interval_ns
        return (high - low) / 2 / self.predicted_ns


def make_row(
    model: str, configuration: Configuration, predicted: TargetPrediction, turns: Sequence[Turn]
) -> ValidationRow:
    """Make the row of a configuration from its prediction and all of its turns."""
    prediction = predicted.prediction
    times_ns = [ns for turn in turns for ns in turn.times_ns]
    low, measured, high = (round(ns) for ns in np.quantile(times_ns, [0.25, 0.5, 0.75]))
    shortest, longest = prediction.interval_ns
    return ValidationRow(
        model=model,
        **vars(configuration),
        buckets=len(prediction.buckets),
        turns=tuple(turns),
        measured_ns=measured,
        quartiles_ns=(low, high),
        predicted_ns=prediction.iteration_ns,
        interval_ns=(shortest, longest),
        coverage=statistics.fmean(shortest <= ns <= longest for ns in times_ns),
        error=prediction.iteration_ns / measured - 1,
        **{f"{name}_error": ns / measured - 1 for name, ns in predicted.baselines_ns.items()},
    )


@dataclass(frozen=True)
class Gain:
    """What a plan saves of the time of torch's default buckets, as fractions; a negative gain is a loss."""

    predicted: float
    measured: float  #: median of the gains of the turns, in each of which both trained
    interval: tuple[float, float] | None
    """Interval that contains the true median gain with at least 90 %. None after too few turns."""


def gain_of(default: ValidationRow, plan: ValidationRow) -> Gain:
    """Compare the rows of torch's default buckets and of a plan, which have trained in the same turns."""
    gains = [1 - of_plan / of_default for of_default, of_plan in zip(default.turns_ns, plan.turns_ns, strict=True)]
    return Gain(1 - plan.predicted_ns / default.predicted_ns, statistics.median(gains), interval_of_median(gains))


@dataclass(frozen=True)
class ValidationReport:
    """All rows and their summary."""

    predictions_sha256: str  #: hash of the predictions file, which was written before the first target run
    mape: float  #: mean absolute error
    worst_error: float  #: the one with the largest absolute value
    noise: float | None
    """Noise floor, the half-width of the band that holds 90 % of the differences between two measurements of the same
    configuration, as a fraction; from the differences between turns. None after one turn."""
    coverage: float  #: mean coverage of the rows; the intervals should cover 90 % of the iterations
    half_width: float  #: median of `ValidationRow.half_width`
    baselines: Annotated[dict[str, float], Field(alias="yardsticks")]  #: mean absolute error of each baseline
    rows: Annotated[tuple[ValidationRow, ...], Field(min_length=1)]
    world_size: int | None = None  #: number of ranks; None if the runs differ, or are older than this field
    gain: Gain | None = None  #: gain of a plan; None if no plan trained

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        document = TypeAdapter(type(self)).dump_python(self, by_alias=True)
        for row in document["rows"]:
            row["turns"] = [dict(zip(("times_ns", "torchs_ns"), turn, strict=False)) for turn in row["turns"]]
        return document  # type: ignore[no-any-return]

    def save(self, folder: Path) -> None:
        """Write `report.json`."""
        write_atomically(folder / "report.json", json.dumps(self.to_json(), indent=1, allow_nan=False).encode())


def summarize(rows: Sequence[ValidationRow], predictions_sha256: str, **about_the_run: Any) -> ValidationReport:
    """Make a report of these rows, with their summary; `about_the_run` are fields that are not computed from rows."""
    by_cap = {row.cap_mb: row for row in rows}
    return ValidationReport(
        predictions_sha256=predictions_sha256,
        mape=statistics.fmean(abs(row.error) for row in rows),
        worst_error=max((row.error for row in rows), key=abs),
        noise=measurement_noise(rows),
        coverage=statistics.fmean(row.coverage for row in rows),
        half_width=statistics.median(row.half_width for row in rows),
        baselines={name: statistics.fmean(abs(getattr(row, f"{name}_error")) for row in rows) for name in BASELINES},
        rows=tuple(rows),
        gain=gain_of(by_cap["default"], by_cap["plan"]) if "plan" in by_cap else None,
        **about_the_run,
    )


def measurement_noise(rows: Sequence[ValidationRow]) -> float | None:
    """Return `ValidationReport.noise` of these rows: the variance between the turns of a row, pooled over all rows.

    What all rows of a turn have in common is left out: a machine may be slower in one turn than in another.
    """
    repeated = [row.turns_ns for row in rows if len(row.turns_ns) > 1]
    if not repeated:
        return None
    turns = min(map(len, repeated))
    relative = np.array([of_row[:turns] for of_row in repeated], dtype=np.float64)
    relative /= relative.mean(axis=1, keepdims=True)
    relative -= relative.mean(axis=0) if len(repeated) > 1 else 1
    freedom = (turns - 1) * max(1, len(repeated) - 1)
    return NORMAL_HALF_BAND * float(np.sqrt(2 * (relative**2).sum() / freedom / turns))
