"""Replay: one iteration by discrete events. This is the definition of what the simulator means.

Each rank is a process that follows the script. Each collective is one too: it queues for a slot of its process group
when its last rank has launched it, runs, and tells all ranks when it is done.

Speed is fluid: computation and collectives progress at rates that change whenever something starts or stops.
"""

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import simpy

from ..iteration.job import Job
from ..iteration.script import Compute, Launch, Script, Wait
from ..timeline import Timeline
from .work_clock import WorkClock

Process = Generator[simpy.Event, Any, None]


def replay(job: Job) -> Timeline:
    """Simulate one iteration."""
    with _no_garbage_collection():
        return _Replay(job).run()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Many ranks make many events, none of them garbage: looking for some would take half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _stretches(script: Script) -> list[tuple[slice, Launch | Wait | None]]:
    """The script as stretches of computing steps, and what comes after each; nothing after the last."""
    stretches: list[tuple[slice, Launch | Wait | None]] = []
    first = last = 0
    for instruction in script.instructions:
        if isinstance(instruction, Compute):
            last += 1
        else:
            stretches.append((slice(first, last), instruction))
            first = last
    return [*stretches, (slice(first, last), None)]


class _Replay:
    """State of one simulation: who computes, what runs, what has happened."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.env = simpy.Environment()
        collectives = len(job.script.collectives)
        self.slots = {queue: simpy.Resource(self.env, job.concurrency) for queue in set(job.queues)}
        self.missing = [len(job.ranks)] * collectives
        self.done = [self.env.event() for _ in range(collectives)]
        self.start_ns, self.done_ns = np.zeros((2, collectives), np.int64)
        self.end_ns = np.zeros((len(job.ranks), len(job.script.instructions)), np.int64)
        self.is_fluid = job.is_fluid
        self.stretches = _stretches(job.script)
        self.computing = 0
        self.computation = WorkClock(self.env)
        self.running: dict[int, WorkClock] = {}

    def run(self) -> Timeline:
        for row in range(len(self.job.ranks)):
            self.env.process(self._rank(row))
        self.env.run()
        return Timeline(self.job, self.end_ns, self.start_ns, self.done_ns)

    def _rank(self, row: int) -> Process:
        """Follow the script, with one event for all computing up to the next launch or wait."""
        work_ns = self.job.work_ns[row].tolist()
        ends: list[int] = []
        is_computing = False
        for steps, instruction in self.stretches:
            start, steps_ns = int(self.env.now), work_ns[steps]
            if not any(steps_ns):
                ends.extend([start] * len(steps_ns))
            elif self.is_fluid:
                if not is_computing:
                    is_computing = self._computes(1)
                shown_ns = self.computation.read()
                yield self.computation.after(sum(steps_ns))
                ends.extend(self.computation.moments(shown_ns, steps_ns))
            else:
                yield self.env.timeout(sum(steps_ns))
                ends.extend(start + done for done in accumulate(steps_ns))
            if isinstance(instruction, Launch):
                self._launched(instruction.collective)
            elif instruction is None or not self.done[instruction.collective].triggered:
                if is_computing:
                    is_computing = self._computes(-1)
                if instruction is not None:
                    yield self.done[instruction.collective]
            if instruction is not None:
                ends.append(int(self.env.now))
        self.end_ns[row] = ends

    def _launched(self, number: int) -> None:
        self.missing[number] -= 1
        if not self.missing[number]:
            self.env.process(self._collective(number))

    def _collective(self, number: int) -> Process:
        with self.slots[self.job.queues[number]].request() as slot:
            yield slot
            self.start_ns[number] = self._now
            clock = self.running[number] = WorkClock(self.env)
            self._adjust_speeds()
            yield clock.after(int(self.job.cost_ns[number]))
            del self.running[number]
            self._adjust_speeds()
        self.done_ns[number] = self._now
        self.done[number].succeed()

    def _computes(self, change: int) -> bool:
        """A rank begins to compute, or stops; returns which."""
        before = self.computing
        self.computing += change
        if not before or not self.computing:
            self._adjust_speeds()
        return change > 0

    def _adjust_speeds(self) -> None:
        """Something has started or stopped: whatever is under way goes on at the speed that holds from here."""
        if not self.is_fluid:
            return
        self.computation.slow_down(self.job.compute_slowdown if self.running else 1.0)
        beside_computation = self.job.collective_slowdown if self.computing else 1.0
        for number, clock in self.running.items():
            sharing = 1.0 + (self.job.sharing[number] - 1.0) * (len(self.running) - 1)
            clock.slow_down(max(1.0, sharing) * beside_computation)

    @property
    def _now(self) -> int:
        return int(self.env.now)
