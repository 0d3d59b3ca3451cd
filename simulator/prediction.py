"""Predict: replay a recorded trace under other buckets, orders, networks and world sizes."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import pandas as pd

from reference.bucketing import Buckets, Order, bucket_caps, check_partition, plan_buckets
from reference.files import write_whole
from reference.trace import Trace

from .answers import perfetto
from .engines.replay import Job, make_job, replay
from .fabric import Fabric
from .spans import Span, iteration_ns
from .workload.rank_work import rank_work, ready_order

INTERVAL = (0.05, 0.95)
"""Quantiles over the recorded iterations that bound the interval; of fewer than 20, the extremes."""


@dataclass(frozen=True)
class Prediction:
    """What an iteration would cost, in nanoseconds.

    Attributes:
        iteration_ns: Median over the trace's iterations, each replayed.
        interval_ns: From the 5 % to the 95 % quantile over those; what the trace's own variation explains.
        compute_ns: The iteration without any communication ("perfect scaling"), median.
        no_overlap_ns: With every all-reduce after the backward pass, one at a time, copies included; median.
        exposed_comm_ns: How much longer the iteration is than its computation, copies and launches included.
        buckets: Parameter indices by bucket, in launch order.
        spans: What every rank did in the median iteration.
    """

    iteration_ns: int
    interval_ns: tuple[int, int]
    compute_ns: int
    no_overlap_ns: int
    exposed_comm_ns: int
    buckets: tuple[tuple[int, ...], ...]
    spans: tuple[Span, ...]

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
            "compute_ns": self.compute_ns,
            "no_overlap_ns": self.no_overlap_ns,
            "exposed_comm_ns": self.exposed_comm_ns,
            "buckets": [list(bucket) for bucket in self.buckets],
        }

    def save_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write the median iteration as a Chrome trace, which ui.perfetto.dev opens."""
        write_whole(path, json.dumps(perfetto.chrome_trace(self.spans)).encode())


def predict(
    trace: Trace,
    fabric: Fabric,
    *,
    world_size: int,
    bucket_cap_mb: float | None = 25,
    bucket_cap_mb_list: Sequence[float] | None = None,
    plan: Sequence[Sequence[int]] | None = None,
    order: Order = "ready",
    broadcast_buffers: bool = True,
) -> Prediction:
    """Predict the latency of a synchronised iteration, after the rebuild.

    Args:
        trace: What one iteration computes; best recorded without communication, from a plain module. One with
            communication holds copies, launches, broadcasts and slow-downs of its backward pass already, so they
            are not charged again. Where it has fewer ranks than `world_size`, they are repeated in turn.
        fabric: What collectives cost.
        world_size: Number of ranks.
        bucket_cap_mb: As for `DistributedDataParallel`; None: 25, and 1 for the first bucket.
        bucket_cap_mb_list: As for `DistributedDataParallel`.
        plan: Parameter indices by bucket in launch order, in place of caps and order.
        order: The order in which parameters are walked into buckets.
        broadcast_buffers: Whether buffers are broadcast before the forward pass.

    Raises:
        ValueError: Arguments that do not fit the trace or the fabric; the message names the argument.
    """
    if world_size < 1:
        raise ValueError(f"world_size: expected at least 1, got {world_size}")
    if plan is not None:
        check_partition(plan, len(trace.workload.parameters))
        buckets = [list(bucket) for bucket in plan]
    else:
        buckets = trace_buckets(trace, bucket_caps(bucket_cap_mb, bucket_cap_mb_list), order)
    plain = trace.workload.source == "module"
    buffer_bytes = _buffer_bytes(trace) if broadcast_buffers and plain else []
    fabric = fabric if plain else fabric.without_what_a_ddp_trace_holds()
    jobs = [
        make_job(
            [rank_work(trace, rank % len(trace.ranks), number) for rank in range(world_size)],
            buckets,
            trace.sizes_bytes,
            fabric,
            buffer_bytes=buffer_bytes,
        )
        for number in range(min(len(rank.iterations) for rank in trace.ranks))
    ]
    return _summarize(jobs, [replay(job, fabric) for job in jobs], buckets)


def trace_buckets(trace: Trace, caps_bytes: Sequence[int], order: Order) -> Buckets:
    """The buckets that the reducer would use for the trace's model, in launch order."""
    return plan_buckets(
        order,
        trace.sizes_bytes,
        caps_bytes,
        ready_order=ready_order(trace),
        keys=trace.keys,
        sparse=trace.sparse,
    )


def _buffer_bytes(trace: Trace) -> list[int]:
    by_dtype: dict[str, int] = {}
    for buffer in trace.workload.buffers:
        by_dtype[buffer.dtype] = by_dtype.get(buffer.dtype, 0) + buffer.size_bytes
    return list(by_dtype.values())


def _summarize(jobs: list[Job], replays: list[tuple[Span, ...]], buckets: Buckets) -> Prediction:
    times = [iteration_ns(spans) for spans in replays]
    ordered = sorted(times)
    middle = ordered[len(ordered) // 2]
    compute = round(median(max(work.compute_ns for work in job.works) for job in jobs))
    low, high = (ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in INTERVAL)
    return Prediction(
        iteration_ns=middle,
        interval_ns=(low, high),
        compute_ns=compute,
        no_overlap_ns=round(median(map(_no_overlap_ns, jobs))),
        exposed_comm_ns=middle - compute,
        buckets=tuple(tuple(bucket) for bucket in buckets),
        spans=replays[times.index(middle)],
    )


def _no_overlap_ns(job: Job) -> int:
    """The same work with nothing at the same time: backward pass, then each all-reduce, then each copy."""
    computed = max(
        schedule.backward_end_ns + work.step_ns for work, schedule in zip(job.works, job.schedules, strict=True)
    )
    return job.broadcast_ns + computed + sum(job.costs_ns) + sum(job.copy_out_ns)
