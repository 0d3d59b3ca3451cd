"""Distribution of the iteration time: median, quantiles and 90 % interval of many simulated iterations."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache
from math import hypot, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np

from ..reference.files.value_ranges import as_int64
from .engines.closed_form import Engine, latencies_ns
from .engines.engine_input import EngineInput
from .schedule.schedule import ComputeKind
from .step_costs import ScheduleCosts
from .workload.compute_times import Floats, IterationSampler, Nanoseconds

INTERVAL = (0.05, 0.95)
"""Quantiles of the iterations at the ends of the interval; of up to 11 iterations, fastest and slowest."""

TAIL = {"p95_ns": 0.95, "p99_ns": 0.99}
"""Quantiles of the tail. Of fewer than 1 / (1 - q) iterations of different lengths, quantile q is not known."""

CELLS = 4_000_000
"""Durations simulated at a time, to limit memory: 32 MB of int64."""

DRAWS, LATTICE = 2039, 802
"""A prime number of draws, and the generator of a lattice of them (Korobov). Of those tried, its errors were smallest
for weighted sums of up to 8 normal variables at the ends of `INTERVAL`: 0.7 % on average, and up to 5 %."""
ROUNDING_NS = 1.0

COMPUTATION: tuple[ComputeKind, ...] = ("unsynchronized", "forward", "backward", "step")
"""Computing steps of training without data parallelism."""


def simulate_many(
    costs: ScheduleCosts, sampler: IterationSampler, engine: Engine = "auto"
) -> tuple[dict[str, Any], EngineInput]:
    """Simulate all iterations of a sampler; return their statistics, see `summarize`, and the median iteration.

    The median iteration is simulated again with every uncertain cost at the low and at the high end of its error
    band. The variation of the iterations and the errors of the costs are independent, so their distances from the
    median are added in quadrature. A measured spread of iterations takes the place of both.

    Args:
        costs: The schedule and its costs.
        sampler: Generates the compute times of each iteration.
        engine: The engine for the iterations. The ends of the error bands are always simulated with "auto".
    """
    distinct, place_of_cycle = sampler.distinct()
    width = max(len(costs.untimed.schedule.instructions), sampler.parameters)
    at_a_time = max(1, CELLS // (len(sampler.ranks) * width))
    batches = []
    for first in range(0, len(distinct), at_a_time):
        drawn = sampler.draw(distinct[first : first + at_a_time].tolist())
        batch = costs.engine_input(sampler, drawn)
        batches.append(np.stack([latencies_ns(batch, engine), sampler.alone_ns(drawn), no_overlap_ns(batch)]))
    times_ns = np.concatenate(batches, axis=-1)[:, place_of_cycle] / sampler.sync_every

    # Drawn again, because keeping what all batches drew would take memory without a limit.
    place = place_of_median(times_ns[0])
    median, median_ns = costs.engine_input(sampler, sampler.draw([place]), 0), times_ns[0, place]
    bands = _error_bands(median, costs, sampler)
    ends = EngineInput.stack([median, *(end for both in bands.values() for end in both)])
    ends_ns = latencies_ns(ends)[1:].reshape(-1, 2) / sampler.sync_every
    causes = {
        cause: (median_ns - low_ns, high_ns - median_ns)
        for cause, (low_ns, high_ns) in zip(bands, ends_ns, strict=True)
    }
    if costs.unexplained:
        causes["unexplained"] = median_ns - median_ns / (1 + costs.unexplained), median_ns * costs.unexplained
    return summarize(times_ns, causes=causes, spread=costs.spread), median


def place_of_median(latency_ns: Floats) -> int:
    """Return the index of the median: the upper median, so that it is one of the iterations."""
    return int(latency_ns.argsort(kind="stable")[len(latency_ns) // 2])


def summarize(
    times_ns: Floats, *, causes: Mapping[str, tuple[float, float]] | None = None, spread: float = 0.0
) -> dict[str, Any]:
    """Return the fields of a `Prediction` that are statistics of its iterations.

    Args:
        times_ns: Duration, computation alone and duration without overlap of each iteration; shape [3, cycles].
        causes: Distances from the median to both ends of the interval that each uncertain cost alone would give.
        spread: Half-width of the interval as a fraction of the median, where it was measured; see `ScheduleCosts`.
    """
    latency, compute, no_overlap = np.sort(times_ns)
    median_ns = latency[len(latency) // 2]
    low, high = np.quantile(latency, INTERVAL, method="nearest")
    distances = {"iterations": (median_ns - low, high - median_ns), **(causes or {})}
    reach = np.maximum(0, list(distances.values()))
    below, above = (spread * median_ns,) * 2 if spread else np.sqrt((reach**2).sum(axis=0))
    figures = {
        "iteration_ns": median_ns,
        "mean_ns": times_ns[0].mean(),
        "compute_ns": compute[len(compute) // 2],
        "no_overlap_ns": no_overlap[len(no_overlap) // 2],
    }
    return {
        **{name: int(as_int64(ns)) for name, ns in figures.items()},
        **{name: _tail_quantile(latency, level) for name, level in TAIL.items()},
        "interval_ns": tuple(as_int64([max(0, median_ns - below), median_ns + above]).tolist()),
        "samples_ns": tuple(as_int64(times_ns[0]).tolist()),
        "causes_ns": {} if spread else dict(zip(distances, map(tuple, as_int64(reach).tolist()), strict=True)),
    }


def _tail_quantile(latency_ns: Floats, level: float) -> int | None:
    """Return a quantile of sorted durations; None where too few iterations differ; see `TAIL`."""
    different = 1 + np.count_nonzero(np.diff(latency_ns))
    return int(as_int64(np.quantile(latency_ns, level))) if different * (1 - level) >= 1 - 1e-9 else None


Reaches = Mapping[str, tuple[int, int]]
"""Reach of each cause below and above a median, as in `Prediction.causes_ns`."""


def efficiency_interval(
    iteration_ns: int, compute_ns: int, causes_ns: Reaches, compute_errors: Mapping[str, tuple[float, float]]
) -> tuple[float, float]:
    """Return both ends of the 90 % interval of the efficiency, computation over iteration.

    Longer computation lengthens the iteration too, so both change together. The causes are independent, so their
    effects are added in quadrature.

    Args:
        iteration_ns: Median iteration.
        compute_ns: Computation alone.
        causes_ns: Reach of each cause below and above the iteration.
        compute_errors: Relative error of computation, below and above, of the causes that change it.
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

    Args:
        difference_ns: The other median minus the first.
        causes_ns: Of the first prediction; a cause that is missing has no reach.
        other_ns: Of the other prediction.
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
        return replace(median, cost_ns=as_int64(median.cost_ns * factors))

    def with_steps(of_kinds: Collection[ComputeKind], factor: float | Floats) -> EngineInput:
        factors: Floats = np.where([kind in of_kinds for kind in kinds], factor, 1.0)
        return replace(median, duration_ns=as_int64(median.duration_ns * factors))

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
