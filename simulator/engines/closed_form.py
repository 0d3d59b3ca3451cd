"""Closed form: the replay's answer by recurrence, where speeds are constant and nothing needs events.

All ranks go through the schedule together, so each instruction is one operation on arrays: over ranks, and over as
many iterations as there are axes before that.
"""

import numpy as np

from ..schedule.costs import EngineInput, Nanoseconds
from ..schedule.schedule import Compute, Launch
from ..timeline import Timeline


def solve(job: EngineInput) -> Timeline:
    """Simulate one iteration: a collective starts at `max(last launch, a slot is free)`, and takes what it costs.

    Raises:
        ValueError: Speeds depend on what else runs; only the replay can do that.
    """
    end_ns = np.empty((len(job.ranks), len(job.schedule.instructions)), np.int64)
    start_ns, done_ns, _last = _recur(job, end_ns)
    return Timeline(job, end_ns, start_ns, done_ns)


def solve_many(jobs: EngineInput) -> Nanoseconds:
    """Latencies of many iterations at once: the shape of whatever axes come before those of ranks and collectives.

    Raises:
        ValueError: As for `solve`.
    """
    _start, _done, last = _recur(jobs)
    latest: Nanoseconds = last.max(axis=-1)
    return latest


def _recur(job: EngineInput, end_ns: Nanoseconds | None = None) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
    """When each collective began and when it was done, and when each rank was done with everything.

    When it was done with each instruction goes into `end_ns`, shape [..., ranks, instructions], if that is given.
    """
    if job.is_fluid:
        raise ValueError("closed form: expected constant speeds, but the fabric has slow-downs; use the replay")
    schedule, duration_ns, cost_ns = job.schedule, job.duration_ns, job.cost_ns
    jobs = np.broadcast_shapes(duration_ns.shape[:-2], cost_ns.shape[:-1])
    now = np.zeros((*jobs, duration_ns.shape[-2]), np.int64)
    start, done = (np.empty((*jobs, len(schedule.collectives)), np.int64) for _ in range(2))
    free = np.zeros((*jobs, max(job.queues, default=0) + 1, job.concurrency), np.int64)
    step = 0
    for place, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Compute):
            now = now + duration_ns[..., step]
            step += 1
        elif isinstance(instruction, Launch):
            number = instruction.collective
            slots = free[..., job.queues[number], :]  # when each is free again
            start[..., number] = np.maximum(now.max(axis=-1), slots.min(axis=-1))
            done[..., number] = start[..., number] + cost_ns[..., number]
            np.put_along_axis(slots, slots.argmin(axis=-1)[..., None], done[..., number, None], axis=-1)
        else:
            now = np.maximum(now, done[..., instruction.collective, None])
        if end_ns is not None:
            end_ns[..., place] = now
    return start, done, now
