"""Report: predictions beside measurements, and what the differences amount to."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd

from reference.bucketing import Order
from reference.files import write_whole

from .prediction import Prediction


@dataclass(frozen=True)
class Configuration:
    """One target run: a bucket cap in MiB (infinity: one single bucket) and an order."""

    cap_mb: float
    order: Order

    def to_json(self) -> dict[str, object]:
        """As fields; JSON has no infinity, so that is written as null."""
        return {"cap_mb": None if math.isinf(self.cap_mb) else self.cap_mb, "order": self.order}


@dataclass(frozen=True)
class Measurement:
    """Iterations of one target run; times in nanoseconds, of each iteration the slowest rank's.

    `quiet` tells whether the machine was quiet around it (see `quiet`).
    """

    times_ns: tuple[int, ...]
    quiet: bool


@dataclass(frozen=True)
class Row:
    """A configuration's prediction beside its measurement; times in nanoseconds, errors as fractions.

    `quartiles_ns` is the measurement's spread; `quiet` tells whether the machine was quiet at least once, and only
    such turns count where there are any. `error` is predicted / measured - 1, and so are those of the two
    yardsticks: perfect scaling (computation alone) and no overlap (all communication after the backward pass).
    """

    model: str
    cap_mb: float
    order: str
    buckets: int
    measured_ns: int
    quartiles_ns: tuple[int, int]
    quiet: bool
    predicted_ns: int
    interval_ns: tuple[int, int]
    error: float
    perfect_scaling_error: float
    no_overlap_error: float


@dataclass(frozen=True)
class Report:
    """All rows, and what they amount to.

    Attributes:
        predictions_sha256: Of the file of predictions, as it was before the first target run.
        mape: Mean absolute error.
        worst_error: The error that is farthest from zero.
        sign_errors: Pairs of one model's configurations that the prediction ranks the wrong way round, of those
            pairs whose measured quartiles do not overlap.
        coverage: Fraction of measurements inside the predicted interval.
        rows: One a configuration and model.
    """

    predictions_sha256: str
    mape: float
    worst_error: float
    sign_errors: int
    coverage: float
    rows: tuple[Row, ...]

    def to_frame(self) -> pd.DataFrame:
        """The rows as a table."""
        return pd.DataFrame([asdict(row) for row in self.rows])

    def to_json(self) -> dict[str, Any]:
        """All of it; an infinite cap is written as null."""
        fields = asdict(self)
        for row in fields["rows"]:
            row["cap_mb"] = None if math.isinf(row["cap_mb"]) else row["cap_mb"]
        return fields

    def save(self, folder: Path) -> None:
        """Write `report.json` and `report.csv`."""
        write_whole(folder / "report.json", json.dumps(self.to_json(), indent=1, allow_nan=False).encode())
        write_whole(folder / "report.csv", self.to_frame().to_csv(index=False).encode())


def make_row(model: str, configuration: Configuration, prediction: Prediction, turns: Sequence[Measurement]) -> Row:
    """One row, from all turns that the configuration had; its quiet ones, if there are any."""
    quiet = [turn for turn in turns if turn.quiet]
    times = [ns for turn in quiet or turns for ns in turn.times_ns]
    low, middle, high = (round(q) for q in statistics.quantiles(times, n=4, method="inclusive"))
    return Row(
        model=model,
        cap_mb=configuration.cap_mb,
        order=configuration.order,
        buckets=len(prediction.buckets),
        measured_ns=middle,
        quartiles_ns=(low, high),
        quiet=bool(quiet),
        predicted_ns=prediction.iteration_ns,
        interval_ns=prediction.interval_ns,
        error=prediction.iteration_ns / middle - 1,
        perfect_scaling_error=prediction.compute_ns / middle - 1,
        no_overlap_error=prediction.no_overlap_ns / middle - 1,
    )


def summarize(rows: Sequence[Row], predictions_sha256: str) -> Report:
    """The figures of a set of rows."""
    errors = [row.error for row in rows]
    return Report(
        predictions_sha256=predictions_sha256,
        mape=statistics.fmean(map(abs, errors)),
        worst_error=max(errors, key=abs),
        sign_errors=sum(_ranked_wrongly(a, b) for a, b in combinations(rows, 2) if a.model == b.model),
        coverage=statistics.fmean(row.interval_ns[0] <= row.measured_ns <= row.interval_ns[1] for row in rows),
        rows=tuple(rows),
    )


def _ranked_wrongly(a: Row, b: Row) -> bool:
    if a.measured_ns > b.measured_ns:
        a, b = b, a
    really_faster = a.quartiles_ns[1] < b.quartiles_ns[0]
    return really_faster and a.predicted_ns > b.predicted_ns
