"""Report: predictions beside measurements, their errors, and the figure of both."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from reference.bucketing import Order, cap_name
from reference.schema import write_atomically
from reference.trace import Trace

from ..fabric import Fabric, Processor
from ..prediction import Prediction, predict
from ..schedule.comm_hooks import named_hook
from ..schedule.policy import Policy

YARDSTICKS = ("perfect_scaling", "no_overlap", "naive_overlap")
"""What a prediction has to be better than."""
PAIRS = ("quartiles_ns", "paired_quartiles_ns", "interval_ns")
"""Fields of a row that are two numbers."""


@dataclass(frozen=True)
class Configuration:
    """One target run: a bucket cap in MiB (infinity: one single bucket), an order, and a comm hook by its name."""

    cap_mb: float
    order: Order = "ready"
    hook: str = "none"

    def to_json(self) -> dict[str, object]:
        """As fields; JSON has no infinity, so that is written as null."""
        return {"cap_mb": None if math.isinf(self.cap_mb) else self.cap_mb, "order": self.order, "hook": self.hook}


@dataclass(frozen=True)
class SpeedCheck:
    """What tells the machine's speed: an iteration without communication, and then one all-reduce of all gradients.

    Nanoseconds of each, on the slowest rank.
    """

    compute_ns: int
    all_reduce_ns: int

    @property
    def total_ns(self) -> int:
        """Both, one after the other."""
        return self.compute_ns + self.all_reduce_ns


@dataclass(frozen=True)
class TargetPrediction:
    """What is said of a target run before it.

    Attributes:
        prediction: The simulator's.
        naive_overlap_ns: Of the replay that knows no more than when gradients are ready and what an all-reduce costs:
            one at a time, nothing slows anything down, copies and launches are free.
        reference: As trace and calibration have it.
        with_slower_network: Nanoseconds of an iteration if all collectives take so many times as long.
    """

    prediction: Prediction
    naive_overlap_ns: int
    reference: SpeedCheck
    with_slower_network: Callable[[float], int]

    def speed(self, reference: SpeedCheck) -> float:
        """How fast the machine is for this training, where 1 is as it was when it was calibrated.

        Args:
            reference: What the reference takes now. Its computation tells the processor's speed and its all-reduce
                the network's: the replay on such a machine is the replay on one whose processor is as it was and
                whose network is slower by the ratio of both, with another unit of time.
        """
        slower_processor = reference.compute_ns / self.reference.compute_ns
        if not self.reference.all_reduce_ns:  # one rank: there is no network
            return 1 / slower_processor
        slower_network = reference.all_reduce_ns / self.reference.all_reduce_ns
        now_ns = slower_processor * self.with_slower_network(round(slower_network / slower_processor, 3))
        return self.prediction.iteration_ns / now_ns


@dataclass(frozen=True)
class Measurement:
    """One turn of a target run; times in nanoseconds, of each iteration from one slowest rank's end to the next.

    `reference` is what that took right before and after, medians: the machine's speed just then.
    """

    times_ns: tuple[int, ...]
    reference: SpeedCheck


@dataclass(frozen=True)
class Row:
    """A configuration's prediction beside its measurement; times in nanoseconds, errors as fractions.

    `measured_ns` is the median of what the clock said, `quartiles_ns` its spread, and `error` is
    predicted / measured - 1.

    A prediction holds for a machine as fast as it was when it was calibrated, and a shared machine's speed changes by
    the second. So each turn is paired with a reference, timed right beside it. `paired_ns` is the median of the
    iterations, each times `TargetPrediction.speed`; `paired_error` and the errors of the three yardsticks compare
    with it.
    Perfect scaling is computation alone; no overlap has all communication after the backward pass; naive overlap is
    `TargetPrediction.naive_overlap_ns`. `coverage` is the fraction of the iterations, paired, that lie inside the
    predicted interval. `drift` is how much longer the reference took than predicted, a fraction, median of the turns.
    """

    model: str
    cap_mb: float
    order: str
    hook: str
    buckets: int
    turns: tuple[Measurement, ...]
    measured_ns: int
    quartiles_ns: tuple[int, int]
    paired_ns: int
    paired_quartiles_ns: tuple[int, int]
    predicted_ns: int
    interval_ns: tuple[int, int]
    coverage: float
    drift: float
    error: float
    paired_error: float
    perfect_scaling_error: float
    no_overlap_error: float
    naive_overlap_error: float


@dataclass(frozen=True)
class Report:
    """All rows, and what they amount to.

    Attributes:
        predictions_sha256: Of the file of predictions, as it was before the first target run.
        mape: Mean absolute error.
        paired_mape: Mean absolute paired error.
        worst_error: The error that is farthest from zero.
        pairs_apart: Pairs of one model's configurations whose paired quartiles do not overlap.
        sign_errors: How many of these the prediction ranks the wrong way round.
        fastest_found: Fraction of the models whose fastest configuration was predicted to be that, or is not
            measurably faster than the one that was.
        coverage: Mean of the rows': an interval is meant to hold 90 % of iterations.
        drift: Median of the rows': how much slower the machine had become since it was calibrated, a fraction.
        yardsticks: Mean absolute paired error of each.
        rows: One a configuration and model.
    """

    predictions_sha256: str
    mape: float
    paired_mape: float
    worst_error: float
    pairs_apart: int
    sign_errors: int
    fastest_found: float
    coverage: float
    drift: float
    yardsticks: dict[str, float]
    rows: tuple[Row, ...]

    def to_frame(self) -> pd.DataFrame:
        """The rows as a table; of the turns, how many there were."""
        return pd.DataFrame([{**asdict(row), "turns": len(row.turns)} for row in self.rows])

    def to_json(self) -> dict[str, Any]:
        """All of it; an infinite cap is written as null."""
        fields = asdict(self)
        for row in fields["rows"]:
            row["cap_mb"] = None if math.isinf(row["cap_mb"]) else row["cap_mb"]
        return fields

    def save(self, folder: Path) -> None:
        """Write `report.json` and `report.csv`; there a pair of numbers is two columns, `..._low` and `..._high`."""
        write_atomically(folder / "report.json", json.dumps(self.to_json(), indent=1, allow_nan=False).encode())
        frame = self.to_frame()
        for name in PAIRS:
            of_pair = pd.DataFrame(frame[name].tolist(), columns=[f"{name}_low", f"{name}_high"])
            frame = frame.drop(columns=name).join(of_pair)
        write_atomically(folder / "report.csv", frame.to_csv(index=False).encode())


def model_folder(out: Path, model: str) -> Path:
    """Where a model's trace and calibration lie; the colon of `module:callable` is no part of a file's name."""
    return out / model.replace(":", ".")


def make_row(
    model: str, configuration: Configuration, predicted: TargetPrediction, turns: Sequence[Measurement]
) -> Row:
    """One row, from all turns that the configuration had."""
    prediction = predicted.prediction
    low, middle, high = _quartiles([ns for turn in turns for ns in turn.times_ns])
    iterations = [ns * predicted.speed(turn.reference) for turn in turns for ns in turn.times_ns]
    paired_low, paired, paired_high = _quartiles(iterations)
    shortest, longest = prediction.interval_ns
    return Row(
        model=model,
        cap_mb=configuration.cap_mb,
        order=configuration.order,
        hook=configuration.hook,
        buckets=len(prediction.buckets),
        turns=tuple(turns),
        measured_ns=middle,
        quartiles_ns=(low, high),
        paired_ns=paired,
        paired_quartiles_ns=(paired_low, paired_high),
        predicted_ns=prediction.iteration_ns,
        interval_ns=prediction.interval_ns,
        coverage=statistics.fmean(shortest <= ns <= longest for ns in iterations),
        drift=statistics.median(turn.reference.total_ns for turn in turns) / predicted.reference.total_ns - 1,
        error=prediction.iteration_ns / middle - 1,
        paired_error=prediction.iteration_ns / paired - 1,
        perfect_scaling_error=prediction.compute_ns / paired - 1,
        no_overlap_error=prediction.no_overlap_ns / paired - 1,
        naive_overlap_error=predicted.naive_overlap_ns / paired - 1,
    )


def summarize(rows: Sequence[Row], predictions_sha256: str) -> Report:
    """The figures of a set of rows."""
    apart = [pair for pair in combinations(rows, 2) if pair[0].model == pair[1].model and _are_apart(*pair)]
    models = list(dict.fromkeys(row.model for row in rows))
    return Report(
        predictions_sha256=predictions_sha256,
        mape=statistics.fmean(abs(row.error) for row in rows),
        paired_mape=statistics.fmean(abs(row.paired_error) for row in rows),
        worst_error=max((row.error for row in rows), key=abs),
        pairs_apart=len(apart),
        sign_errors=sum(_ranked_wrongly(a, b) for a, b in apart),
        fastest_found=statistics.fmean(
            _fastest_found([row for row in rows if row.model == model]) for model in models
        ),
        coverage=statistics.fmean(row.coverage for row in rows),
        drift=statistics.median(row.drift for row in rows),
        yardsticks={
            name: statistics.fmean(abs(getattr(row, f"{name}_error")) for row in rows) for name in YARDSTICKS
        },
        rows=tuple(rows),
    )


def _quartiles(times_ns: Sequence[float]) -> tuple[int, int, int]:
    low, middle, high = np.quantile(times_ns, [0.25, 0.5, 0.75])
    return round(low), round(middle), round(high)


def _are_apart(a: Row, b: Row) -> bool:
    """Whether their measurements differ by more than noise."""
    return a.paired_quartiles_ns[1] < b.paired_quartiles_ns[0] or b.paired_quartiles_ns[1] < a.paired_quartiles_ns[0]


def _ranked_wrongly(a: Row, b: Row) -> bool:
    return (a.paired_ns < b.paired_ns) != (a.predicted_ns <= b.predicted_ns)


def _fastest_found(rows: Sequence[Row]) -> bool:
    chosen = min(rows, key=lambda row: row.predicted_ns)
    fastest = min(rows, key=lambda row: row.paired_ns)
    return chosen is fastest or not _are_apart(chosen, fastest)


def policy_of(configuration: Configuration) -> Policy:
    """What the reducer is told in that configuration."""
    return Policy(bucket_cap_mb=configuration.cap_mb, order=configuration.order, hook=named_hook(configuration.hook))


def predict_one(trace: Trace, fabric: Fabric, configuration: Configuration, world_size: int) -> Prediction:
    """The prediction for one configuration."""
    return predict(trace, fabric, world_size=world_size, policy=policy_of(configuration))


def predict_targets(
    trace: Trace, fabric: Fabric, configurations: Sequence[Configuration], world_size: int
) -> list[TargetPrediction]:
    """The prediction for each configuration, the naive replay's, and what the reference takes."""
    all_gradients_ns = fabric.all_reduce_ns(sum(trace.sizes_bytes), world_size)
    naive = fabric.model_copy(update={"processor": Processor(), "concurrency": 1, "sharing": ()})

    def foretell_one(configuration: Configuration) -> TargetPrediction:
        prediction = predict_one(trace, fabric, configuration, world_size)

        @cache
        def with_slower_network(factor: float) -> int:
            return predict_one(trace, fabric.scaled(factor), configuration, world_size).iteration_ns

        return TargetPrediction(
            prediction,
            naive_overlap_ns=predict_one(trace, naive, configuration, world_size).iteration_ns,
            reference=SpeedCheck(prediction.compute_ns, all_gradients_ns),
            with_slower_network=with_slower_network,
        )

    return [foretell_one(configuration) for configuration in configurations]


MEASURED, PREDICTED, YARDSTICK = "#1b1b1b", "#d1495b", "#8d99ae"


def validation_figure(rows: pd.DataFrame) -> Figure:
    """One panel a model, from the rows of a `Report`."""
    models = list(dict.fromkeys(rows["model"]))
    figure = Figure(figsize=(10, 3.6 * len(models)), layout="constrained")
    for position, model in enumerate(models):
        draw_validation(rows[rows["model"] == model], figure.add_subplot(len(models), 1, position + 1))
    return figure


def draw_validation(rows: pd.DataFrame, ax: Axes) -> Axes:
    """Measured (paired) and predicted iteration time of each configuration of one model, with the two yardsticks."""
    places = range(len(rows))
    measured = rows["paired_ns"] / 1e6
    low, high = zip(*rows["paired_quartiles_ns"], strict=True)
    spread = [measured - pd.Series(low, rows.index) / 1e6, pd.Series(high, rows.index) / 1e6 - measured]
    for column, label, marker in (
        ("perfect_scaling_error", "perfect scaling", "v"),
        ("no_overlap_error", "no overlap", "^"),
    ):
        ax.scatter(
            places, measured * (1 + rows[column]), marker=marker, s=26, color=YARDSTICK, label=label, zorder=1
        )  # fmt: skip
    ax.errorbar(
        places, measured, yerr=spread,
        fmt="o", color=MEASURED, capsize=3, markersize=6, label="measured, paired (quartiles)", zorder=2,
    )  # fmt: skip
    ax.scatter(
        places, rows["predicted_ns"] / 1e6,
        marker="D", s=46, facecolors="none", edgecolors=PREDICTED, linewidths=1.8, label="predicted", zorder=3,
    )  # fmt: skip
    labels = [f"{cap_name(cap)}\n{order}" for cap, order in zip(rows["cap_mb"], rows["order"], strict=True)]
    ax.set_xticks(list(places), labels, fontsize=8)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("iteration, ms")
    ax.set_title(
        f"{rows['model'].iloc[0]}: mean absolute error {rows['paired_error'].abs().mean():.1%} paired, "
        f"{rows['error'].abs().mean():.1%} by the clock",
        loc="left",
    )
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25)
    ax.legend(ncols=4, fontsize=8, frameon=False, loc="lower left")
    return ax
