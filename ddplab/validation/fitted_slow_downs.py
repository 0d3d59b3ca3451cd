"""Reference runs: the reducer trains with bucket caps that no target run has; slow-downs are fitted to their times.

Collectives in a reducer slow computation down otherwise than those of `slow_downs`: the same layers always run beside
them, a launch wakes a thread of the network, which takes the core for up to milliseconds, and Gloo's threads poll
while a message waits for its receiver. In a DenseNet over 1 Gbit/s, this made the backward pass 26 ms of 323 longer
than predicted. One factor on all slow-downs accounts for it: the one with which a run with few buckets and a run with
many buckets are predicted rightly on average. Two factors, for small and for large collectives, would follow the
noise of these runs: one bucket cap of a vision transformer was then 15 % too slow instead of 2 % too fast.

Reference runs are never target runs. They also give the speed checks with which those beside the target runs are
compared: both are measured in the same way.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from scipy.optimize import brentq

from reference.bucketing import MIB
from reference.trace import Trace
from simulator.fabric import Fabric
from simulator.fabric.processor_costs import HookCost
from simulator.schedule.schedule import buckets_of
from simulator.workload.compute_times import recorded_model

from ..calibration.comm_hook_costs import HookParts
from ..calibration.repeated_timing import half_band_of_median
from .validation_report import Configuration, Measurement, SpeedCheck, policy_of, predict_one

FEW_BUCKETS, MANY_BUCKETS = (5, 4, 6, 3, 8, 2), (24, 20, 28, 16, 12, 10)
"""Numbers of buckets of the two runs; the first that gives other buckets than the target runs is used."""


def reference_runs(trace: Trace, targets: Sequence[Configuration]) -> list[Configuration]:
    """Choose bucket caps whose buckets differ from those of all targets; no comm hook.

    Returns:
        The run with few buckets, and one with at least twice as many if there is one; empty if no cap can be chosen.
    """
    model = recorded_model(trace, unused_allowed=True)
    taken = [buckets_of(policy_of(target), model) for target in targets]
    total_mb, least, chosen = max(1, sum(trace.sizes_bytes)) / MIB, 2, list[Configuration]()
    for counts in (FEW_BUCKETS, MANY_BUCKETS):
        for count in counts:
            candidate = Configuration(total_mb / count)
            buckets = buckets_of(policy_of(candidate), model)
            if len(buckets) >= least and buckets not in taken:
                chosen.append(candidate)
                least = 2 * len(buckets)
                break
        else:
            break
    return chosen


class Reference(NamedTuple):
    """Iterations of a reference run, as if each turn had had the speed of the median speed check."""

    times_ns: tuple[float, ...]
    speed_check: SpeedCheck

    @property
    def error(self) -> float:
        """Half-width of the band that holds 90 % of the medians of as many iterations, over the median."""
        return half_band_of_median(self.times_ns) / median(self.times_ns)

    @classmethod
    def of(cls, turns: Sequence[Measurement]) -> "Reference":
        """Summarise the turns, of which each has a speed check."""
        checks = [turn.speed_check for turn in turns if turn.speed_check is not None]
        usual, pairs = SpeedCheck.usual(checks), zip(turns, checks, strict=True)
        return cls(
            tuple(ns * usual.total_ns / check.total_ns for turn, check in pairs for ns in turn.times_ns), usual
        )


# Fits

LARGEST_FACTOR = 5.0
"""Limit of a fitted factor."""
TOLERANCE = 0.01
"""How closely a factor is found."""


def fitted(
    with_factor: Callable[[float], Fabric],
    trace: Trace,
    world_size: int,
    measured: Mapping[Configuration, Reference],
) -> Fabric:
    """Return the fabric with the factor with which the mean error of these reference runs is zero.

    Where the factor changes nothing it is 1, and where none within the limit suffices, the nearest is used.
    """

    def mean_error(factor: float) -> float:
        fabric = with_factor(factor)
        return fmean(
            predict_one(trace, fabric, configuration, world_size).iteration_ns / median(reference.times_ns) - 1
            for configuration, reference in measured.items()
        )

    least, most = mean_error(0.0), mean_error(LARGEST_FACTOR)
    if least == most:
        return with_factor(1.0)
    if least >= 0:
        return with_factor(0.0)
    if most <= 0:
        return with_factor(LARGEST_FACTOR)
    return with_factor(float(brentq(mean_error, 0.0, LARGEST_FACTOR, xtol=TOLERANCE)))


def with_slow_downs(fabric: Fabric, factor: float) -> Fabric:
    """Return the fabric with the time multiplied by which collectives prolong computation.

    A slow-down of 1.2 prolongs computation by 0.2 of its time; this 0.2 is multiplied.
    """
    return fabric.with_processor(slow_down=1 + factor * (fabric.processor.slow_down - 1))


def with_hook_costs(fabric: Fabric, name: str, factor: float) -> Fabric:
    """Return the fabric with the costs of one comm hook multiplied.

    A hook's memory is colder in training than in its calibration, where the same few buckets take turns.
    """

    def multiplied(hook: HookCost) -> HookCost:
        return hook.model_copy(update={part: getattr(hook, part).times(factor) for part in HookParts._fields})

    hooks = fabric.processor.hooks
    return fabric.with_processor(hooks=tuple(multiplied(hook) if hook.name == name else hook for hook in hooks))
