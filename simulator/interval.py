"""Distribution of the iteration time: median, quantiles and 90 % interval of many simulated iterations."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.files.value_ranges import as_int64

from .engines.closed_form import Engine, latencies_ns
from .engines.engine_input import EngineInput
from .schedule.schedule import ComputeKind
from .step_costs import ScheduleCosts
from .workload.compute_times import Floats, IterationSampler, Nanoseconds

INTERVAL = (0.05, 0.95)
"""Quantiles of the iterations at the ends of the interval; of up to 11 iterations, fastest and slowest."""

TAIL = {"p95_ns": 0.95, "p99_ns": 0.99}
"""Quantiles of the tail. Of fewer than 1 / (1 - q) iterations of different lengths, quantile q is not known."""
UNKNOWN = -1
"""Stands in arrays for a quantile that is not known."""

CELLS = 4_000_000
"""Durations simulated at a time, to limit memory: 32 MB of int64."""

DRAWS, LATTICE = 2039, 802
"""A prime number of draws, and the generator of a lattice of them (Korobov). Of those tried, its errors were smallest
for weighted sums of up to 8 normal variables at the ends of `INTERVAL`: 0.7 % on average, and up to 5 %."""
ROUNDING_NS = 1.0

COMPUTATION: tuple[ComputeKind, ...] = ("unsynchronized", "forward", "backward", "step")
"""Computing steps of training without data parallelism."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of many iterations, in nanoseconds; arrays with the leading axes of the costs of collectives.

    Times of a cycle of several iterations are divided by their number. The fields are those of `Prediction`, with
    `low_ns` and `high_ns` for the interval; `samples_ns` has a further, last axis. A quantile of `TAIL` that too few
    iterations show is `UNKNOWN`.

    Attributes:
        median: The median iteration; its durations have shape [axes of the costs, ranks, steps].
        causes_ns: How far the interval would reach below and above the median if only one thing were uncertain, by
            its name. In quadrature, all of them give the interval; 0 where the spread of training was measured.
    """

    samples_ns: Nanoseconds
    iteration_ns: Nanoseconds
    low_ns: Nanoseconds
    high_ns: Nanoseconds
    mean_ns: Nanoseconds
    p95_ns: Nanoseconds
    p99_ns: Nanoseconds
    compute_ns: Nanoseconds
    no_overlap_ns: Nanoseconds
    median: EngineInput
    causes_ns: Mapping[str, tuple[Nanoseconds, Nanoseconds]]

    def efficiency_interval(self, compute_errors: Mapping[str, tuple[float, float]]) -> tuple[Floats, Floats]:
        """Return both ends of the interval of the efficiency; see the function of this name."""
        known = sum((ends.astype(bool) for both in self.causes_ns.values() for ends in both), np.zeros((), bool))
        whole = (np.where(known, 0, ns) for ns in (self.iteration_ns - self.low_ns, self.high_ns - self.iteration_ns))
        reaches: Reaches = {**self.causes_ns, "": (next(whole), next(whole))}
        return efficiency_interval(self.iteration_ns, self.compute_ns, reaches, compute_errors)


def simulate_many(costs: ScheduleCosts, sampler: IterationSampler, engine: Engine = "auto") -> Distribution:
    """Simulate all iterations of a sampler and summarise them.

    The median iteration is simulated again with every uncertain cost at the low and at the high end of its error
    band. The variation of the iterations and the errors of the costs are independent, so their distances from the
    median are added in quadrature. A measured spread of iterations takes the place of both.

    Args:
        costs: The schedule and its costs; the closed form takes several costs of the collectives at once.
        sampler: Generates the compute times of each iteration.
        engine: The engine for the iterations. The ends of the error bands are always simulated with "auto".
    """
    each_cycle = replace(costs, untimed=replace(costs.untimed, cost_ns=costs.untimed.cost_ns[..., None, :]))
    distinct, place_of_cycle = sampler.distinct()
    width = max(costs.spread.size, len(costs.untimed.schedule.instructions), sampler.parameters)
    at_a_time = max(1, CELLS // (len(sampler.ranks) * width))
    batches = []
    for first in range(0, len(distinct), at_a_time):
        drawn = sampler.draw(distinct[first : first + at_a_time].tolist())
        alone_ns = sampler.alone_ns(drawn)
        batch = each_cycle.engine_input(sampler, drawn)
        times = latencies_ns(batch, engine), alone_ns, no_overlap_ns(batch)
        batches.append(np.stack(np.broadcast_arrays(*times)))
    times_ns = np.concatenate(batches, axis=-1)[..., place_of_cycle] / sampler.sync_every

    median_ns = _median(times_ns[0])
    # Drawn again, because keeping what all batches drew would take memory without a limit.
    cycles, which = np.unique(place_of_median(times_ns[0]), return_inverse=True)
    median = costs.engine_input(sampler, sampler.draw(cycles.tolist()), which.reshape(median_ns.shape))
    causes = {}
    for cause, ends in _error_bands(median, costs, sampler).items():
        low_ns, high_ns = (latencies_ns(end) / sampler.sync_every for end in ends)
        causes[cause] = median_ns - low_ns, high_ns - median_ns
    if costs.unexplained:
        causes["unexplained"] = median_ns - median_ns / (1 + costs.unexplained), median_ns * costs.unexplained
    return summarize(times_ns, median, causes=causes, spread=costs.spread)


def place_of_median(latency_ns: Floats) -> NDArray[np.int64]:
    """Return the index of the median along the last axis: the upper median, so that it is one of the iterations."""
    places: NDArray[np.int64] = latency_ns.argsort(axis=-1, kind="stable")[..., latency_ns.shape[-1] // 2]
    return places


def _median(times_ns: Floats) -> Floats:
    """Return the upper median along the last axis."""
    medians: Floats = np.sort(times_ns, axis=-1)[..., times_ns.shape[-1] // 2]
    return medians


def summarize(
    times_ns: Floats,
    median: EngineInput,
    *,
    causes: Mapping[str, tuple[Floats, Floats]] | None = None,
    spread: Floats | float = 0.0,
) -> Distribution:
    """Summarise many iterations.

    Args:
        times_ns: Duration, computation alone and duration without overlap of each iteration; shape [3, ..., cycles].
        median: The median iteration.
        causes: Distances from the median to both ends of the interval that each uncertain cost alone would give.
        spread: Half-width of the interval as a fraction of the median, where it was measured; see `ScheduleCosts`.
    """
    latency, compute, no_overlap = times_ns
    median_ns = _median(latency)
    low, high = np.quantile(latency, INTERVAL, axis=-1, method="nearest")
    distances = {"iterations": (median_ns - low, high - median_ns), **(causes or {})}
    reach = np.maximum(0, [np.broadcast_arrays(*both) for both in distances.values()])
    below, above = np.where(spread, spread * median_ns, np.sqrt((reach**2).sum(axis=0)))
    figures = {
        "samples_ns": latency,
        "iteration_ns": median_ns,
        "low_ns": np.maximum(0, median_ns - below),
        "high_ns": median_ns + above,
        "mean_ns": latency.mean(axis=-1),
        **{name: _tail_quantile(latency, level) for name, level in TAIL.items()},
        "compute_ns": _median(compute),
        "no_overlap_ns": _median(no_overlap),
    }
    whole = {name: as_int64(ns) for name, ns in figures.items()}
    causes_ns = {}
    if not np.all(spread):
        ends = as_int64(np.where(spread, 0, reach))
        causes_ns = {cause: (below, above) for cause, (below, above) in zip(distances, ends, strict=True)}
    return Distribution(**whole, median=median, causes_ns=causes_ns)


def _tail_quantile(latency_ns: Floats, level: float) -> Floats:
    """Return a quantile along the last axis, or `UNKNOWN` where too few iterations differ; see `TAIL`."""
    different = 1 + np.count_nonzero(np.diff(np.sort(latency_ns, axis=-1)), axis=-1)
    quantiles: Floats = np.where(
        different * (1 - level) >= 1 - 1e-9, np.quantile(latency_ns, level, axis=-1), UNKNOWN
    )
    return quantiles


Reaches = Mapping[str, tuple[Nanoseconds | int, Nanoseconds | int]]
"""Reach of each cause below and above a median, as in `Distribution.causes_ns`."""


def efficiency_interval(
    iteration_ns: Nanoseconds | int,
    compute_ns: Nanoseconds | int,
    causes_ns: Reaches,
    compute_errors: Mapping[str, tuple[float, float]],
) -> tuple[Floats, Floats]:
    """Return both ends of the 90 % interval of the efficiency, computation over iteration.

    Longer computation lengthens the iteration too, so both change together. The causes are independent, so their
    effects are added in quadrature.

    Args:
        iteration_ns: Median iteration; any axes, which are also those of the result.
        compute_ns: Computation alone.
        causes_ns: Reach of each cause below and above the iteration.
        compute_errors: Relative error of computation, below and above, of the causes that change it.
    """
    alone, whole = np.asarray(compute_ns, float), np.asarray(iteration_ns, float)
    usual = np.minimum(1.0, alone / np.maximum(1, whole))
    down = up = np.zeros(usual.shape)
    for cause, reach in causes_ns.items():
        errors = compute_errors.get(cause, (0.0, 0.0))
        ends = [
            alone * (1 + side * error) / np.maximum(1, whole + side * np.asarray(ns)) - usual
            for side, ns, error in zip((-1, 1), reach, errors, strict=True)
        ]
        down, up = down + np.minimum(0, np.minimum(*ends)) ** 2, up + np.maximum(0, np.maximum(*ends)) ** 2
    return np.maximum(0.0, usual - np.sqrt(down)), np.minimum(1.0, usual + np.sqrt(up))


def ties(iteration_ns: Nanoseconds, interval_ns: Sequence[Nanoseconds], causes_ns: Reaches) -> NDArray[np.bool_]:
    """Return which configurations, along the last axis, are the fastest or tie with it: the rule of all commands.

    A configuration ties if the errors that both predictions share may have caused the difference. Where the causes
    are not known, because the spread of training was measured, or nothing varies, it ties if both intervals overlap.
    Times are medians, lower and upper ends of the intervals, and `Distribution.causes_ns`.
    """
    fastest, (low_ns, high_ns) = iteration_ns.argmin(axis=-1)[..., None], interval_ns

    def of_fastest(ns: NDArray[Any]) -> NDArray[Any]:
        return np.take_along_axis(ns, fastest, axis=-1)

    reach = {cause: (np.asarray(below), np.asarray(above)) for cause, (below, above) in causes_ns.items()}
    best = {cause: (of_fastest(below), of_fastest(above)) for cause, (below, above) in reach.items()}
    known = sum((ends.astype(bool) for both in reach.values() for ends in both), np.zeros(iteration_ns.shape, bool))
    overlap = (of_fastest(low_ns) <= high_ns) & (low_ns <= of_fastest(high_ns))
    explained = explained_by_errors(iteration_ns - of_fastest(iteration_ns), best, reach)
    return np.where(known & of_fastest(known), explained, overlap)


def explained_by_errors(difference_ns: Nanoseconds | int, causes_ns: Reaches, other_ns: Reaches) -> NDArray[np.bool_]:
    """Return whether errors that two predictions share may have caused the difference of their medians.

    Arguments and axes as for `reach_of_difference`.
    """
    difference = np.asarray(difference_ns)

    def flat(causes: Reaches) -> dict[str, Any]:
        shape = (2, *difference.shape)
        return {cause: np.broadcast_to(np.asarray(ends), shape).reshape(2, -1) for cause, ends in causes.items()}

    one, other = flat(causes_ns), flat(other_ns)
    none = np.zeros((2, 1))
    moves = (np.abs(one.get(cause, none) - other.get(cause, none)).max(axis=0) for cause in {**one, **other})
    most_ns = np.hypot(_positions(1).max() * sum(moves, np.zeros(difference.size)), _unexplained(one, other))
    flat_ns = difference.ravel()
    explained: NDArray[np.bool_] = flat_ns == 0
    open_cells = np.flatnonzero(~explained & (np.abs(flat_ns) <= most_ns))
    for first in range(0, len(open_cells), at_a_time := max(1, CELLS // DRAWS)):
        cells = open_cells[first : first + at_a_time]
        parts = ({cause: (low[cells], high[cells]) for cause, (low, high) in some.items()} for some in (one, other))
        below, above = reach_of_difference(flat_ns[cells], *parts)
        explained[cells] = (-above <= flat_ns[cells]) & (flat_ns[cells] <= below)
    return explained.reshape(difference.shape)


def reach_of_difference(
    difference_ns: Nanoseconds | int, causes_ns: Reaches, other_ns: Reaches
) -> tuple[Floats, Floats]:
    """Return how far the difference of two medians reaches below and above the predicted one with 90 %.

    A cause moves both medians; what counts is by how much it moves their difference. The causes are independent and
    normally distributed, with `INTERVAL` as the ends of their bands, and a cause moves the difference in proportion,
    with one slope on each side. A cause that does not reverse the difference at an end of its band does not reverse
    it beyond either: on a fast enough network two bucket caps may take equally long, and no cap gains from a still
    faster one. The error that no cost explains is not shared.

    Args:
        difference_ns: The other median minus the first; any axes, which are also those of the result.
        causes_ns: Of the first prediction; a cause that is missing has no reach.
        other_ns: Of the other prediction.
    """
    difference = np.asarray(difference_ns, np.float64)
    sign = np.where(difference < 0, -1, 1)
    moved = _moves(np.abs(difference), causes_ns, other_ns, sign)
    quantiles = np.quantile(moved, INTERVAL, axis=-1, method="nearest")
    low, high = np.where(sign < 0, -quantiles[::-1], quantiles)
    alone_ns = _unexplained(causes_ns, other_ns)
    return np.hypot(np.maximum(0.0, -low), alone_ns), np.hypot(np.maximum(0.0, high), alone_ns)


def _unexplained(causes_ns: Reaches, other_ns: Reaches) -> Floats:
    """Return the error that no cost explains: what causes it may hold for one of two configurations alone."""
    ends = (np.asarray(some.get("unexplained", (0, 0)), np.float64).max(axis=0) for some in (causes_ns, other_ns))
    both: Floats = np.maximum(*ends)
    return both


def _moves(distance: Floats, causes_ns: Reaches, other_ns: Reaches, sign: NDArray[np.int_]) -> Floats:
    """Return draws of the change of the distance between two medians; below zero: they come closer; [..., draws]."""
    causes = sorted({**causes_ns, **other_ns})
    # A term is limited if its largest draw would reverse the difference. Most are not: one product adds them all.
    unlimited_ends, positions, terms = [], [], []
    for cause, position in zip(causes, _positions(len(causes)), strict=True):
        (below, above), (other_below, other_above) = (
            np.asarray(some.get(cause, (0, 0)), np.float64) for some in (causes_ns, other_ns)
        )
        for end, part in ((below - other_below, -position), (other_above - above, position)):
            at_end, positive = sign * end, np.maximum(part, 0)
            keeps_sign = (distance > 0) & (distance + at_end >= -ROUNDING_NS)
            is_limited = keeps_sign & (distance + at_end * positive.max() < 0)
            unlimited_ends.append(np.where(is_limited, 0.0, at_end))
            positions.append(positive)
            terms.append((is_limited, at_end, positive))
    moved = np.zeros((*distance.shape, DRAWS - 1))
    if terms:
        moved += np.stack(unlimited_ends, axis=-1) @ np.array(positions)
    for is_limited, at_end, positive in terms:
        moved[is_limited] += np.maximum(at_end[is_limited, None] * positive, -distance[is_limited, None])
    return moved


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


def no_overlap_ns(engine_input: EngineInput) -> Nanoseconds:
    """Return the duration of one iteration, or of many, without overlap."""
    longest: Nanoseconds = engine_input.duration_ns.sum(axis=-1).max(axis=-1) + engine_input.cost_ns.sum(axis=-1)
    return longest


def _error_bands(
    median: EngineInput, costs: ScheduleCosts, sampler: IterationSampler
) -> dict[str, tuple[EngineInput, EngineInput]]:
    """Return the median iteration with one uncertain cost at the low, and at the high, end of its error band.

    Costs are left out if their band has no width.
    """
    kinds = [step.kind for step in median.schedule.steps]

    def with_collectives(factors: Floats) -> EngineInput:
        return replace(median, cost_ns=_rounded(median.cost_ns.astype(float) * factors))

    def with_steps(of_kinds: Collection[ComputeKind], factor: float | Floats) -> EngineInput:
        factors: Floats = np.where([kind in of_kinds for kind in kinds], factor, 1.0)
        return replace(median, duration_ns=_rounded(median.duration_ns * factors))

    bands = {}
    if (errors := costs.relative_errors).any():
        bands["collectives"] = with_collectives(1 / (1 + errors)), with_collectives(1 + errors)
    least, most = costs.slow_down_bounds
    if least != most:
        bands["slow-downs"] = replace(median, slow_down=least), replace(median, slow_down=most)
    for name, (of_kinds, error) in costs.step_errors.items():
        if error:
            bands[name] = with_steps(of_kinds, 1 / (1 + error)), with_steps(of_kinds, 1 + error)
    for name, ends in sampler.error_bands.items():
        low, high = (with_steps(COMPUTATION, factors[:, None]) for factors in ends)
        bands[name] = low, high
    return bands


def _rounded(ns: Floats) -> Nanoseconds:
    """Round times that cannot overflow: no median takes more than a year, and no error is above 200."""
    whole: Nanoseconds = np.rint(ns).astype(np.int64)
    return whole
