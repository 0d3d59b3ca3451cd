"""Closed form: the replay's answer by recurrence, where speeds are constant and nothing needs events."""

import heapq
from dataclasses import dataclass

from ..fabric import Fabric
from .replay import Job


@dataclass(frozen=True, slots=True)
class Outcome:
    """When each bucket's all-reduce started and was done, and each rank's iteration ended; by index."""

    start_ns: tuple[int, ...]
    done_ns: tuple[int, ...]
    end_ns: tuple[int, ...]

    @property
    def iteration_ns(self) -> int:
        """The slowest rank's end."""
        return max(self.end_ns)


def solve(job: Job, fabric: Fabric) -> Outcome:
    """Compute one iteration: `start = max(last launch, a slot is free)`, `done = start + cost`.

    Raises:
        ValueError: The fabric slows things down depending on what else runs; only the replay can do that.
    """
    processor = fabric.processor
    if fabric.sharing or processor.compute_slowdown > 1 or processor.collective_slowdown > 1:
        raise ValueError("closed form: expected constant speeds, but the fabric has slow-downs; use replay")
    slots = [0] * fabric.concurrency  # when each is free again
    start_ns, done_ns = [], []
    for bucket, cost in enumerate(job.costs_ns):
        launched = max(schedule.at_ns[bucket] + schedule.launch_ns for schedule in job.schedules)
        start_ns.append(max(job.broadcast_ns + launched, slots[0]))
        done_ns.append(start_ns[-1] + cost)
        heapq.heapreplace(slots, done_ns[-1])
    ends = tuple(_finish(job, rank, done_ns) for rank in range(len(job.works)))
    return Outcome(tuple(start_ns), tuple(done_ns), ends)


def _finish(job: Job, rank: int, done_ns: list[int]) -> int:
    """Wait for each bucket and copy it out, in bucket order, then step."""
    now = job.broadcast_ns + job.schedules[rank].backward_end_ns
    for done, copy_out in zip(done_ns, job.copy_out_ns, strict=True):
        now = max(now, done) + copy_out
    return now + job.works[rank].step_ns
