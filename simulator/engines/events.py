"""Replay: one iteration by discrete events. This is the definition of what the simulator means.

Each rank is a process that follows the schedule. Each collective is a process too: it queues for a slot of its
process group when its last rank has launched it, runs, and wakes the ranks that wait for it.

Speed is fluid: computation and collectives progress at rates that change whenever something starts or stops.
"""

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from heapq import heappop, heappush
from math import ceil
from typing import Any

import numpy as np
import simpy

from ..schedule.costs import EngineInput, Nanoseconds
from ..schedule.schedule import Compute, Launch, Schedule, Wait
from ..timeline import Timeline

Process = Generator[simpy.Event, Any, None]


def replay(job: EngineInput) -> Timeline:
    """Simulate one iteration."""
    return _simulated(job).timeline()


def latency_ns(job: EngineInput) -> int:
    """Nanoseconds of one iteration: `replay(job).iteration_ns`, without working out what else the timeline tells."""
    return _simulated(job).latency_ns


def _simulated(job: EngineInput) -> "_Replay":
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

    def __init__(self, job: EngineInput) -> None:
        self.engine_input = job
        self.env = simpy.Environment()
        self.sections = sections_of(job.schedule)
        self.computed_ns = self.sections.computed_by_stop(job.duration_ns)
        self.waited_ns = np.zeros((len(job.ranks), self.sections.waits), np.int64)
        self.latency_ns = 0
        self.computing = 0
        self.computation = ProgressClock(self.env)
        self.lingers_until_ns = 0

        collectives = len(job.schedule.collectives)
        self.slots = {queue: simpy.Resource(self.env, job.concurrency) for queue in set(job.queues)}
        self.missing = [len(job.ranks)] * collectives
        self.last_launch = [0.0] * collectives  # as the clock of computation shows it
        self.running: dict[int, ProgressClock] = {}
        self.done = [self.env.event() for _ in range(collectives)]
        self.start_ns, self.done_ns = np.zeros((2, collectives), np.int64)

    def run(self) -> None:
        least_first = self.engine_input.duration_ns.sum(
            axis=1
        ).argsort()  # so memory is mostly read in the order of its layout
        for row in least_first.tolist():
            self.env.process(self._rank(row))
        self.env.run()

    def timeline(self) -> Timeline:
        end_ns = self.sections.ends(self.waited_ns, self.engine_input.duration_ns, self.computation)
        return Timeline(self.engine_input, end_ns, self.start_ns, self.done_ns)

    def _rank(self, row: int) -> Process:
        """Follow the schedule, with one event for all computing up to the next wait."""
        waited: list[int] = []
        for stop, duration_ns in zip(self.sections.stops, self.computed_ns[row].tolist(), strict=True):
            if isinstance(stop, Launch):
                self._will_launch(stop.collective, self.computation.read() + duration_ns)
                continue
            if duration_ns:
                self._computes(1)
                yield self.computation.when(self.computation.read() + duration_ns)
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
        with self.slots[self.engine_input.queues[number]].request() as slot:
            yield slot
            self.start_ns[number] = self._now
            if self.engine_input.cost_ns[number]:
                yield from self._transfer(number)
        self.done_ns[number] = self._now
        self.done[number].succeed()

    def _transfer(self, number: int) -> Process:
        clock = self.running[number] = ProgressClock(self.env)
        self._slow_computation()
        self._slow_collectives()
        yield clock.when(float(self.engine_input.cost_ns[number]))
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
        slowdowns, others = self.engine_input.slowdowns, len(self.running) - 1
        if slowdowns is None:
            return
        if self.running:
            factors = [slowdowns.compute[number][others] for number in self.running]
            self.computation.slow_down(sum(factors) / len(factors))
        elif self.engine_input.lingers_ns:
            self.lingers_until_ns = self._now + self.engine_input.lingers_ns
            self.env.timeout(self.engine_input.lingers_ns).callbacks.append(self._recover)
        else:
            self.computation.slow_down(1.0)

    def _recover(self, _event: simpy.Event) -> None:
        """Computation goes on at full speed, unless another collective has begun since this was set."""
        if not self.running and self._now == self.lingers_until_ns:
            self.computation.slow_down(1.0)

    def _slow_collectives(self) -> None:
        """Something has started or stopped: what is in flight goes on at the speed that holds from here."""
        slowdowns, others = self.engine_input.slowdowns, len(self.running) - 1
        beside_computation = slowdowns.collective if slowdowns is not None and self.computing else None
        for number, clock in self.running.items():
            sharing = max(1.0, 1.0 + (self.engine_input.sharing[number] - 1.0) * others)
            clock.slow_down(sharing * beside_computation[number][others] if beside_computation else sharing)

    @property
    def _now(self) -> int:
        return int(self.env.now)


ROUNDING_NS = 1e-3
"""What sums of floating point numbers may be off by, in iterations of minutes."""


class ProgressClock:
    """Shows how much work each of those that go at one speed has done so far, and wakes them when theirs is done.

    All of them share the clock, so a change of speed costs the same however many they are. Progress is in nanoseconds
    at full speed.

    Args:
        env: The simulation; its time is in nanoseconds.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._shown_ns, self._changed_ns, self._slowdowns = [0.0], [int(env.now)], [1.0]  # at each change of speed
        self._waiting: list[tuple[float, int, simpy.Event]] = []
        self._entered = 0
        self._alarm: simpy.Timeout | None = None

    def read(self) -> float:
        """How much work each has done that was there from the start."""
        return self._shown_ns[-1] + (self._env.now - self._changed_ns[-1]) / self._slowdowns[-1]

    def when(self, shown_ns: float) -> simpy.Event:
        """An event for when the clock will show this, which must not be less than it shows now."""
        event = self._env.event()
        self._entered += 1
        heappush(self._waiting, (shown_ns, self._entered, event))
        if self._waiting[0][2] is event:
            self._set_alarm()
        return event

    def slow_down(self, factor: float) -> None:
        """From now on work takes `factor` times as long as at full speed."""
        if factor != self._slowdowns[-1]:
            self._shown_ns.append(self.read())
            self._changed_ns.append(int(self._env.now))
            self._slowdowns.append(factor)
            self._set_alarm()

    def moments(self, start_ns: Nanoseconds, duration_ns: Nanoseconds) -> Nanoseconds:
        """When work was done that began at `start_ns`, all of it before now.

        The sums are those of `read` and `_moment`, term by term, so moments are those of events to the nanosecond.
        """
        shown_ns, changed_ns, slowdowns = map(np.array, (self._shown_ns, self._changed_ns, self._slowdowns))
        at = changed_ns.searchsorted(start_ns, side="right") - 1
        done_ns = shown_ns[at] + (start_ns - changed_ns[at]) / slowdowns[at] + duration_ns
        at = shown_ns.searchsorted(done_ns, side="right") - 1
        later_ns = np.ceil((done_ns - shown_ns[at]) * slowdowns[at] - ROUNDING_NS)
        moments: Nanoseconds = changed_ns[at] + later_ns.astype(np.int64)
        return moments

    def _moment(self, shown_ns: float) -> int:
        """When the clock will show this if speed does not change."""
        return self._changed_ns[-1] + ceil((shown_ns - self._shown_ns[-1]) * self._slowdowns[-1] - ROUNDING_NS)

    def _set_alarm(self) -> None:
        """For whoever is done first; an alarm that was set before rings in vain."""
        if self._waiting:
            self._alarm = self._env.timeout(max(0, self._moment(self._waiting[0][0]) - self._env.now))
            self._alarm.callbacks.append(self._ring)

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:
            return
        while self._waiting and self._moment(self._waiting[0][0]) <= self._env.now:
            heappop(self._waiting)[2].succeed()
        self._set_alarm()


class Sections:
    """What lies between the waits of a schedule.

    Attributes:
        stops: Its launches and waits, then None, the end.
        waits: How many waits there are.
    """

    def __init__(self, schedule: Schedule) -> None:
        steps = [*schedule.instructions, None]
        self.stops: list[Launch | Wait | None] = [step for step in steps if not isinstance(step, Compute)]
        self.waits = sum(isinstance(step, Wait) for step in steps)
        self._is_stop = np.array([not isinstance(step, Compute) for step in steps])
        self._is_wait = np.array([isinstance(step, Wait) for step in steps])
        self._waits_before = self._is_wait.cumsum() - self._is_wait
        self._last = (~self._is_stop).cumsum()  # of the steps of `duration_ns`, up to and with each instruction
        self._first = self._at_last_wait(self._last[None, self._is_wait])[0]

    def computed_by_stop(self, duration_ns: Nanoseconds) -> Nanoseconds:
        """What each rank has computed by each stop since its last wait; shape [ranks, stops].

        Args:
            duration_ns: How long each computing step takes, as in `EngineInput.duration_ns`.
        """
        return _sums(duration_ns, self._first[self._is_stop], self._last[self._is_stop])

    def ends(self, waited_ns: Nanoseconds, duration_ns: Nanoseconds, computation: ProgressClock) -> Nanoseconds:
        """When each rank was done with each instruction.

        Args:
            waited_ns: When each wait was over; shape [ranks, waits].
            duration_ns: How long each computing step takes, as in `EngineInput.duration_ns`.
            computation: The clock by which all ranks computed.
        """
        computed_ns = _sums(duration_ns, self._first, self._last)
        end_ns = computation.moments(self._at_last_wait(waited_ns), computed_ns)
        end_ns[:, self._is_wait] = waited_ns
        return end_ns[:, :-1]

    def _at_last_wait(self, at_waits: Nanoseconds) -> Nanoseconds:
        """By instruction, what was at the last wait before it; 0 where there was none."""
        at_start = np.zeros((len(at_waits), 1), np.int64)
        return np.concatenate([at_start, at_waits], axis=1)[:, self._waits_before]


sections_of = lru_cache(maxsize=8)(Sections)
"""The same for all iterations that follow one schedule."""


def _sums(numbers: Nanoseconds, first: Nanoseconds, last: Nanoseconds) -> Nanoseconds:
    """Of each row from each of the places `first` to that before `last`."""
    up_to = np.zeros((len(numbers), numbers.shape[1] + 1), np.int64)
    numbers.cumsum(axis=1, out=up_to[:, 1:])
    sums: Nanoseconds = up_to[:, last] - up_to[:, first]
    return sums
