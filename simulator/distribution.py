"""Distribution of the iteration time: simulate many iterations, then take median, quantiles and a 90 % interval."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .engines.closed_form import solve, solve_many
from .engines.events import latency_ns, replay
from .schedule.costs import EngineInput, Nanoseconds, ScheduleCosts
from .schedule.schedule import ComputeKind
from .timeline import Timeline
from .workload.compute_times import stack
from .workload.variation import IterationSampler

Engine = Literal["auto", "events", "closed_form"]
Floats = NDArray[np.float64]

INTERVAL = (0.05, 0.95)
"""Quantiles over the iterations that bound the interval; of fewer than 20, the extremes."""

CELLS = 4_000_000
"""Durations that are simulated at a time: 32 MB."""

COMPUTATION: tuple[ComputeKind, ...] = ("unsynchronized", "forward", "backward", "step")
"""What would be computed without data parallelism."""


def run(job: EngineInput, engine: Engine) -> Timeline:
    """Simulate one iteration by the engine that is asked for, or that can."""
    return solve(job) if _takes_closed_form(job, engine) else replay(job)


def _takes_closed_form(job: EngineInput, engine: Engine) -> bool:
    return engine == "closed_form" or (engine == "auto" and not job.is_fluid)


def simulate(costs: ScheduleCosts, sampler: IterationSampler, engine: Engine = "auto") -> Nanoseconds:
    """Nanoseconds of each iteration: its latency, its computation, everything without overlap.

    Returns:
        Shape [3, ..., iterations]; the middle axes are those of `costs.cost_ns`, for the closed form.
    """
    return np.concatenate(
        [_simulate_some(costs, sampler, engine, numbers) for numbers in _batches(costs, sampler)], axis=-1
    )


def _batches(costs: ScheduleCosts, sampler: IterationSampler) -> list[range]:
    """Numbers of iterations, as many at a time as memory allows."""
    jobs = max(1, costs.cost_ns.size // max(1, costs.cost_ns.shape[-1]))
    size = max(1, CELLS // (len(sampler.ranks) * max(jobs, len(costs.schedule.instructions), sampler.parameters)))
    return [range(first, min(first + size, sampler.count)) for first in range(0, sampler.count, size)]


def _simulate_some(costs: ScheduleCosts, sampler: IterationSampler, engine: Engine, numbers: range) -> Nanoseconds:
    work = stack([sampler.work(number) for number in numbers])
    joined = np.array([sampler.joined(number) for number in numbers])
    jobs = costs.engine_input(work, sampler.ranks.tolist(), joined)
    jobs = replace(jobs, cost_ns=jobs.cost_ns[..., None, :])
    is_compute = [step.kind in COMPUTATION for step in jobs.schedule.steps]
    compute = jobs.duration_ns[..., is_compute].sum(axis=-1).max(axis=-1)
    no_overlap = jobs.duration_ns.sum(axis=-1).max(axis=-1) + jobs.cost_ns.sum(axis=-1)
    if _takes_closed_form(jobs, engine):
        latency = solve_many(jobs)
    else:
        each = (replace(jobs, duration_ns=one, cost_ns=costs.cost_ns) for one in jobs.duration_ns)
        latency = np.array([latency_ns(job) for job in each])
    return np.stack(np.broadcast_arrays(latency, compute, no_overlap))


@dataclass(frozen=True, slots=True)
class Summary:
    """What many iterations amount to; nanoseconds, of the axes before that of iterations.

    Attributes:
        place: Which iteration is the median.
        median: That iteration's latency.
        low: 5 % of iterations take less, at most.
        high: 95 % of iterations take no longer.
        mean: Of all.
        p95: As `high`, but interpolated.
        p99: 99 % take no longer, interpolated.
        compute: Median of computation alone.
        no_overlap: Median without overlap.
    """

    place: NDArray[np.intp]
    median: Floats
    low: Floats
    high: Floats
    mean: Floats
    p95: Floats
    p99: Floats
    compute: Floats
    no_overlap: Floats


def summarize(simulated: Nanoseconds, iterations_each: int) -> Summary:
    """Sum up what `simulate` returned, a cycle of `iterations_each` counting as that many."""
    latency, compute, no_overlap = simulated / iterations_each
    middle = latency.shape[-1] // 2  # of an even number the higher one: a median is an iteration
    place = latency.argsort(axis=-1, kind="stable")[..., middle]
    low, high = np.quantile(latency, INTERVAL, axis=-1, method="nearest")
    p95, p99 = np.quantile(latency, [0.95, 0.99], axis=-1)
    return Summary(
        place=place,
        median=np.take_along_axis(latency, place[..., None], axis=-1)[..., 0],
        low=low,
        high=high,
        mean=latency.mean(axis=-1),
        p95=p95,
        p99=p99,
        compute=np.sort(compute, axis=-1)[..., middle],
        no_overlap=np.sort(no_overlap, axis=-1)[..., middle],
    )


def interval(summary: Summary, *errors: tuple[Floats, Floats]) -> tuple[Nanoseconds, Nanoseconds]:
    """The band that holds nine iterations in ten, by how they vary and by how well figures are known.

    All of these are independent, so their distances from the median add up as squares.

    Args:
        summary: How iterations vary.
        errors: For each figure the median iteration with that as low as it may be, and as high.
    """
    lows, highs = zip((summary.low, summary.high), *errors, strict=True)
    below = np.sqrt(sum(np.maximum(0, summary.median - low) ** 2 for low in lows))
    above = np.sqrt(sum(np.maximum(0, high - summary.median) ** 2 for high in highs))
    return whole(np.maximum(0, summary.median - below)), whole(summary.median + above)


def error_factors(relative_error: Floats) -> tuple[Floats, Floats]:
    """What collectives may cost, as factors on what they are said to cost, with an axis for them."""
    error = relative_error[..., None]
    return np.maximum(0.0, 1 - error), 1 + error


def whole(ns: NDArray[np.floating[Any]]) -> Nanoseconds:
    """Nanoseconds, rounded."""
    rounded: Nanoseconds = np.rint(ns).astype(np.int64)
    return rounded
