"""Predicted iteration: what `predict` returns, and the difference between two of them."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..reference.files.writing import write_atomically
from .anchoring import Anchor, Expected, correct
from .engines.timeline import Span, Timeline
from .interval import efficiency_interval, reach_of_difference
from .results import perfetto_export
from .results.breakdown import break_down, critical_path

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one iteration, in nanoseconds.

    With `sync_every=k`, times are those of a cycle of k iterations divided by k. The timeline, and the spans,
    breakdown and critical path derived from it, cover the whole cycle.

    Attributes:
        iteration_ns: Median iteration time.
        interval_ns: Interval that contains 90 % of the iterations, given the variation of the iterations and the
            errors of all costs.
        causes_ns: How far the interval would reach below and above the median if only one thing were uncertain, by
            its name; in quadrature, all of them give the interval. Empty if the spread of training was measured.
        mean_ns: Mean iteration time. Multiplied by the number of iterations, it is the duration of an epoch.
        p95_ns: 95th percentile of the iterations on the cluster of the median. Which cluster one gets, and errors of
            costs, belong to the interval. None if fewer than 20 simulated iterations differ in length.
        p99_ns: The 99th percentile likewise. None if fewer than 100 differ.
        compute_ns: Time that a rank would take alone and undisturbed ("perfect scaling"): the mean over all ranks,
            without stragglers and without waiting for the slowest device; of that, the median over the iterations.
        no_overlap_ns: Median time of an iteration in which all collectives run after the backward pass, one at a
            time. Includes copies, launches and comm hooks.
        samples_ns: Time of every simulated iteration, in the order of simulation.
        buckets: Parameter indices by bucket, in launch order.
        timeline: Timeline of the median iteration, or of the median cycle.
        epoch_end_ns: Under Join, the time after the last iteration in which all ranks receive the model of one rank.
        counted_as_free: Costs that are in neither the trace nor the fabric and count as zero; one sentence each.
        assumed: Costs that were not measured and have usual values, and how messages are priced that are smaller or
            larger than the measured ones; one sentence each.
        compute_errors: Relative error of `compute_ns`, below and above, of each cause that changes it.
        anchors: What each measured iteration time has changed. The correction applies to the times of iterations,
            their interval and computation alone. Times without overlap and the timeline remain the model's.
    """

    iteration_ns: int
    interval_ns: tuple[int, int]
    mean_ns: int
    p95_ns: int | None
    p99_ns: int | None
    compute_ns: int
    no_overlap_ns: int
    samples_ns: tuple[int, ...] = field(repr=False)
    buckets: tuple[tuple[int, ...], ...] = field(repr=False)
    timeline: Timeline = field(repr=False, compare=False)
    epoch_end_ns: int = 0
    counted_as_free: tuple[str, ...] = ()
    assumed: tuple[str, ...] = field(default=(), compare=False)
    causes_ns: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    compute_errors: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)
    anchors: tuple[Anchor, ...] = ()

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
        """Both ends of the 90 % interval of the efficiency; see `interval.efficiency_interval`."""
        low, high = self.interval_ns
        reaches = self.causes_ns or {"": (self.iteration_ns - low, high - self.iteration_ns)}
        return efficiency_interval(self.iteration_ns, self.compute_ns, reaches, self.compute_errors)

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
        """Return this prediction, corrected by measured iterations; see `anchoring`.

        Args:
            world_size: Number of ranks of this prediction.
            measured_ns: Measured median iteration time by number of ranks.
            predicted: Predictions for these numbers of ranks, with the settings of the measured runs; if there is one
                for 1 rank, its correction applies to `compute_ns` too.
        """
        expected = [predicted[ranks].expected(ranks) for ranks in measured_ns]
        target = self.expected(world_size)
        factor, narrowing, anchors = correct(target, list(measured_ns.values()), expected)
        errors = target.causes_ns
        scaled = {cause: factor * (narrowing if cause in errors else 1) for cause in self.causes_ns or errors}
        causes = {
            cause: (round(below * scaled[cause]), round(above * scaled[cause]))
            for cause, (below, above) in (self.causes_ns or errors).items()
        }
        below, above = np.sqrt((np.array(list(causes.values()), float) ** 2).sum(axis=0))
        names = ("iteration_ns", "mean_ns", "p95_ns", "p99_ns")
        corrected: dict[str, Any] = {name: (ns := getattr(self, name)) and round(ns * factor) for name in names}
        if (alone := predicted.get(1)) is not None:  # what contradicts the model says nothing of computation
            explained = [place for place, one in enumerate(anchors) if one.world_size == 1 or not one.is_far]
            times_ns, those = [anchors[one].measured_ns for one in explained], [expected[one] for one in explained]
            of_one = correct(alone.expected(1), times_ns, those).factor
            corrected["compute_ns"] = round(self.compute_ns * of_one)
        median_ns = corrected["iteration_ns"]
        return replace(
            self,
            **corrected,
            interval_ns=(max(0, round(median_ns - below)), round(median_ns + above)),
            samples_ns=tuple(round(ns * factor) for ns in self.samples_ns),
            causes_ns=causes if self.causes_ns else {},
            compute_errors={
                cause: (below * scaled.get(cause, 1.0), above * scaled.get(cause, 1.0))
                for cause, (below, above) in self.compute_errors.items()
            },
            anchors=anchors,
        )

    def expected(self, world_size: int) -> Expected:
        """Return this prediction, which is that for `world_size` ranks, as `anchoring` takes it.

        Its causes are those of the median, which varies less than the iterations; the interval if none are known.
        """
        causes = {cause: reach for cause, reach in self.causes_ns.items() if cause != "iterations"}
        if not self.causes_ns:
            low, high = self.interval_ns
            causes = {"training": (self.iteration_ns - low, high - self.iteration_ns)}
        return Expected(world_size, self.iteration_ns, causes, self.compute_ns)

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
        return {
            "iteration_ns": self.iteration_ns,
            "interval_ns": list(self.interval_ns),
            "causes_ns": {cause: list(reach) for cause, reach in self.causes_ns.items()},
            "mean_ns": self.mean_ns,
            "p95_ns": self.p95_ns,
            "p99_ns": self.p99_ns,
            "compute_ns": self.compute_ns,
            "efficiency": self.efficiency,
            "efficiency_interval": list(self.efficiency_interval),
            "no_overlap_ns": self.no_overlap_ns,
            "exposed_comm_ns": self.exposed_comm_ns,
            "breakdown_ns": self.breakdown,
            "epoch_end_ns": self.epoch_end_ns,
            "counted_as_free": list(self.counted_as_free),
            "assumed": list(self.assumed),
            "anchors": [anchor._asdict() for anchor in self.anchors],
            "critical_buckets": list(self.critical_buckets),
            "buckets": [list(bucket) for bucket in self.buckets],
        }

    def save_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write the median iteration as a Chrome trace, which ui.perfetto.dev opens."""
        write_atomically(path, json.dumps(perfetto_export.chrome_trace(self.timeline)).encode())

    def plot(self, ax: "Axes | None" = None, *, ranks: Sequence[int] | None = None) -> "Axes":
        """Draw the timeline of the median iteration; see `results.timeline_plot.draw_timeline`.

        Args:
            ax: Axes to draw on. None: the axes of a new figure.
            ranks: Simulated ranks to draw. None: the first four.

        Returns:
            The axes.
        """
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
    """Difference between two predictions, in nanoseconds; negative differences mean that `other` is faster.

    Attributes:
        baseline: The prediction to compare with.
        other: The prediction to compare with the baseline.
    """

    baseline: Prediction = field(repr=False)
    other: Prediction = field(repr=False)

    @property
    def difference_ns(self) -> int:
        """Median iteration of `other` minus that of the baseline."""
        return self.other.iteration_ns - self.baseline.iteration_ns

    @property
    def difference_interval_ns(self) -> tuple[int, int]:
        """Interval that contains the difference with 90 %, given the errors of the costs, which both share.

        Where the causes are not known, because the spread of training was measured, it is what both intervals allow.
        """
        if not all(any(map(any, one.causes_ns.values())) for one in (self.baseline, self.other)):
            (low, high), (other_low, other_high) = self.baseline.interval_ns, self.other.interval_ns
            return other_low - high, other_high - low
        below, above = reach_of_difference(self.difference_ns, self.baseline.causes_ns, self.other.causes_ns)
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
        parts = ", ".join(f"{_in_words(part)} {ns / 1e6:+.2f}" for part, ns in self.parts_ns.items() if ns)
        return f"{self._verdict}; by part, ms: {parts or 'no difference'}"

    @property
    def _verdict(self) -> str:
        if self.difference_ns == 0:
            return f"both take {_ms(self.other.iteration_ns)}"
        size = f"{_ms(abs(self.difference_ns))} {'longer' if self.difference_ns > 0 else 'shorter'}"
        tie = "within" if self.is_tie else "beyond"
        return (
            f"{_ms(self.other.iteration_ns)} instead of {_ms(self.baseline.iteration_ns)}: {size}, "
            f"{self.ratio:.3f} times as long; the difference is {tie} the errors of the costs"
        )


def _ms(ns: int) -> str:
    return f"{ns / 1e6:,.2f} ms"


def _in_words(part: str) -> str:
    return part.replace("exposed_comm", "exposed communication").replace("_", " ")
