"""Replay: one iteration by discrete events. This is the definition of what the simulator means.

Each rank is a process that follows the script. Each collective is one too: it queues for a slot of its process group
when its last rank has launched it, runs, and tells all ranks when it is done.

Speed is fluid: computation and collectives progress at rates that change whenever something starts or stops.
"""

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import simpy

from ..iteration.job import Job
from ..iteration.script import Launch, Wait
from ..timeline import Timeline
from .stretches import stretches_of
from .work_clock import WorkClock

Process = Generator[simpy.Event, Any, None]


def replay(job: Job) -> Timeline:
    """Simulate one iteration."""
    return _simulated(job).timeline()


def latency_ns(job: Job) -> int:
    """Nanoseconds of one iteration: `replay(job).iteration_ns`, without working out what else the timeline tells."""
    return _simulated(job).latency_ns


def _simulated(job: Job) -> "_Replay":
    simulation = _Replay(job)
    with _no_garbage_collection():
        simulation.run()
    return simulation


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


class _Replay:
    """State of one simulation: who computes, what runs, what has happened.

    An event wakes a rank only where it has to wait. How much work lies before that is known, so it tells beforehand
    when it will launch collectives, and when each step ended is worked out afterwards.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.env = simpy.Environment()
        self.stretches = stretches_of(job.script)
        self.computed_ns = self.stretches.computed_by_stop(job.work_ns)
        self.waited_ns = np.zeros((len(job.ranks), self.stretches.waits), np.int64)
        self.latency_ns = 0
        self.computing = 0
        self.computation = WorkClock(self.env)
        self.lingers_until_ns = 0

        collectives = len(job.script.collectives)
        self.slots = {queue: simpy.Resource(self.env, job.concurrency) for queue in set(job.queues)}
        self.missing = [len(job.ranks)] * collectives
        self.last_launch = [0.0] * collectives  # as the clock of computation shows it
        self.running: dict[int, WorkClock] = {}
        self.done = [self.env.event() for _ in range(collectives)]
        self.start_ns, self.done_ns = np.zeros((2, collectives), np.int64)

    def run(self) -> None:
        least_first = self.job.work_ns.sum(axis=1).argsort()  # so memory is mostly read in the order of its layout
        for row in least_first.tolist():
            self.env.process(self._rank(row))
        self.env.run()

    def timeline(self) -> Timeline:
        end_ns = self.stretches.ends(self.waited_ns, self.job.work_ns, self.computation)
        return Timeline(self.job, end_ns, self.start_ns, self.done_ns)

    def _rank(self, row: int) -> Process:
        """Follow the script, with one event for all computing up to the next wait."""
        waited: list[int] = []
        for stop, work_ns in zip(self.stretches.stops, self.computed_ns[row].tolist(), strict=True):
            if isinstance(stop, Launch):
                self._will_launch(stop.collective, self.computation.read() + work_ns)
                continue
            if work_ns:
                self._computes(1)
                yield self.computation.when(self.computation.read() + work_ns)
                self._computes(-1)
            if isinstance(stop, Wait):
                yield self.done[stop.collective]
                waited.append(self._now)
        self.waited_ns[row] = waited
        self.latency_ns = self._now  # of the last rank in the end

    def _will_launch(self, number: int, shown_ns: float) -> None:
        """A rank will launch a collective when the clock shows this; the last one decides."""
        self.last_launch[number] = max(self.last_launch[number], shown_ns)
        self.missing[number] -= 1
        if not self.missing[number]:
            self.env.process(self._collective(number))

    def _collective(self, number: int) -> Process:
        yield self.computation.when(self.last_launch[number])
        with self.slots[self.job.queues[number]].request() as slot:
            yield slot
            self.start_ns[number] = self._now
            if self.job.cost_ns[number]:
                yield from self._transfer(number)
        self.done_ns[number] = self._now
        self.done[number].succeed()

    def _transfer(self, number: int) -> Process:
        clock = self.running[number] = WorkClock(self.env)
        self._slow_computation()
        self._slow_collectives()
        yield clock.when(float(self.job.cost_ns[number]))
        del self.running[number]
        self._slow_computation()
        self._slow_collectives()

    def _computes(self, change: int) -> None:
        """A rank begins to compute, or stops."""
        before = self.computing
        self.computing += change
        if not before or not self.computing:
            self._slow_collectives()

    def _slow_computation(self) -> None:
        """A collective has started or is done: computation goes on at the speed that holds from here."""
        slowdowns, others = self.job.slowdowns, len(self.running) - 1
        if slowdowns is None:
            return
        if self.running:
            factors = [slowdowns.compute[number][others] for number in self.running]
            self.computation.slow_down(sum(factors) / len(factors))
        elif self.job.lingers_ns:
            self.lingers_until_ns = self._now + self.job.lingers_ns
            self.env.timeout(self.job.lingers_ns).callbacks.append(self._recover)
        else:
            self.computation.slow_down(1.0)

    def _recover(self, _event: simpy.Event) -> None:
        """Computation goes on at full speed, unless another collective has begun since this was set."""
        if not self.running and self._now == self.lingers_until_ns:
            self.computation.slow_down(1.0)

    def _slow_collectives(self) -> None:
        """Something has started or stopped: what is in flight goes on at the speed that holds from here."""
        slowdowns, others = self.job.slowdowns, len(self.running) - 1
        beside_computation = slowdowns.collective if slowdowns is not None and self.computing else None
        for number, clock in self.running.items():
            sharing = max(1.0, 1.0 + (self.job.sharing[number] - 1.0) * others)
            clock.slow_down(sharing * beside_computation[number][others] if beside_computation else sharing)

    @property
    def _now(self) -> int:
        return int(self.env.now)
