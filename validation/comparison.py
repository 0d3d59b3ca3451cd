"""Predictions compared with measurements: single rows, fastest configurations, and a verdict for each part.

A *method* is either the simulator (`predicted`) or a baseline, by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np

from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, Prediction

Part = Literal["a", "b", "c", "d", "e", "f", "g", "h", "i"]
Regime = Literal["published tables", "emulated accelerators", "real computation", "GPU traces"]
TITLES: dict[Part, str] = {
    "a": "NCCL all-reduces on more GPUs than in the input tables",
    "b": "torch's DDP on 2 to 16 V100s, buckets of 25 MB and 1 MB",
    "c": "ResNet-50, three schedules on three networks",
    "d": "torch's DDP on the GPUs of one node, from the speed of one",
    "e": "bucket caps of published reducers on two GPUs",
    "f": "our reducer on emulated accelerators, committed runs",
    "g": "our reducer on shared cores, committed runs",
    "h": "profiled and recorded steps on GPUs, replayed, and DDP on one GPU from the plain module",
    "i": "weak scaling of torch's DDP within and beyond one node, mostly from one GPU and data sheets",
}
REGIMES: dict[Regime, tuple[Part, ...]] = {
    "published tables": ("a", "b", "c", "d", "e", "i"),
    "emulated accelerators": ("f",),
    "real computation": ("g",),
    "GPU traces": ("h",),
}
FEWER_BUCKETS = "fewer buckets"
"""A baseline of rankings: the configuration with fewer buckets is the faster one."""
RANKING_BASELINES = ("no overlap", "naive overlap", "pipelined overlap", FEWER_BUCKETS)
"""Baselines that differ between configurations, and so predict which one is the fastest."""


class Limit(NamedTuple):
    """Largest allowed absolute errors of a part; None: any.

    Attributes:
        mean: Of the mean over all checked errors.
        worst: Of each checked error.
    """

    mean: float | None
    worst: float | None


LIMITS: dict[Part, Limit] = {
    "a": Limit(None, 0.08),
    "b": Limit(None, 0.02),
    "c": Limit(0.05, None),
    "d": Limit(0.04, 0.10),
    "e": Limit(None, None),
    "f": Limit(0.01, 0.03),
    "g": Limit(0.05, None),
    "h": Limit(None, 0.02),
    "i": Limit(0.05, None),
}
"""In (a) an error is the mean over the sizes of a table, elsewhere that of a single row. In (e) only rankings count,
because the iteration without communication is known to a few percent only."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One prediction beside its measurement; times in nanoseconds.

    Attributes:
        part: Part of the score.
        case: Name of the case or of the committed run.
        group: Rows of one group are averaged: in (a) a question and a number of GPUs, in (d) a model.
        label: Distinguishes the rows of a group.
        calibrated_from: Measurements that the prediction used.
        predicted_ns: The simulator's prediction.
        measured_ns: The truth.
        baselines_ns: Predictions of the baselines, by name.
        counts: Whether the limit applies.
        interval_ns: The predicted 90 % interval, where one was compared.
        several_nodes: Whether the GPUs are on several nodes.
        added_later: Whether the constants of the simulator were set before the case existed.
    """

    part: Part
    case: str
    group: str
    label: str
    calibrated_from: str
    predicted_ns: float
    measured_ns: float
    baselines_ns: Mapping[str, float] = field(default_factory=dict)
    counts: bool = True
    interval_ns: tuple[float, float] | None = None
    several_nodes: bool = False
    added_later: bool = False

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_ns / self.measured_ns - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measurement lies in the interval."""
        assert self.interval_ns is not None
        low, high = self.interval_ns
        return low <= self.measured_ns <= high

    @property
    def half_width(self) -> float:
        """Half of the interval's width as a fraction of the prediction."""
        assert self.interval_ns is not None
        low, high = self.interval_ns
        return (high - low) / 2 / self.predicted_ns

    @property
    def interval_score(self) -> float:
        """Width of the interval plus 20 times the distance of the measurement to it, over the measurement."""
        assert self.interval_ns is not None
        low, high = self.interval_ns
        outside = max(0.0, low - self.measured_ns, self.measured_ns - high)
        return (high - low + 20 * outside) / self.measured_ns

    def baseline_error(self, name: str) -> float:
        """Baseline / measured - 1."""
        return self.baselines_ns[name] / self.measured_ns - 1

    def to_json(self) -> dict[str, Any]:
        """All fields, and errors as fractions; keys keep their former names for existing readers."""
        return {
            "part": self.part,
            "case": self.case,
            "group": self.group,
            "what": self.label,
            "calibrated_from": self.calibrated_from,
            "predicted_ns": round(self.predicted_ns),
            "measured_ns": round(self.measured_ns),
            "error": self.error,
            "counts": self.counts,
            "interval_ns": None if self.interval_ns is None else list(map(round, self.interval_ns)),
            "several_nodes": self.several_nodes,
            "added_later": self.added_later,
            "yardsticks": {
                name: {"ns": round(ns), "error": self.baseline_error(name)} for name, ns in self.baselines_ns.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class FastestChoice:
    """The fastest of several configurations, as measured and as each method predicts.

    Attributes:
        part: Part of the score.
        case: Name of the case or of the committed run.
        label: Model and number of GPUs, or model.
        predicted: Name of the configuration that the simulator predicts to be the fastest.
        measured: Name of the configuration that was the fastest.
        lead: How much longer the second fastest took, as a fraction.
        is_tie: Whether measurements cannot separate the two.
        baselines: Name of the configuration that each baseline predicts, by baseline.
    """

    part: Part
    case: str
    label: str
    predicted: str
    measured: str
    lead: float
    is_tie: bool
    baselines: Mapping[str, str]

    @property
    def is_right(self) -> bool:
        """Whether the predicted configuration is the fastest; true for a tie."""
        return self.is_tie or self.predicted == self.measured

    def to_json(self) -> dict[str, Any]:
        """All fields; keys keep their former names for existing readers."""
        return {
            "part": self.part,
            "case": self.case,
            "what": self.label,
            "predicted": self.predicted,
            "measured": self.measured,
            "measured_lead": self.lead,
            "tie": self.is_tie,
            "right": self.is_right,
            "yardsticks": dict(self.baselines),
        }


class Stated(NamedTuple):
    """What is known before a prediction, without any usual cost of a GPU: arguments of `predict`."""

    trace: Trace  #: computation of the known iteration
    fabric: Fabric  #: links, or measured all-reduces
    settings: dict[str, Any]  #: buckets and other settings of the reducer


def times_of(prediction: Prediction) -> dict[str, float]:
    """Nanoseconds of a prediction and of both ends of its interval, as those of methods."""
    low, high = prediction.interval_ns
    return {"predicted": prediction.iteration_ns, "low": low, "high": high}


TimesByMethod = Mapping[str, Mapping[str, float]]
"""Nanoseconds by configuration, then by method."""


def fastest(times: TimesByMethod, method: str) -> str:
    """Name of the configuration with the shortest time by one method; the first of equals."""
    return min(times, key=lambda name: times[name][method])


@dataclass(frozen=True)
class CaseScore:
    """The rows and fastest choices of one case or committed run."""

    rows: tuple[Comparison, ...]
    choices: tuple[FastestChoice, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Errors of one part of the score compared with its limit.

    Attributes:
        part: Part of the score.
        checked: Number of errors; see `LIMITS`.
        within: How many of them are within the limit for each one.
        mean: Their mean absolute value.
        worst: The one farthest from zero.
        baselines: The same mean for each baseline, by name.
        choices: Number of comparisons of several configurations.
        ties: How many of them are ties.
        wrong: How often the simulator predicted the wrong fastest configuration.
        wrong_by_baseline: The same for each baseline, by name.
    """

    part: Part
    checked: int
    within: int
    mean: float
    worst: float
    baselines: Mapping[str, float]
    choices: int
    ties: int
    wrong: int
    wrong_by_baseline: Mapping[str, int]

    @property
    def is_met(self) -> bool:
        """Whether all errors are within their limits, and every fastest choice is right."""
        limit = LIMITS[self.part]
        return self.within == self.checked and (limit.mean is None or self.mean <= limit.mean) and not self.wrong


def grouped(rows: Sequence[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    """Rows by case and group, in the order of their first row."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for row in rows:
        groups.setdefault((row.case, row.group), []).append(row)
    return groups


def mean_absolute(errors: Sequence[float]) -> float:
    """Mean of the absolute values."""
    return fmean(map(abs, errors))


def weighted_quantile(values: Sequence[float], weights: Sequence[float], part: float) -> float:
    """The smallest of the values that, with all smaller ones, has this part of the weight."""
    order = np.argsort(values)
    reached = np.cumsum(np.array(weights)[order]) / sum(weights)
    return float(values[order[int(reached.searchsorted(part))]])


def checked_errors(part: Part, rows: Sequence[Comparison], error_of: Callable[[Comparison], float]) -> list[float]:
    """The errors to which a part's limits apply: in (a) the mean of each table, else that of each row."""
    counting = [row for row in rows if row.part == part and row.counts]
    if part == "a":
        return [mean_absolute(list(map(error_of, group))) for group in grouped(counting).values()]
    return list(map(error_of, counting))


def verdict(part: Part, rows: Sequence[Comparison], choices: Sequence[FastestChoice]) -> Verdict:
    """Compare the errors of a part, of which at least one row must count, with its limits."""
    errors = checked_errors(part, rows, lambda row: row.error)
    baselines = next(row for row in rows if row.part == part).baselines_ns
    of_part = [choice for choice in choices if choice.part == part]
    limit = LIMITS[part].worst
    return Verdict(
        part=part,
        checked=len(errors),
        within=sum(limit is None or abs(error) <= limit for error in errors),
        mean=mean_absolute(errors),
        worst=max(errors, key=abs),
        baselines={
            name: mean_absolute(checked_errors(part, rows, partial(Comparison.baseline_error, name=name)))
            for name in baselines
        },
        choices=len(of_part),
        ties=sum(choice.is_tie for choice in of_part),
        wrong=sum(not choice.is_right for choice in of_part),
        wrong_by_baseline={
            name: sum(not choice.is_tie and choice.baselines[name] != choice.measured for choice in of_part)
            for name in RANKING_BASELINES
            if of_part
        },
    )
