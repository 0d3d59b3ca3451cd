"""Replay: one iteration by discrete events. This is the definition of what the simulator means.

Each rank is a process: forward, backward with launches in bucket order, then for every bucket wait and copy
out, then the step. Each bucket's collective is a process too: it queues for one of the backend's slots on
every rank, starts when its last rank has launched it, and tells all ranks when it is done.

Speed is fluid: computation and collectives progress at rates that change whenever something starts or stops.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy

from ..fabric import Fabric
from ..spans import Kind, Span, Stream
from ..workload.rank_work import LaunchSchedule, RankWork, launch_schedule
from .work_clock import WorkClock

Process = Generator[simpy.Event, Any, None]


@dataclass(frozen=True, slots=True)
class Job:
    """One iteration to simulate: everything both engines need, in plain numbers.

    Attributes:
        works: Computation by rank.
        schedules: Launches by rank.
        sizes_bytes: Size of each bucket, in launch order.
        costs_ns: All-reduce of each bucket when it has the fabric to itself.
        copy_out_ns: Copying each bucket back.
        broadcast_ns: Buffers, before the forward pass; 0: none.
    """

    works: tuple[RankWork, ...]
    schedules: tuple[LaunchSchedule, ...]
    sizes_bytes: tuple[int, ...]
    costs_ns: tuple[int, ...]
    copy_out_ns: tuple[int, ...]
    broadcast_ns: int


def make_job(
    works: Sequence[RankWork],
    buckets: Sequence[Sequence[int]],
    sizes_bytes: Sequence[int],
    fabric: Fabric,
    *,
    buffer_bytes: Sequence[int] = (),
) -> Job:
    """Price an iteration: parameters to buckets, buckets to nanoseconds.

    Args:
        works: Computation by rank; their number is the world size.
        buckets: Parameter indices by bucket, in launch order.
        sizes_bytes: Size of each parameter, by parameter index.
        fabric: What it all costs.
        buffer_bytes: Bytes of buffers by dtype: one broadcast each.
    """
    world_size = len(works)
    bucket_bytes = tuple(sum(sizes_bytes[index] for index in bucket) for bucket in buckets)
    return Job(
        works=tuple(works),
        schedules=tuple(launch_schedule(work, buckets, sizes_bytes, fabric.processor) for work in works),
        sizes_bytes=bucket_bytes,
        costs_ns=tuple(fabric.all_reduce_ns(size, world_size) for size in bucket_bytes),
        copy_out_ns=tuple(
            sum(fabric.processor.copy_out(sizes_bytes[index]) for index in bucket) for bucket in buckets
        ),
        broadcast_ns=sum(fabric.broadcast_ns(size, world_size) for size in buffer_bytes) if world_size > 1 else 0,
    )


def replay(job: Job, fabric: Fabric) -> tuple[Span, ...]:
    """Simulate one iteration; returns what every rank did, in no particular order."""
    return _Replay(job, fabric).run()


class _Replay:
    """State of one simulation: who computes, what runs, what has happened."""

    def __init__(self, job: Job, fabric: Fabric) -> None:
        self.job = job
        self.fabric = fabric
        self.env = simpy.Environment()
        self.spans: list[Span] = []
        self.slots = simpy.Resource(self.env, fabric.concurrency)
        self.launched_ns = [[0] * len(job.works) for _ in job.costs_ns]
        self.missing = [len(job.works)] * len(job.costs_ns)
        self.done = [self.env.event() for _ in job.costs_ns]
        self.computing = 0
        self.computation = WorkClock(self.env)
        self.running: dict[int, WorkClock] = {}
        processor = fabric.processor
        self.is_fluid = processor.compute_slowdown > 1 or processor.collective_slowdown > 1 or bool(fabric.sharing)

    def run(self) -> tuple[Span, ...]:
        for rank in range(len(self.job.works)):
            self.env.process(self._rank(rank))
        self.env.run()
        return tuple(self.spans)

    # A rank

    def _rank(self, rank: int) -> Process:
        work, schedule = self.job.works[rank], self.job.schedules[rank]
        if self.job.broadcast_ns:
            start = self._now
            yield self.env.timeout(self.job.broadcast_ns)
            self._note(rank, "broadcast", None, start)
        yield from self._compute(rank, "forward", None, work.forward_ns)
        computed = work.forward_ns
        for bucket, at_ns in enumerate(schedule.at_ns):
            yield from self._compute(rank, "backward", bucket, at_ns - computed)
            yield from self._compute(rank, "launch", bucket, schedule.launch_ns)
            computed = at_ns + schedule.launch_ns
            self._launched(rank, bucket)
        yield from self._compute(rank, "backward", None, schedule.backward_end_ns - computed)
        for bucket, done in enumerate(self.done):
            if not done.triggered:
                start = self._now
                yield done
                self._note(rank, "wait", bucket, start)
            yield from self._compute(rank, "copy_out", bucket, self.job.copy_out_ns[bucket])
        yield from self._compute(rank, "step", None, work.step_ns)

    def _compute(self, rank: int, kind: Kind, bucket: int | None, work_ns: int) -> Process:
        if not work_ns:
            return
        start = self._now
        if self.is_fluid:
            self._computes(1)
            yield self.computation.after(work_ns)
            self._computes(-1)
        else:
            yield self.env.timeout(work_ns)
        self._note(rank, kind, bucket, start)

    # A collective

    def _launched(self, rank: int, bucket: int) -> None:
        self.launched_ns[bucket][rank] = self._now
        self.missing[bucket] -= 1
        if not self.missing[bucket]:
            self.env.process(self._collective(bucket))

    def _collective(self, bucket: int) -> Process:
        with self.slots.request() as slot:
            yield slot
            start = self._now
            clock = self.running[bucket] = WorkClock(self.env)
            self._adjust_speeds()
            yield clock.after(self.job.costs_ns[bucket])
            del self.running[bucket]
            self._adjust_speeds()
        for rank, launched_ns in enumerate(self.launched_ns[bucket]):
            self._note(rank, "queued", bucket, launched_ns, start)
            self._note(rank, "all_reduce", bucket, start)
        self.done[bucket].succeed()

    # Speed

    def _computes(self, change: int) -> None:
        """A rank begins to compute, or stops."""
        before = self.computing
        self.computing += change
        if not before or not self.computing:
            self._adjust_speeds()

    def _adjust_speeds(self) -> None:
        """Something has started or stopped: whatever is under way goes on at the speed that holds from here."""
        if not self.is_fluid:
            return
        processor = self.fabric.processor
        self.computation.slow_down(processor.compute_slowdown if self.running else 1.0)
        beside_computation = processor.collective_slowdown if self.computing else 1.0
        for bucket, clock in self.running.items():
            sharing = self.fabric.sharing_factor(self.job.sizes_bytes[bucket], len(self.running))
            clock.slow_down(sharing * beside_computation)

    @property
    def _now(self) -> int:
        return int(self.env.now)

    def _note(self, rank: int, kind: Kind, bucket: int | None, start_ns: int, end_ns: int | None = None) -> None:
        end_ns = self._now if end_ns is None else end_ns
        if end_ns > start_ns:
            stream: Stream = "comm" if kind in ("broadcast", "queued", "all_reduce") else "compute"
            self.spans.append(Span(rank, stream, kind, bucket, start_ns, end_ns))
