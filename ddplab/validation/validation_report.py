"""Report: predictions and baselines compared with measurements, their errors, and a figure."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from pydantic import BeforeValidator, Field, PlainSerializer, TypeAdapter

from reference.bucketing import Order, cap_name
from reference.files.reading import read_schema
from reference.files.value_ranges import Nanoseconds
from reference.files.writing import write_atomically
from reference.trace import Trace
from simulator.baseline_predictions import BASELINES as BASELINE_NAMES
from simulator.baseline_predictions import baselines_ns
from simulator.fabric import Fabric
from simulator.fabric.uncertainty import BAND, NORMAL_HALF_BAND
from simulator.prediction import Prediction, predict
from simulator.results.residual_plot import Residual, draw_residuals
from simulator.schedule.comm_hook_messages import named_hook
from simulator.schedule.policy import Policy

from ..emulation.time_dilation import ORIGINAL, ScaleModel
from .machine_conditions import Conditions

BASELINES = tuple(name.replace(" ", "_") for name in BASELINE_NAMES)
"""Simpler predictions to compare with."""
FOR_EMULATED = ("scale_model", "conditions")
"""Fields of a report on emulated devices."""
PAIRS = ("quartiles_ns", "paired_quartiles_ns", "interval_ns")
"""Fields of a row that hold two numbers."""
Cap = Annotated[
    float,
    Field(ge=0),
    BeforeValidator(lambda cap: math.inf if cap is None else cap),
    PlainSerializer(lambda cap: None if math.isinf(cap) else cap),
]
"""A bucket cap in MiB; infinite for a single bucket, which is null in JSON, because JSON has no infinity."""

PREDICTED_TRACE_FILE = "predicted_from.json.gz"
"""The trace from which the predictions for emulated devices are computed: with the work of the host."""


@dataclass(frozen=True)
class Configuration:
    """Bucket cap, bucket order and comm hook of a target run; the hook's name is one that `named_hook` takes."""

    cap_mb: Cap
    order: Order = "ready"
    hook: str = "none"

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return TypeAdapter(Configuration).dump_python(self)  # type: ignore[no-any-return]

    def in_model(self, scale: ScaleModel) -> Self:
        """The configuration in a scale model."""
        return replace(self, cap_mb=scale.cap_mb(self.cap_mb))


@dataclass(frozen=True)
class SpeedCheck:
    """The machine's speed: time of an iteration without communication and of an all-reduce of all gradients.

    Both are times of the slowest rank.
    """

    compute_ns: int
    all_reduce_ns: int

    @property
    def total_ns(self) -> int:
        """Both, one after the other."""
        return self.compute_ns + self.all_reduce_ns

    @classmethod
    def usual(cls, checks: Sequence[Self], usual: Callable[[Iterable[float]], float] = statistics.median) -> Self:
        """Return the usual time of each part: the median, or what another function returns."""
        return cls(round(usual(one.compute_ns for one in checks)), round(usual(one.all_reduce_ns for one in checks)))


@dataclass(frozen=True)
class TargetPrediction:
    """Everything that is predicted about a target run before the run starts.

    Attributes:
        prediction: The simulator's prediction.
        naive_overlap_ns: Nanoseconds of an iteration if collectives run one at a time, nothing slows anything down,
            and copies and launches are free.
        pipelined_overlap_ns: Nanoseconds of an iteration with copies and launches, if nothing slows anything down.
        speed_check: Times of a speed check at the calibration.
        with_slower_network: Function from a factor to the nanoseconds of an iteration in which every collective
            takes that many times as long.
    """

    prediction: Prediction
    naive_overlap_ns: int
    pipelined_overlap_ns: int
    speed_check: SpeedCheck
    with_slower_network: Callable[[float], int]

    def speed(self, now: SpeedCheck | None) -> float:
        """Return the machine's present speed for this target run, as a multiple of its speed at the calibration.

        An iteration on a machine whose processor is p times and whose network is n times slower takes p times as long
        as one on a machine whose network alone is n / p times slower: only the unit of time differs. A speed check
        measured `now` gives p and n; without one, the speed has not changed.
        """
        if now is None:
            return 1.0
        slower_processor = now.compute_ns / self.speed_check.compute_ns
        if not self.speed_check.all_reduce_ns:  # one rank: there is no network
            return 1 / slower_processor
        slower_network = now.all_reduce_ns / self.speed_check.all_reduce_ns
        now_ns = slower_processor * self.with_slower_network(round(slower_network / slower_processor, 3))
        return self.prediction.iteration_ns / now_ns


@dataclass(frozen=True)
class Measurement:
    """One turn of a target run: nanoseconds of each iteration, from one slowest rank's end to the next.

    `speed_check` has the medians of the speed checks right before and after the turn. None: an emulated device
    sleeps, so its speed does not change and is not checked. `torchs_ns` has the iterations of torch's class, which
    trained right after ours; empty if it did not.
    """

    times_ns: tuple[int, ...]
    speed_check: Annotated[SpeedCheck | None, Field(alias="reference")] = None
    torchs_ns: tuple[int, ...] = ()


@dataclass(frozen=True)
class ValidationRow:
    """A configuration's prediction compared with its measurement; times in nanoseconds, errors as fractions.

    A prediction is valid for the machine's speed at the calibration, but the speed of a shared machine changes within
    seconds. Each turn is therefore paired with speed checks right before and after it, and the paired fields are
    corrected for the change of the machine's speed. Every error is predicted / measured - 1.

    Attributes:
        model: Name of the model.
        cap_mb: As in `Configuration`, and so are `order` and `hook`.
        buckets: Number of buckets.
        turns: The measurements.
        speed_check: Times of a speed check at the calibration.
        measured_ns: Median of the measured iterations.
        quartiles_ns: First and third quartile of the measured iterations.
        paired_ns: Median of the measured iterations, each multiplied by `TargetPrediction.speed`.
        paired_quartiles_ns: First and third quartile of the same.
        paired_turns_ns: Median of the same, of each turn.
        paired_times_ns: All of them.
        predicted_ns: Median of the predicted iterations.
        interval_ns: Ends of the predicted 90 % interval.
        coverage: Fraction of the paired iterations that lie inside the interval.
        drift: How much longer the speed check took than predicted, as a fraction; median of the turns. None: there
            were no speed checks.
        error: Error of the prediction relative to `measured_ns`.
        paired_error: Error of the prediction relative to `paired_ns`.
        perfect_scaling_error: The same for a baseline; see `simulator.baseline_predictions`.
        no_overlap_error: The same, with copies charged.
        naive_overlap_error: The same for `TargetPrediction.naive_overlap_ns`.
        pipelined_overlap_error: The same for `TargetPrediction.pipelined_overlap_ns`.
    """

    model: str
    cap_mb: Cap
    order: Order
    hook: str
    buckets: int
    turns: Annotated[tuple[Measurement, ...], Field(min_length=1)]
    speed_check: Annotated[SpeedCheck, Field(alias="reference")]
    measured_ns: int
    quartiles_ns: tuple[int, int]
    paired_ns: int
    paired_quartiles_ns: tuple[int, int]
    paired_turns_ns: tuple[int, ...]
    paired_times_ns: tuple[int, ...]
    predicted_ns: Nanoseconds
    interval_ns: tuple[int, int]
    coverage: float
    drift: float | None
    error: float
    paired_error: float
    perfect_scaling_error: float
    no_overlap_error: float
    naive_overlap_error: float
    pipelined_overlap_error: float

    @property
    def configuration(self) -> Configuration:
        """The predicted configuration."""
        return Configuration(self.cap_mb, self.order, self.hook)

    @property
    def torchs_multiple(self) -> float | None:
        """Iteration of torch's class as a multiple of ours: the median of the turns. None: it did not train."""
        with_torchs = [turn for turn in self.turns if turn.torchs_ns]
        multiples = [statistics.median(turn.torchs_ns) / statistics.median(turn.times_ns) for turn in with_torchs]
        return statistics.median(multiples) if multiples else None

    @property
    def half_width(self) -> float:
        """Half of the interval's width, as a fraction of the prediction."""
        low, high = self.interval_ns
        return (high - low) / 2 / self.predicted_ns

    def interval_score(self, interval_ns: tuple[float, float]) -> float:
        """Return the mean interval score of the paired iterations, as a fraction of their median; less is better.

        The score of an iteration is the width of the interval and, outside of it, 2 / 0.1 times the distance from it:
        the proper score for an interval that should contain 90 % (Gneiting and Raftery 2007, equation 43).
        """
        low, high = interval_ns
        outside = [max(low - ns, ns - high, 0) for ns in self.paired_times_ns]
        return (high - low + 2 / (1 - BAND) * statistics.fmean(outside)) / self.paired_ns

    def in_original(self, scale: ScaleModel) -> Self:
        """Convert the times of a row from those of a scale model."""

        def in_original(times_ns: Any) -> Any:
            return tuple(map(in_original, times_ns)) if isinstance(times_ns, tuple) else scale.original_ns(times_ns)

        times = {one.name: in_original(getattr(self, one.name)) for one in fields(self) if one.name.endswith("_ns")}
        turns = tuple(Measurement(in_original(turn.times_ns)) for turn in self.turns)
        return replace(self, turns=turns, **times)


@dataclass(frozen=True)
class ValidationReport:
    """All rows and their summary.

    Attributes:
        predictions_sha256: Hash of the predictions file, which was written before the first target run. With several
            calibrations: the hash of their hashes, one a line.
        mape: Mean absolute error.
        paired_mape: Mean absolute paired error.
        worst_error: The error with the largest absolute value.
        noise: Half-width of the band that holds 90 % of the differences between two paired measurements of the same
            configuration, as a fraction; from the differences between turns, of the noisiest model. None: one turn.
        pairs_apart: Pairs of one model's configurations whose paired quartiles do not overlap, and whose paired times
            differ by more than the noise.
        sign_errors: Number of these pairs whose order is predicted wrongly.
        fastest_found: Fraction of the models for which the configuration predicted to be the fastest is the fastest,
            or not measurably slower than the fastest.
        coverage: Mean coverage of the rows; the intervals should cover 90 % of the iterations.
        half_width: Median of `ValidationRow.half_width`.
        interval_score: Mean of `ValidationRow.interval_score`.
        drift: Median of `ValidationRow.drift`.
        baselines: Mean absolute paired error of each baseline.
        rows: One per model and configuration.
        world_size: Number of ranks. None: the runs differ, or are older than this field.
        scale_model: The scale model of emulated devices; times are those of the original. None: real models ran.
        conditions: Conditions of a measurement on emulated devices. None: real models ran.
    """

    predictions_sha256: str
    mape: float
    paired_mape: float
    worst_error: float
    noise: float | None
    pairs_apart: int
    sign_errors: int
    fastest_found: float
    coverage: float
    half_width: float
    interval_score: float
    drift: float | None
    baselines: Annotated[dict[str, float], Field(alias="yardsticks")]
    rows: Annotated[tuple[ValidationRow, ...], Field(min_length=1)]
    world_size: int | None = None
    scale_model: ScaleModel | None = None
    conditions: Conditions | None = None

    def to_frame(self) -> pd.DataFrame:
        """Return the rows as a table, with the number of turns instead of the turns."""
        return pd.DataFrame([{**asdict(row), "turns": len(row.turns)} for row in self.rows])

    def to_json(self) -> dict[str, Any]:
        """Return all fields. Real models have no `scale_model` and no `conditions`."""
        fields = TypeAdapter(ValidationReport).dump_python(self, by_alias=True)
        return {name: value for name, value in fields.items() if value is not None or name not in FOR_EMULATED}

    def save(self, folder: Path) -> None:
        """Write `report.json`, and `report.csv`, in which pairs of numbers become columns `_low` and `_high`."""
        write_atomically(folder / "report.json", json.dumps(self.to_json(), indent=1, allow_nan=False).encode())
        frame = self.to_frame()
        for name in PAIRS:
            of_pair = pd.DataFrame(frame[name].tolist(), columns=[f"{name}_low", f"{name}_high"])
            frame = frame.drop(columns=name).join(of_pair)
        write_atomically(folder / "report.csv", frame.to_csv(index=False).encode())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `report.json`; if it is missing or malformed, a one-line `ValueError` names file, field and reason."""
        advice = "expected the folder of a run, which `ddplab validate --out` names"
        return read_schema(cls, folder / "report.json", what="a report", cure=advice)

    @property
    def scale(self) -> ScaleModel:
        """The scale model that ran."""
        return self.scale_model or ORIGINAL

    def inputs(self, folder: Path, model: str) -> tuple[Trace, Fabric]:
        """Read the trace and the fabric from which the predictions for a model were computed."""
        if self.scale_model is not None:
            return Trace.load(folder / PREDICTED_TRACE_FILE), Fabric.load(folder / "fabric.json")
        files = model_folder(folder, model)
        return Trace.load(files / "trace.json.gz"), Fabric.load(files / "fabric.json")


def model_folder(out: Path, model: str) -> Path:
    """Return the folder for a model's trace and fabric; a dot replaces the colon of `module:callable`."""
    return out / model.replace(":", ".")


def share_folder(out: Path, number: int) -> Path:
    """Return the folder of the turns that one of several calibrations predicts; numbers start at 1."""
    return out / f"calibration-{number}"


def make_row(
    model: str, configuration: Configuration, predicted: TargetPrediction, turns: Sequence[Measurement]
) -> ValidationRow:
    """Make the row of a configuration from its prediction and all of its turns."""
    prediction = predicted.prediction
    by_turn = [[ns * predicted.speed(turn.speed_check) for ns in turn.times_ns] for turn in turns]
    paired_times = list(chain(*by_turn))
    shortest, longest = prediction.interval_ns
    checks_ns = [turn.speed_check.total_ns for turn in turns if turn.speed_check is not None]
    return _compare(
        paired_times,
        {
            "perfect_scaling": prediction.compute_ns,
            "no_overlap": prediction.no_overlap_ns,
            "naive_overlap": predicted.naive_overlap_ns,
            "pipelined_overlap": predicted.pipelined_overlap_ns,
        },
        model=model,
        **vars(configuration),
        buckets=len(prediction.buckets),
        turns=tuple(turns),
        speed_check=predicted.speed_check,
        paired_turns_ns=tuple(round(statistics.median(of_turn)) for of_turn in by_turn),
        predicted_ns=prediction.iteration_ns,
        interval_ns=prediction.interval_ns,
        coverage=statistics.fmean(shortest <= ns <= longest for ns in paired_times),
        drift=statistics.median(checks_ns) / predicted.speed_check.total_ns - 1 if checks_ns else None,
    )


def join_rows(rows: Sequence[ValidationRow]) -> ValidationRow:
    """Join the rows of a configuration that was predicted anew before each share of its turns.

    Predictions, also those of baselines, count by the number of turns that they were made for. `coverage` compares
    each iteration with the interval of its own share.
    """

    def mean(values: Iterable[float]) -> float:
        return statistics.fmean(values, weights=[len(row.turns) for row in rows])

    first = rows[0]
    shortest, longest = zip(*(row.interval_ns for row in rows), strict=True)
    drifts = [row.drift for row in rows if row.drift is not None]
    return _compare(
        list(chain.from_iterable(row.paired_times_ns for row in rows)),
        {name: mean((1 + getattr(row, f"{name}_error")) * row.paired_ns for row in rows) for name in BASELINES},
        model=first.model,
        **vars(first.configuration),
        buckets=first.buckets,
        turns=tuple(chain.from_iterable(row.turns for row in rows)),
        speed_check=SpeedCheck.usual([row.speed_check for row in rows], mean),
        paired_turns_ns=tuple(chain.from_iterable(row.paired_turns_ns for row in rows)),
        predicted_ns=round(mean(row.predicted_ns for row in rows)),
        interval_ns=(round(mean(shortest)), round(mean(longest))),
        coverage=mean(row.coverage for row in rows),
        drift=mean(drifts) if len(drifts) == len(rows) else None,
    )


def _compare(paired_times: Sequence[float], baselines_ns: Mapping[str, float], **fields: Any) -> ValidationRow:
    """Make a row from fields that do not depend on others, and the nanoseconds of each baseline."""
    low, measured, high = _quartiles([ns for turn in fields["turns"] for ns in turn.times_ns])
    paired_low, paired, paired_high = _quartiles(paired_times)
    fields |= {f"{name}_error": baseline_ns / paired - 1 for name, baseline_ns in baselines_ns.items()}
    return ValidationRow(
        **fields,
        measured_ns=measured,
        quartiles_ns=(low, high),
        paired_ns=paired,
        paired_quartiles_ns=(paired_low, paired_high),
        paired_times_ns=tuple(map(round, paired_times)),
        error=fields["predicted_ns"] / measured - 1,
        paired_error=fields["predicted_ns"] / paired - 1,
    )


def _quartiles(times_ns: Sequence[float]) -> tuple[int, int, int]:
    low, middle, high = np.quantile(times_ns, [0.25, 0.5, 0.75])
    return round(low), round(middle), round(high)


def summarize(
    rows: Sequence[ValidationRow], predictions_sha256: str, *, world_size: int | None = None
) -> ValidationReport:
    """Make a report of these rows, with their summary."""
    by_model = _by_model(rows)
    noises = [measurement_noise(of_model) for of_model in by_model]
    apart = pairs_apart(rows)
    drifts = [row.drift for row in rows if row.drift is not None]
    return ValidationReport(
        predictions_sha256=predictions_sha256,
        mape=statistics.fmean(abs(row.error) for row in rows),
        paired_mape=statistics.fmean(abs(row.paired_error) for row in rows),
        worst_error=max((row.error for row in rows), key=abs),
        noise=max((noise for noise in noises if noise is not None), default=None),
        pairs_apart=len(apart),
        sign_errors=sum((a.paired_ns < b.paired_ns) != (a.predicted_ns <= b.predicted_ns) for a, b in apart),
        fastest_found=statistics.fmean(map(_fastest_found, by_model, noises)),
        coverage=statistics.fmean(row.coverage for row in rows),
        half_width=statistics.median(row.half_width for row in rows),
        interval_score=statistics.fmean(row.interval_score(row.interval_ns) for row in rows),
        drift=statistics.median(drifts) if drifts else None,
        baselines={name: statistics.fmean(abs(getattr(row, f"{name}_error")) for row in rows) for name in BASELINES},
        rows=tuple(rows),
        world_size=world_size,
    )


def _by_model(rows: Sequence[ValidationRow]) -> list[list[ValidationRow]]:
    return [[row for row in rows if row.model == model] for model in dict.fromkeys(row.model for row in rows)]


def pairs_apart(rows: Sequence[ValidationRow]) -> list[tuple[ValidationRow, ValidationRow]]:
    """Return the pairs of one model's configurations that are counted in `ValidationReport.pairs_apart`."""
    return [
        pair
        for of_model in _by_model(rows)
        for noise in [measurement_noise(of_model)]
        for pair in combinations(of_model, 2)
        if _are_apart(*pair, noise)
    ]


def measurement_noise(rows: Sequence[ValidationRow]) -> float | None:
    """Return `ValidationReport.noise` of these rows: the variance between the turns of a row, pooled over all rows.

    What all rows of a turn have in common is left out: emulated devices train other recorded iterations in each turn.
    """
    repeated = [row.paired_turns_ns for row in rows if len(row.paired_turns_ns) > 1]
    if not repeated:
        return None
    turns = min(map(len, repeated))
    relative = np.array([of_row[:turns] for of_row in repeated], dtype=np.float64)
    relative /= relative.mean(axis=1, keepdims=True)
    relative -= relative.mean(axis=0) if len(repeated) > 1 else 1
    freedom = (turns - 1) * max(1, len(repeated) - 1)
    return NORMAL_HALF_BAND * float(np.sqrt(2 * (relative**2).sum() / freedom / turns))


def _are_apart(a: ValidationRow, b: ValidationRow, noise: float | None) -> bool:
    """Whether two measurements differ by more than noise."""
    low, high = sorted((a, b), key=lambda row: row.paired_ns)
    quartiles_overlap = low.paired_quartiles_ns[1] >= high.paired_quartiles_ns[0]
    return not quartiles_overlap and high.paired_ns > (1 + (noise or 0.0)) * low.paired_ns


def _fastest_found(rows: Sequence[ValidationRow], noise: float | None) -> bool:
    chosen = min(rows, key=lambda row: row.predicted_ns)
    fastest = min(rows, key=lambda row: row.paired_ns)
    return chosen is fastest or not _are_apart(chosen, fastest, noise)


def policy_of(configuration: Configuration) -> Policy:
    """Return the settings of the reducer in a configuration."""
    return Policy(bucket_cap_mb=configuration.cap_mb, order=configuration.order, hook=named_hook(configuration.hook))


def predict_one(trace: Trace, fabric: Fabric, configuration: Configuration, world_size: int) -> Prediction:
    """Predict one configuration."""
    return predict(trace, fabric, world_size=world_size, policy=policy_of(configuration), assume=False)


def predict_targets(
    trace: Trace,
    fabric: Fabric,
    configurations: Sequence[Configuration],
    world_size: int,
    *,
    speed_check: SpeedCheck | None = None,
) -> list[TargetPrediction]:
    """Predict each configuration, with two baselines.

    `speed_check` is the usual speed check of the calibration. None: its times according to trace and fabric.
    """
    all_gradients_ns = fabric.all_reduce_ns(sum(trace.sizes_bytes), world_size)

    def predict_target(configuration: Configuration) -> TargetPrediction:
        prediction = predict_one(trace, fabric, configuration, world_size)
        simpler = baselines_ns(trace, fabric, world_size=world_size, policy=policy_of(configuration))

        @cache
        def with_slower_network(factor: float) -> int:
            return predict_one(trace, fabric.scaled(factor), configuration, world_size).iteration_ns

        return TargetPrediction(
            prediction,
            naive_overlap_ns=simpler["naive overlap"],
            pipelined_overlap_ns=simpler["pipelined overlap"],
            speed_check=speed_check or SpeedCheck(prediction.compute_ns, all_gradients_ns),
            with_slower_network=with_slower_network,
        )

    return [predict_target(configuration) for configuration in configurations]


def residual(row: Mapping[Any, Any], *, measured: Literal["paired_ns", "measured_ns"] = "paired_ns") -> Residual:
    """Return the errors of the predictions in the fields of a `ValidationRow`, relative to one of its two times."""

    def error(predicted_ns: float) -> float:
        return float(predicted_ns / row[measured] - 1)

    low, high = row["interval_ns"]
    baselines = {
        name.replace("_", " "): error((1 + row[f"{name}_error"]) * row["paired_ns"])
        for name in BASELINES
        if f"{name}_error" in row  # earlier reports have fewer
    }
    return Residual(error=error(row["predicted_ns"]), baselines=baselines, interval=(error(low), error(high)))


def draw_validation(rows: pd.DataFrame, ax: Axes, *, named: bool = True) -> Axes:
    """Draw the paired errors of one model's configurations, ours and those of all baselines; return the axes.

    `named` is whether to name the marks; see `draw_residuals`.
    """
    groups = {f"{cap_name(row['cap_mb'])}, {row['order']}": [residual(row)] for row in rows.to_dict("records")}
    draw_residuals(groups, ax, named=named)
    errors = rows["paired_error"]
    ax.set_title(
        f"{rows['model'].iloc[0]}\nmean error {errors.abs().mean():.1%}, worst {max(errors, key=abs):+.1%}",
        loc="left", fontsize=9, pad=18 if named else None,
    )  # fmt: skip
    return ax
