"""Predict: replay a recorded trace under other buckets, orders, networks and world sizes."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

import numpy as np
import pandas as pd

from reference.bucketing import Order
from reference.schema import validated, write_atomically
from reference.trace import Trace

from .answers import perfetto
from .answers.breakdown import break_down, critical_path
from .argument_checks import check_prediction, check_world_size, checked_hook
from .distribution import Engine, error_factors, interval, run, simulate, summarize, whole
from .fabric import Fabric, Processor
from .schedule.comm_hooks import CommHook
from .schedule.costs import EngineInput, ScheduleCosts, contention_of, counted_as_free, price_join_end, price_schedule
from .schedule.policy import Phase, Policy, buckets_of
from .timeline import Span, Timeline
from .workload.compute_times import recorded_compute_times
from .workload.variation import IterationSampler, Straggler, Variation

RECORDED = Variation()


@dataclass(frozen=True)
class Prediction:
    """What an iteration would cost, in nanoseconds.

    With `sync_every` k all of these are of a cycle of k iterations divided by k; only the timeline, and what follows
    from it (spans, breakdown, critical path), is of the whole cycle.

    Attributes:
        iteration_ns: Median over the iterations.
        interval_ns: 90 % of iterations lie within, by how the trace varies and how well the fabric is known.
        mean_ns: Mean over the iterations; times their number, what an epoch takes.
        p95_ns: 95 % of the iterations take no longer.
        p99_ns: 99 % of the iterations take no longer.
        compute_ns: The iteration without any communication ("perfect scaling"), median.
        no_overlap_ns: With every collective after the backward pass, one at a time, copies included; median.
        exposed_comm_ns: How much longer the iteration is than its computation, copies and launches included.
        samples_ns: Every iteration, in order.
        buckets: Parameter indices by bucket, in launch order.
        timeline: The median iteration, or cycle of them: when each rank did what.
        epoch_end_ns: What follows the last iteration under Join: all get the model of one that had inputs to the end.
        counted_as_free: What would take time that neither trace nor fabric tells, a sentence each.
    """

    iteration_ns: int
    interval_ns: tuple[int, int]
    mean_ns: int
    p95_ns: int
    p99_ns: int
    compute_ns: int
    no_overlap_ns: int
    exposed_comm_ns: int
    samples_ns: tuple[int, ...] = field(repr=False)
    buckets: tuple[tuple[int, ...], ...] = field(repr=False)
    timeline: Timeline = field(repr=False, compare=False)
    epoch_end_ns: int = 0
    counted_as_free: tuple[str, ...] = ()

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What every rank did in the median iteration; ranks that do as another are left out."""
        return tuple(self.timeline.spans())

    @cached_property
    def breakdown(self) -> dict[str, int]:
        """Where the median iteration of the slowest rank goes: parts that add up to it; see `answers.breakdown`."""
        return break_down(self.timeline)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that makes the median iteration as long as it is, from its start to its end."""
        return critical_path(self.timeline)

    @property
    def critical_buckets(self) -> tuple[int, ...]:
        """Buckets whose collectives lie on the critical path.

        Where collectives take turns and speeds are constant, only these are worth making faster. With several slots
        another may make room for one of them sooner.
        """
        on_path = {span.bucket for span in self.critical_path if span.stream == "comm" and span.bucket is not None}
        return tuple(sorted(on_path))

    def to_frame(self) -> pd.DataFrame:
        """The spans as a table, one row each, in order of time."""
        frame = pd.DataFrame(self.spans, columns=Span._fields)
        frame = frame.astype({"bucket": "Int64"}).sort_values(["start_ns", "rank", "end_ns"])
        return frame.reset_index(drop=True)

    def to_json(self) -> dict[str, object]:
        """The figures, without the spans."""
        return {
            "iteration_ns": self.iteration_ns,
            "interval_ns": list(self.interval_ns),
            "mean_ns": self.mean_ns,
            "p95_ns": self.p95_ns,
            "p99_ns": self.p99_ns,
            "compute_ns": self.compute_ns,
            "no_overlap_ns": self.no_overlap_ns,
            "exposed_comm_ns": self.exposed_comm_ns,
            "breakdown_ns": self.breakdown,
            "epoch_end_ns": self.epoch_end_ns,
            "counted_as_free": list(self.counted_as_free),
            "critical_buckets": list(self.critical_buckets),
            "buckets": [list(bucket) for bucket in self.buckets],
        }

    def save_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write the median iteration as a Chrome trace, which ui.perfetto.dev opens."""
        write_atomically(path, json.dumps(perfetto.chrome_trace(self.timeline)).encode())


def predict(
    trace: Trace,
    fabric: Fabric,
    *,
    world_size: int,
    bucket_cap_mb: float | None = 25,
    bucket_cap_mb_list: Sequence[float] | None = None,
    first_bucket_mb: float | None = None,
    plan: Sequence[Sequence[int]] | None = None,
    order: Order = "ready",
    order_seed: int = 0,
    broadcast_buffers: bool = True,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    skip_all_reduce_unused_params: bool = False,
    gradient_as_bucket_view: bool = False,
    hook: CommHook | str = "none",
    sparse_density: float = 1.0,
    sync_every: int = 1,
    process_groups: int = 1,
    phase: Phase = "steady",
    variation: Variation = RECORDED,
    stragglers: Sequence[Straggler] = (),
    inputs: Sequence[int] | None = None,
    engine: Engine = "auto",
) -> Prediction:
    """Predict the latency of an iteration. The arguments down to `phase` are those of `Policy`.

    Args:
        trace: What one iteration computes; best recorded without communication, from a plain module. One with
            communication holds copies, launches, broadcasts and slow-downs of its backward pass already, so they
            are not charged again. Where it has fewer ranks than `world_size`, they are repeated in turn.
        fabric: What collectives cost.
        world_size: Number of ranks.
        bucket_cap_mb: As for `DistributedDataParallel`; None: 25, and 1 for the first bucket.
        bucket_cap_mb_list: As for `DistributedDataParallel`.
        first_bucket_mb: MiB of the first bucket alone.
        plan: Parameter indices by bucket in launch order, in place of caps and order.
        order: The order in which parameters are walked into buckets.
        order_seed: Of the order "random".
        broadcast_buffers: Whether buffers are broadcast before the forward pass.
        find_unused_parameters: As for `DistributedDataParallel`.
        static_graph: As for `DistributedDataParallel`.
        skip_all_reduce_unused_params: As for `DistributedDataParallel`.
        gradient_as_bucket_view: As for `DistributedDataParallel`.
        hook: A comm hook, or its name as `named_hook` takes it.
        sparse_density: The part of a sparse gradient's rows that a batch touches, from 0 to 1.
        sync_every: Iterations from one synchronisation to the next; the others are under `no_sync`.
        process_groups: How many take buckets in turn.
        phase: The first iteration, a static graph's second, the one with the rebuild, or any later one.
        variation: How iterations differ from each other.
        stragglers: Slow ranks. (A slow link is the fabric's: `slow_link`.)
        inputs: Batches of each rank, under Join; the iterations are then those of a whole epoch.
        engine: Events, the definition; or the closed form, which gives the same answer sooner where speeds are
            constant; or whichever can.

    Raises:
        ValueError: Arguments that do not fit the trace or the fabric; the message names the argument.
    """
    policy = validated(
        Policy,
        bucket_cap_mb=bucket_cap_mb,
        bucket_cap_mb_list=bucket_cap_mb_list,
        first_bucket_mb=first_bucket_mb,
        plan=plan,
        order=order,
        order_seed=order_seed,
        broadcast_buffers=broadcast_buffers,
        find_unused_parameters=find_unused_parameters,
        static_graph=static_graph,
        skip_all_reduce_unused_params=skip_all_reduce_unused_params,
        gradient_as_bucket_view=gradient_as_bucket_view,
        hook=checked_hook(hook),
        sparse_density=sparse_density,
        sync_every=sync_every,
        process_groups=process_groups,
        phase=phase,
    )
    return predict_policy(
        trace, fabric, world_size, policy, variation=variation, stragglers=stragglers, inputs=inputs, engine=engine
    )


def predict_policy(
    trace: Trace,
    fabric: Fabric,
    world_size: int,
    policy: Policy,
    *,
    variation: Variation = RECORDED,
    stragglers: Sequence[Straggler] = (),
    inputs: Sequence[int] | None = None,
    engine: Engine = "auto",
) -> Prediction:
    """As `predict`, with what the reducer is told in one piece."""
    check_prediction(trace, fabric, policy, variation, stragglers, inputs)
    check_world_size(world_size)
    if engine not in get_args(Engine):
        raise ValueError(f"engine: expected one of {', '.join(get_args(Engine))}, got {engine!r}")
    works = recorded_compute_times(trace, unused_allowed=policy.unused_allowed)
    sampler = IterationSampler(works, world_size, variation, stragglers, inputs, sync_every=policy.sync_every)
    charged = as_charged(fabric, trace)
    costs = price_schedule(trace, charged, policy, buckets_of(policy, trace), world_size, joins=inputs is not None)
    prediction = _summarize(costs, sampler, engine, charged.relative_error(world_size))
    epoch_end = 0 if inputs is None else run(price_join_end(trace, charged, policy, world_size), "auto").iteration_ns
    return replace(prediction, epoch_end_ns=epoch_end, counted_as_free=counted_as_free(policy, fabric))


def as_charged(fabric: Fabric, trace: Trace) -> Fabric:
    """The fabric without what the trace's times hold already, if it was recorded with communication."""
    return fabric if trace.workload.source == "module" else fabric.for_ddp_trace()


def _summarize(costs: ScheduleCosts, sampler: IterationSampler, engine: Engine, relative_error: float) -> Prediction:
    cycle = costs.policy.sync_every
    simulated = simulate(costs, sampler, engine)
    summary = summarize(simulated, cycle)
    place = int(summary.place)
    job = costs.engine_input(sampler.work(place), sampler.ranks.tolist(), sampler.joined(place))
    job = replace(job, represented_by=sampler.represented_by)
    known = [
        (np.array(run(low, "auto").iteration_ns / cycle), np.array(run(high, "auto").iteration_ns / cycle))
        for low, high in _as_far_as_known(job, costs.fabric.processor, relative_error)
    ]
    shortest, longest = interval(summary, *known)
    median, compute = round(float(summary.median)), round(float(summary.compute))
    return Prediction(
        iteration_ns=median,
        interval_ns=(int(shortest), int(longest)),
        mean_ns=round(float(summary.mean)),
        p95_ns=round(float(summary.p95)),
        p99_ns=round(float(summary.p99)),
        compute_ns=compute,
        no_overlap_ns=round(float(summary.no_overlap)),
        exposed_comm_ns=median - compute,
        samples_ns=tuple(whole(simulated[0] / cycle).tolist()),
        buckets=costs.buckets,
        timeline=run(job, engine),
    )


def _as_far_as_known(
    job: EngineInput, processor: Processor, relative_error: float
) -> Iterator[tuple[EngineInput, EngineInput]]:
    """The job with each figure as low as it may be, and as high; none where a figure has no error."""
    cheaper, dearer = error_factors(np.array(relative_error))
    yield replace(job, cost_ns=whole(job.cost_ns * cheaper)), replace(job, cost_ns=whole(job.cost_ns * dearer))
    if processor.slowed(1) != processor:
        faster, slower = (
            replace(
                job,
                slowdowns=contention_of(job.schedule.collectives, slowed, job.most_running),
                lingers_ns=slowed.lingers_ns,
            )
            for slowed in (processor.slowed(-1), processor.slowed(1))
        )
        yield faster, slower
