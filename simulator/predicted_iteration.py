"""Predicted iteration: what `predict` returns, the difference between two of them, and the statistics of both."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import hypot, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from ..reference.files.value_ranges import as_int64
from ..reference.files.writing import milliseconds, write_atomically
from .anchoring import Anchor, Expected, correct
from .engines.closed_form import simulate
from .engines.timeline import EngineInput, Span, Timeline
from .results import chakra_export, perfetto_export
from .results.breakdown import break_down, critical_path
from .workload.compute_times import Floats

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


INTERVAL = (0.05, 0.95)
"""Quantiles of the iterations at the ends of the interval; of up to 11 iterations, fastest and slowest."""

FIGURES = ("iteration_ns", "mean_ns", "p95_ns", "p99_ns", "compute_ns", "no_overlap_ns", "exposed_comm_ns")
"""Times of `Prediction` in tables and in JSON."""
SPREAD = "spread of training"
"""Cause of an interval's width where the spread of training was measured, in place of all others."""
TAIL = {"p95_ns": 0.95, "p99_ns": 0.99}
"""Quantiles of the tail. Of fewer than 1 / (1 - q) iterations of different lengths, quantile q is not known."""

DRAWS, LATTICE = 2039, 802
"""A prime number of draws, and the generator of a lattice of them (Korobov). Of those tried, its errors were smallest
for weighted sums of up to 8 normal variables at the ends of `INTERVAL`: 0.7 % on average, and up to 5 %."""
ROUNDING_NS = 1.0


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one iteration, in nanoseconds.

    With `sync_every=k`, times are those of a cycle of k iterations divided by k. The timeline, and the spans,
    breakdown and critical path derived from it, cover the whole cycle.
    """

    iteration_ns: int  #: median iteration time
    interval_ns: tuple[int, int]
    """Interval that contains 90 % of the iterations, given their variation and the errors of all costs."""
    mean_ns: int  #: mean iteration time; multiplied by the number of iterations, it is the duration of an epoch
    p95_ns: int | None
    """95th percentile of the iterations on the cluster of the median. Which cluster one gets, and errors of costs,
    belong to the interval. None if fewer than 20 simulated iterations differ in length."""
    p99_ns: int | None  #: the 99th percentile likewise; None if fewer than 100 differ
    compute_ns: int
    """Time that a rank would take alone and undisturbed ("perfect scaling"): the mean over all ranks, without
    stragglers and without waiting for the slowest device; of that, the median over the iterations."""
    no_overlap_ns: int
    """Median time of an iteration in which all collectives run after the backward pass, one at a time. Includes
    copies, launches and comm hooks."""
    samples_ns: tuple[int, ...] = field(repr=False)  #: time of every simulated iteration, in the order of simulation
    buckets: tuple[tuple[int, ...], ...] = field(repr=False)  #: parameter indices by bucket, in launch order
    median: Timeline | EngineInput = field(repr=False, compare=False)
    """The median iteration, or the median cycle, simulated when `timeline` is first asked for."""
    epoch_end_ns: int = 0
    """Under Join, the time after the last iteration in which all ranks receive the model of one rank."""
    counted_as_free: tuple[str, ...] = ()
    """Costs that are in neither the trace nor the fabric and count as zero; one sentence each."""
    assumed: tuple[str, ...] = field(default=(), compare=False)
    """Costs that were not measured and have usual values, and how messages are priced that are smaller or larger than
    the measured ones; one sentence each."""
    causes_ns: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    """How far the interval would reach below and above the median if only one thing were uncertain, by its name; in
    quadrature, all of them give the interval. `SPREAD` alone if the spread of training was measured."""
    compute_errors: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)
    """Relative error of `compute_ns`, below and above, of each cause that changes it."""
    fastest_compute: float = field(default=1.0, repr=False)
    """The shortest computation of an iteration, as a multiple of `compute_ns`."""
    efficiency_reach: tuple[float, float] | None = field(default=None, repr=False)
    """How far the interval of the efficiency reaches below and above it. None: no iterations were measured."""
    anchors: tuple[Anchor, ...] = ()
    """What each measured iteration time has changed. The correction applies to the times of iterations, their
    interval and computation alone. Times without overlap and the timeline remain the model's."""

    @cached_property
    def timeline(self) -> Timeline:
        """Timeline of the median iteration, or of the median cycle."""
        return self.median if isinstance(self.median, Timeline) else simulate(self.median)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Spans of the median iteration on the simulated ranks; ranks that behave like one of these have no spans."""
        return tuple(self.timeline.spans())

    @cached_property
    def breakdown(self) -> dict[str, int]:
        """Parts that add up to the slowest rank's time in the median iteration; see `results.breakdown`.

        `unexplained` is what measured iterations add to the model's time, or take from it.
        """
        parts = break_down(self.timeline)
        if self.anchors:
            parts["unexplained"] = self.iteration_ns * self.iterations - sum(parts.values())
        return parts

    @property
    def efficiency(self) -> float:
        """`compute_ns` divided by `iteration_ns`, at most 1: perfect scaling. A straggler never raises it."""
        return min(1.0, self.compute_ns / max(1, self.iteration_ns))

    @property
    def efficiency_interval(self) -> tuple[float, float]:
        """Both ends of the 90 % interval of the efficiency; see `efficiency_interval`."""
        if self.efficiency_reach is not None:
            below, above = self.efficiency_reach
            return max(0.0, self.efficiency - below), min(1.0, self.efficiency + above)
        return efficiency_interval(self.iteration_ns, self.compute_ns, self.causes_ns, self.compute_errors)

    @property
    def shares_of_width(self) -> dict[str, float]:
        """Part of the interval's squared width that each cause has, the largest first."""
        squares = {cause: below**2 + above**2 for cause, (below, above) in self.causes_ns.items()}
        whole = max(1, sum(squares.values()))
        return {cause: squares[cause] / whole for cause in sorted(squares, key=lambda cause: -squares[cause])}

    @property
    def contradictions(self) -> list[Anchor]:
        """The measured iterations that are far from the model."""
        return [anchor for anchor in self.anchors if anchor.is_far]

    def anchored(
        self, world_size: int, measured_ns: Mapping[int, int], predicted: Mapping[int, "Prediction"]
    ) -> "Prediction":
        """Return this prediction, for `world_size` ranks, corrected by measured median iterations; see `anchoring`.

        `predicted` has the predictions for the measured numbers of ranks, and for `world_size` if other settings were
        measured, with these settings; if there is one for 1 rank, its correction applies to `compute_ns` too.
        """
        expected = [predicted[ranks].expected(ranks) for ranks in measured_ns]
        usual = predicted.get(world_size, self).expected(world_size)
        correction = correct(self.expected(world_size), list(measured_ns.values()), expected, usual)
        factor, anchors = correction.factor, correction.anchors
        scaled = {cause: factor * correction.by_cause.get(cause, 1.0) for cause in self.causes_ns}
        reaches = self.causes_ns.items()
        causes = {cause: (round(low * scaled[cause]), round(high * scaled[cause])) for cause, (low, high) in reaches}
        below, above = np.sqrt((np.array(list(causes.values()), float) ** 2).sum(axis=0))
        names = ("iteration_ns", "mean_ns", "p95_ns", "p99_ns")
        corrected: dict[str, Any] = {name: (ns := getattr(self, name)) and round(ns * factor) for name in names}
        if (alone := predicted.get(1)) is not None:  # what contradicts the model says nothing of computation
            explained = [place for place, one in enumerate(anchors) if one.world_size == 1 or not one.is_far]
            times_ns, those = [anchors[one].measured_ns for one in explained], [expected[one] for one in explained]
            of_one = correct(alone.expected(1), times_ns, those).factor
            corrected["compute_ns"] = min(round(self.compute_ns * of_one), corrected["iteration_ns"])
        (low, high), part = self.efficiency_interval, correction.of_efficiency
        median_ns, compute_ns = corrected["iteration_ns"], corrected.get("compute_ns", self.compute_ns)
        least_ns = self.least_ns * compute_ns / max(1, self.compute_ns)
        fewer = max((ranks for ranks in measured_ns if ranks < world_size), default=None)
        if fewer is not None and not any(one.contradicts for one in anchors):  # many ranks are no faster than few
            few, least = predicted[fewer], predicted[fewer].anchored(fewer, measured_ns, predicted).interval_ns[0]
            least_ns = max(least_ns, least * min(1, self.iteration_ns / max(1, few.iteration_ns)))
        return replace(
            self,
            **corrected,
            interval_ns=(min(median_ns, round(max(least_ns, median_ns - below))), round(median_ns + above)),
            samples_ns=tuple(round(ns * factor) for ns in self.samples_ns),
            causes_ns=causes,
            efficiency_reach=(part * (self.efficiency - low), part * (high - self.efficiency)),
            anchors=anchors,
        )

    @property
    def least_ns(self) -> float:
        """Shortest iteration that noise and errors of computation explain; no measured spread reaches below it."""
        return self.fastest_compute * self.expected(1).least_ns

    def with_spread(self, spread: float) -> "Prediction":
        """Return this prediction with a measured half-width of its interval, a fraction of the median."""
        above = spread * self.iteration_ns
        reach = round(min(above, self.iteration_ns - self.least_ns)), round(above)
        ends = self.iteration_ns - reach[0], self.iteration_ns + reach[1]
        return replace(self, interval_ns=ends, causes_ns={SPREAD: reach})

    def expected(self, world_size: int) -> Expected:
        """Return this prediction, which is that for `world_size` ranks, as `anchoring` takes it.

        Its causes are those of the median, which varies less than the iterations.
        """
        causes = {cause: reach for cause, reach in self.causes_ns.items() if cause != "iterations"}
        return Expected(world_size, self.iteration_ns, causes, self.compute_ns, self.compute_errors)

    @property
    def exposed_comm_ns(self) -> int:
        """Time in the median iteration in which the slowest rank waits while a collective runs."""
        return self._parts_ns["exposed_comm"]

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that determines the length of the median iteration, from its start to its end."""
        return critical_path(self.timeline)

    @property
    def critical_buckets(self) -> tuple[int, ...]:
        """Buckets whose collectives lie on the critical path.

        If collectives run one at a time at constant speeds, the iteration becomes shorter only if collectives of
        these buckets become faster. If several collectives run at the same time, a faster collective of another
        bucket may also help, because a collective of these buckets then starts sooner.
        """
        on_path = {span.bucket for span in self.critical_path if span.stream == "comm" and span.bucket is not None}
        return tuple(sorted(on_path))

    def to_frame(self) -> "pd.DataFrame":
        """Return the spans as a table, one row per span, sorted by start time."""
        import pandas as pd  # loading pandas takes longer than a prediction

        frame = pd.DataFrame(self.spans, columns=Span._fields)
        frame = frame.astype({"bucket": "Int64"}).sort_values(["start_ns", "rank", "end_ns"])
        return frame.reset_index(drop=True)

    def to_json(self) -> dict[str, object]:
        """Return all times as a JSON document, without spans and samples."""
        several = ("interval_ns", "efficiency_interval", "counted_as_free", "assumed", "critical_buckets")
        return {
            **{name: getattr(self, name) for name in (*FIGURES, "efficiency", "epoch_end_ns")},
            **{name: list(getattr(self, name)) for name in several},
            "causes_ns": {cause: list(reach) for cause, reach in self.causes_ns.items()},
            "breakdown_ns": self.breakdown,
            "anchors": [anchor._asdict() for anchor in self.anchors],
            "buckets": [list(bucket) for bucket in self.buckets],
        }

    def save_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write the median iteration as a Chrome trace, which ui.perfetto.dev opens."""
        write_atomically(path, json.dumps(perfetto_export.chrome_trace(self.timeline)).encode())

    def save_chakra(self, prefix: str | os.PathLike[str]) -> None:
        """Write a Chakra trace `<prefix>.<rank>.et` of each rank's median iteration, for ASTRA-sim and others."""
        for rank, trace in enumerate(chakra_export.chakra_traces(self.timeline.engine_input)):
            write_atomically(f"{os.fspath(prefix)}.{rank}.et", trace)

    def plot(self, ax: "Axes | None" = None, *, ranks: Sequence[int] | None = None) -> "Axes":
        """Draw the median iteration on axes (None: of a new figure), and return them; see `draw_timeline`."""
        from .results.timeline_plot import draw_timeline  # loading matplotlib takes longer than a prediction

        if ax is None:
            from matplotlib import pyplot

            ax = pyplot.figure(figsize=(11, 4.5), layout="constrained").add_subplot()
        return draw_timeline(self, ax, ranks=ranks)

    def compare(self, other: "Prediction") -> "Comparison":
        """Compare another prediction with this one, which is the baseline."""
        return Comparison(baseline=self, other=other)

    @property
    def _parts_ns(self) -> dict[str, int]:
        """`breakdown` per iteration: the breakdown of a cycle is divided by its number of iterations."""
        return {part: round(ns / self.iterations) for part, ns in self.breakdown.items()}

    @property
    def iterations(self) -> int:
        """Iterations of the cycle that the timeline covers."""
        return 1 + sum(step.kind == "unsynchronized" for step in self.timeline.engine_input.schedule.steps)


def ties_of(predictions: Sequence[Prediction]) -> list[bool]:
    """Return which predictions are the fastest or tie with it: the rule of all commands; see `Comparison.is_tie`."""
    fastest = min(predictions, key=lambda one: one.iteration_ns)
    return [fastest.compare(one).is_tie for one in predictions]


@dataclass(frozen=True)
class Comparison:
    """Difference between two predictions, in nanoseconds; negative differences mean that `other` is faster."""

    baseline: Prediction = field(repr=False)  #: the prediction to compare with
    other: Prediction = field(repr=False)  #: the prediction to compare with the baseline

    @property
    def difference_ns(self) -> int:
        """Median iteration of `other` minus that of the baseline."""
        return self.other.iteration_ns - self.baseline.iteration_ns

    @property
    def difference_interval_ns(self) -> tuple[int, int]:
        """Interval that contains the difference with 90 %, given the errors of the costs, which both share.

        Where the causes are not known, because the spread of training was measured, or do not explain measured
        iterations, it is what both intervals allow.
        """
        causes = self.baseline.causes_ns, self.other.causes_ns
        is_unexplained = self.baseline.contradictions or self.other.contradictions
        if is_unexplained or any(SPREAD in each or not any(map(any, each.values())) for each in causes):
            (low, high), (other_low, other_high) = self.baseline.interval_ns, self.other.interval_ns
            return other_low - high, other_high - low
        below, above = reach_of_difference(self.difference_ns, *causes)
        return self.difference_ns - int(below), self.difference_ns + int(above)

    @property
    def ratio(self) -> float:
        """Median iteration of `other` divided by that of the baseline."""
        return self.other.iteration_ns / max(1, self.baseline.iteration_ns)

    @property
    def parts_ns(self) -> dict[str, int]:
        """Difference of each part of the breakdown, per iteration."""
        before, after = self.baseline._parts_ns, self.other._parts_ns
        return {part: after.get(part, 0) - before.get(part, 0) for part in before | after}

    @property
    def is_tie(self) -> bool:
        """Whether the difference may be due to the errors of the costs, which both predictions share."""
        low, high = self.difference_interval_ns
        return low <= 0 <= high

    def __repr__(self) -> str:
        parts = ", ".join(f"{part} {milliseconds(ns, '+.2f')}" for part, ns in self.parts_ns.items() if ns)
        parts = parts.replace("exposed_comm", "exposed communication").replace("_", " ")
        size = f"{_ms(abs(self.difference_ns))} {'longer' if self.difference_ns > 0 else 'shorter'}"
        verdict = (
            f"{_ms(self.other.iteration_ns)} instead of {_ms(self.baseline.iteration_ns)}: {size}, {self.ratio:.3f} "
            f"times as long; the difference is {'within' if self.is_tie else 'beyond'} the errors of the costs"
        )
        verdict = verdict if self.difference_ns else f"both take {_ms(self.other.iteration_ns)}"
        return f"{verdict}; by part, ms: {parts or 'no difference'}"


def _ms(ns: int) -> str:
    return f"{milliseconds(ns, ',.2f')} ms"


# Statistics


def place_of_median(latency_ns: Floats) -> int:
    """Return the index of the median: the upper median, so that it is one of the iterations."""
    return int(latency_ns.argsort(kind="stable")[len(latency_ns) // 2])


def summarize(times_ns: Floats, *, causes: Mapping[str, tuple[float, float]] | None = None) -> dict[str, Any]:
    """Return the fields of a `Prediction` that are statistics of its iterations.

    Args:
        times_ns: Duration, computation alone and duration without overlap of each iteration; shape [3, cycles].
        causes: Distances from the median to both ends of the interval that each uncertain cost alone would give.
    """
    latency, compute, no_overlap = np.sort(times_ns)
    median_ns, compute_ns = latency[len(latency) // 2], compute[len(compute) // 2]
    low, high = np.quantile(latency, INTERVAL, method="nearest")
    distances = {"iterations": (median_ns - low, high - median_ns), **(causes or {})}
    reach = np.maximum(0, list(distances.values()))
    below, above = np.sqrt((reach**2).sum(axis=0))
    different = 1 + np.count_nonzero(np.diff(latency))
    figures = {
        "iteration_ns": median_ns,
        "mean_ns": times_ns[0].mean(),
        "compute_ns": compute_ns,
        "no_overlap_ns": no_overlap[len(no_overlap) // 2],
    }
    return {
        **{name: int(as_int64(ns)) for name, ns in figures.items()},
        **{
            name: int(as_int64(np.quantile(latency, level))) if different * (1 - level) >= 1 - 1e-9 else None
            for name, level in TAIL.items()
        },
        "interval_ns": tuple(as_int64([max(0, median_ns - below), median_ns + above]).tolist()),
        "samples_ns": tuple(as_int64(times_ns[0]).tolist()),
        "causes_ns": dict(zip(distances, map(tuple, as_int64(reach).tolist()), strict=True)),
        "fastest_compute": float(compute[0] / max(1, compute_ns)),
    }


Reaches = Mapping[str, tuple[int, int]]
"""Reach of each cause below and above a median, as in `Prediction.causes_ns`."""


def efficiency_interval(
    iteration_ns: int, compute_ns: int, causes_ns: Reaches, compute_errors: Mapping[str, tuple[float, float]]
) -> tuple[float, float]:
    """Return both ends of the 90 % interval of the efficiency, computation over iteration, both in nanoseconds.

    Longer computation lengthens the iteration too, so both change together. The causes are independent, so their
    effects are added in quadrature. The last two arguments are as in `Prediction`.
    """
    usual = min(1.0, compute_ns / max(1, iteration_ns))
    down = up = 0.0
    for cause, reach in causes_ns.items():
        ends = [
            compute_ns * (1 + side * error) / max(1, iteration_ns + side * ns) - usual
            for side, ns, error in zip((-1, 1), reach, compute_errors.get(cause, (0.0, 0.0)), strict=True)
        ]
        down, up = down + min(0, *ends) ** 2, up + max(0, *ends) ** 2
    return max(0.0, usual - sqrt(down)), min(1.0, usual + sqrt(up))


def reach_of_difference(difference_ns: int, causes_ns: Reaches, other_ns: Reaches) -> tuple[float, float]:
    """Return how far the difference of two medians reaches below and above the predicted one with 90 %.

    A cause moves both medians; what counts is by how much it moves their difference. The causes are independent and
    normally distributed, with `INTERVAL` as the ends of their bands, and a cause moves the difference in proportion,
    with one slope on each side. A cause that does not reverse the difference at an end of its band does not reverse
    it beyond either: on a fast enough network two bucket caps may take equally long, and no cap gains from a still
    faster one. The error that no cost explains is not shared.

    `difference_ns` is the other median minus the first. A cause that one of the predictions lacks has no reach there.
    """
    distance, sign = abs(difference_ns), -1 if difference_ns < 0 else 1
    causes = sorted({**causes_ns, **other_ns})
    moved = np.zeros(DRAWS - 1)  # draws of the change of the distance; below zero: the medians come closer
    for cause, position in zip(causes, _positions(len(causes)), strict=True):
        (below, above), (other_below, other_above) = (some.get(cause, (0, 0)) for some in (causes_ns, other_ns))
        for end, part in ((below - other_below, -position), (other_above - above, position)):
            moves = sign * end * np.maximum(part, 0)
            keeps_sign = distance > 0 and distance + sign * end >= -ROUNDING_NS
            moved += np.maximum(moves, -distance) if keeps_sign else moves
    quantiles = np.quantile(moved, INTERVAL, method="nearest")
    low, high = -quantiles[::-1] if sign < 0 else quantiles
    alone_ns = max(*causes_ns.get("unexplained", (0, 0)), *other_ns.get("unexplained", (0, 0)))
    return hypot(max(0.0, -low), alone_ns), hypot(max(0.0, high), alone_ns)


@cache
def _positions(causes: int) -> Floats:
    """Return draws of each cause, as multiples of its band: -1 and 1 are the ends; shape [causes, draws].

    A lattice in place of random draws: quantiles of a sum are then right to about 1 %, and those of the negated
    sum are exactly the negated ones.
    """
    quantiles = np.array([NormalDist().inv_cdf(number / DRAWS) for number in range(1, DRAWS)])
    positions: Floats = quantiles / NormalDist().inv_cdf(INTERVAL[1])
    numbers = np.arange(1, DRAWS)
    return np.array([positions[numbers * pow(LATTICE, cause, DRAWS) % DRAWS - 1] for cause in range(causes)])
