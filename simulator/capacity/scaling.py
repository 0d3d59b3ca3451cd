"""Scaling: throughput and efficiency by number of GPUs, the knee, and what to measure for a narrower interval.

The knee is where more GPUs begin to add little.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import exp
from typing import NamedTuple

from ..anchoring import covariance_of
from ..fabric.uncertainty import NORMAL_HALF_BAND
from ..predicted_iteration import Prediction
from ..prediction import System

Band = tuple[float, float]
"""Both ends of an interval that holds nine in ten true values."""
LEAST_GAIN = 0.8
"""Part of its share that a step to more GPUs must add; a step that adds less begins at the knee. The share of a
doubling is the throughput before the doubling."""


class Size(NamedTuple):
    """Training on one number of GPUs, with the same batch on each of them (weak scaling).

    Attributes:
        world_size: Number of GPUs.
        prediction: The predicted iteration.
        samples_per_s: Samples per second on all GPUs.
        samples_per_s_band: Both ends of its 90 % interval.
        strong_samples_per_s: The same with one total batch (strong scaling). None: fewer samples than GPUs, or a
            trace with communication.
    """

    world_size: int
    prediction: Prediction
    samples_per_s: float
    samples_per_s_band: Band
    strong_samples_per_s: float | None


class Knee(NamedTuple):
    """Where the next step to more GPUs adds less than `LEAST_GAIN` of its share.

    Attributes:
        world_size: Number of GPUs before that step. None: every step adds enough.
        earliest: The same if every step adds as little as its 90 % interval allows. None: likewise.
        latest: The same if every step adds as much as its interval allows. None: likewise.
    """

    world_size: int | None
    earliest: int | None
    latest: int | None


class NextMeasurement(NamedTuple):
    """What to measure next.

    Attributes:
        width: Half of the interval of the iteration over its median, now.
        world_sizes: The two numbers of GPUs, or the only one, whose measured iterations narrow the interval most.
            Empty: there is no smaller one.
        width_with_sizes: Expected width after measuring these.
        width_with_messages: Expected width after measuring all-reduces of the largest bucket's size on as many GPUs.
            None: the buyer has fewer.
    """

    width: float
    world_sizes: tuple[int, ...]
    width_with_sizes: float
    width_with_messages: float | None


@dataclass(frozen=True)
class Scaling:
    """A system on several numbers of GPUs.

    Attributes:
        system: The system.
        world_sizes: Numbers of GPUs, in ascending order.
        batch: Samples per GPU and iteration.
        total_batch: Samples on all GPUs and iteration for strong scaling.
    """

    system: System
    world_sizes: Sequence[int]
    batch: int
    total_batch: int

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """The predictions, by number of GPUs."""
        return tuple(map(self._size, self.world_sizes))

    @cached_property
    def knee(self) -> Knee:
        """The knee and its band."""
        predictions = [(one.world_size, one.prediction) for one in self.sizes]
        slower = [0.0] * len(predictions)  # standard deviation of the logarithm of the iteration over the one before
        for place, ((few, before), (many, after)) in enumerate(pairwise(predictions), start=1):
            (first, shared), (_, second) = covariance_of([before.expected(few), after.expected(many)])
            slower[place] = max(0.0, first + second - 2 * shared) ** 0.5

        def found(half_widths: float) -> int | None:
            """Return the knee if every step takes this many half-widths of its interval longer."""
            ratio, times_ns = 1.0, []
            for (_, one), deviation in zip(predictions, slower, strict=True):
                ratio *= exp(half_widths * deviation)
                times_ns.append(ratio * one.iteration_ns)
            for (few, before_ns), (many, after_ns) in pairwise(zip(self.world_sizes, times_ns, strict=True)):
                gain = many / few * before_ns / max(1, after_ns) - 1
                if gain < LEAST_GAIN * (many / few - 1):
                    return few
            return None

        return Knee(found(0.0), found(NORMAL_HALF_BAND), found(-NORMAL_HALF_BAND))

    def next_measurement(self, world_size: int) -> NextMeasurement:
        """Choose what to measure for one number of GPUs, from the narrowing that iterations as predicted would give.

        Parts of a node may be measured, and the numbers of GPUs that are predicted. The buyer counts as having one
        node, or as many GPUs as were measured.
        """
        system, known = self.system, self.system.inputs.measured or {}
        whole, topology = system.at(world_size), system.inputs.fabric.topology
        node = 1 if topology is None else topology.levels[0].size
        owned = max([node, *known])
        candidates = {1, node // 4, node // 2, node, *self.world_sizes} - {0, *known}
        if system.inputs.trace.workload.compute_bounds == (1.0, 1.0):
            candidates -= {1}  # one GPU alone was measured
        smaller = {ranks: system.at(ranks) for ranks in sorted(candidates) if ranks < world_size and ranks <= owned}
        narrowed = {
            some: _width(whole.anchored(world_size, {ranks: smaller[ranks].iteration_ns for ranks in some}, smaller))
            for some in combinations(smaller, min(2, len(smaller)))
            if some
        }
        width = _width(whole)
        left, best = min(((left, pair) for pair, left in narrowed.items()), default=(width, ()))
        without = 1 - whole.shares_of_width.get("collectives", 0.0)
        return NextMeasurement(width, best, left, width * without**0.5 if world_size <= owned else None)

    def _size(self, world_size: int) -> Size:
        prediction = self.system.at(world_size)
        low_ns, high_ns = prediction.interval_ns
        samples = self.batch * world_size * 1e9
        return Size(
            world_size=world_size,
            prediction=prediction,
            samples_per_s=samples / max(1, prediction.iteration_ns),
            samples_per_s_band=(samples / max(1, high_ns), samples / max(1, low_ns)),
            strong_samples_per_s=self._strong(world_size, prediction),
        )

    def _strong(self, world_size: int, prediction: Prediction) -> float | None:
        samples = self.total_batch
        multiple = samples / (self.batch * world_size)
        other = self.system.with_batch(multiple) if samples >= world_size else None
        if other is None:
            return None
        if multiple != 1:
            prediction = self.system.at(world_size, self.system.inputs._replace(trace=other))
        return samples * 1e9 / max(1, prediction.iteration_ns)


def _width(prediction: Prediction) -> float:
    low, high = prediction.interval_ns
    return (high - low) / 2 / max(1, prediction.iteration_ns)
