"""Event replay: simulates one iteration by discrete events, and is the definition of a prediction.

Each rank is a simpy process that follows the schedule. Each collective is a process too: it starts when its last rank
has launched it and its process group has a free slot, runs, and wakes the ranks that wait for it.

Computation and collectives progress at speeds that change whenever a collective or a rank starts or stops.
"""

import gc
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from ..schedule.costs import EngineInput, Nanoseconds
from ..schedule.schedule import Compute, Launch, Schedule, Wait
from ..timeline import Timeline

Process = Generator[simpy.Event, Any, None]
Integers = NDArray[Any]
"""An array of int64 or of Python integers."""


def replay(engine_input: EngineInput) -> Timeline:
    """Simulate one iteration."""
    return _simulated(engine_input).timeline()


def latency_ns(engine_input: EngineInput) -> int:
    """Return `replay(engine_input).iteration_ns` without computing the timeline."""
    return _simulated(engine_input).latency_ns


def _simulated(engine_input: EngineInput) -> "_Replay":
    simulation = _Replay(engine_input)
    with _no_garbage_collection():
        simulation.run()
    return simulation


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: no event is garbage, and with many ranks scanning them takes half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Replay:
    """State of one simulation.

    A rank has one event for all computing up to its next wait. When that computing starts, the amount of computing
    before each launch is known, so the rank registers its launches in advance, by the clock's progress at the launch.
    The ends of the individual steps are computed after the simulation.
    """

    def __init__(self, engine_input: EngineInput) -> None:
        self.engine_input = engine_input
        self.env = simpy.Environment()
        self.segments = segments_of(engine_input.schedule)
        self.computed_ns = self.segments.computed_by_stop(engine_input.duration_ns)
        self.wait_end_ns = np.zeros((len(engine_input.ranks), self.segments.waits), np.int64)
        self.latency_ns = 0
        self.computing_ranks = 0
        self.computation = ProgressClock(self.env)  # all ranks compute at the same speed
        self.lingers_until_ns = 0

        collectives = len(engine_input.schedule.collectives)
        self.slots = {queue: simpy.Resource(self.env, engine_input.concurrency) for queue in set(engine_input.queues)}
        self.launches_missing = [len(engine_input.ranks)] * collectives
        self.last_launch = [0] * collectives  # progress of computation, not a time
        self.running: dict[int, ProgressClock] = {}
        self.done = [self.env.event() for _ in range(collectives)]
        self.start_ns, self.done_ns = np.zeros((2, collectives), np.int64)

    def run(self) -> None:
        # Ranks that compute least come first: processes then resume roughly in memory order, which is faster.
        for row in self.engine_input.duration_ns.sum(axis=1).argsort().tolist():
            self.env.process(self._rank(row))
        self.env.run()

    def timeline(self) -> Timeline:
        end_ns = self.segments.ends(self.wait_end_ns, self.engine_input.duration_ns, self.computation)
        return Timeline(self.engine_input, end_ns, self.start_ns, self.done_ns)

    def _rank(self, row: int) -> Process:
        """Execute the schedule, with one event for all computing up to the next wait."""
        wait_end_ns: list[int] = []
        progress = self.computation.progress()
        for stop, computed_ns in zip(self.segments.stops, self.computed_ns[row].tolist(), strict=True):
            reached = progress + (computed_ns << PROGRESS_BITS)
            if isinstance(stop, Launch):
                self._register_launch(stop.collective, reached)
                continue
            if computed_ns:
                self._add_computing_ranks(1)
                yield self.computation.reaches(reached)
                self._add_computing_ranks(-1)
            if isinstance(stop, Wait):
                yield self.done[stop.collective]
                wait_end_ns.append(self._now)
                progress = self.computation.progress()
        self.wait_end_ns[row] = wait_end_ns
        self.latency_ns = self._now  # the last rank overwrites the others

    def _register_launch(self, number: int, progress: int) -> None:
        """Register that a rank launches a collective when computation reaches `progress`."""
        self.last_launch[number] = max(self.last_launch[number], progress)
        self.launches_missing[number] -= 1
        if not self.launches_missing[number]:
            self.env.process(self._collective(number))

    def _collective(self, number: int) -> Process:
        yield self.computation.reaches(self.last_launch[number])
        with self.slots[self.engine_input.queues[number]].request() as slot:
            yield slot
            self.start_ns[number] = self._now
            if self.engine_input.cost_ns[number]:
                yield from self._transfer(number)
        self.done_ns[number] = self._now
        self.done[number].succeed()

    def _transfer(self, number: int) -> Process:
        clock = self.running[number] = ProgressClock(self.env)
        self._update_computation_speed()
        self._update_collective_speeds()
        yield clock.reaches(int(self.engine_input.cost_ns[number]) << PROGRESS_BITS)
        del self.running[number]
        self._update_computation_speed()
        self._update_collective_speeds()

    def _add_computing_ranks(self, change: int) -> None:
        before = self.computing_ranks
        self.computing_ranks += change
        if not before or not self.computing_ranks:
            self._update_collective_speeds()

    def _update_computation_speed(self) -> None:
        """Set the speed of computation after a collective has started or ended."""
        slowdowns = self.engine_input.slowdowns
        if slowdowns is None:
            return
        if self.running:
            self.computation.slow_down(slowdowns.of_computation(self.running))
        elif self.engine_input.lingers_ns:
            self.lingers_until_ns = self._now + self.engine_input.lingers_ns
            self.env.timeout(self.engine_input.lingers_ns).callbacks.append(self._stop_lingering)
        else:
            self.computation.slow_down(1.0)

    def _stop_lingering(self, _event: simpy.Event) -> None:
        """Return computation to full speed, unless another collective has started since the timeout was set."""
        if not self.running and self._now == self.lingers_until_ns:
            self.computation.slow_down(1.0)

    def _update_collective_speeds(self) -> None:
        """Set the speeds of the running collectives after a collective or computation has started or ended."""
        slowdowns, others = self.engine_input.slowdowns, len(self.running) - 1
        beside_computation = slowdowns.collective if slowdowns is not None and self.computing_ranks else None
        for number, clock in self.running.items():
            sharing = max(1.0, 1.0 + (self.engine_input.sharing[number] - 1.0) * others)
            clock.slow_down(sharing * beside_computation[number][others] if beside_computation else sharing)

    @property
    def _now(self) -> int:
        return int(self.env.now)


PROGRESS_BITS = 20
"""A nanosecond at full speed is 2**20 units of progress."""
FACTOR_BITS = 32
"""A slow-down factor is stored as an integer multiple of 2**-32, rounded down."""
FULL_SPEED = 1 << FACTOR_BITS
PROGRESS_PER_FACTOR = PROGRESS_BITS + FACTOR_BITS
"""The progress in one nanosecond is 2**52 divided by the stored factor."""


class ProgressClock:
    """Progress of everything that runs at one common speed, in exact integer arithmetic.

    All ranks share one clock, so a change of speed costs the same for 2 ranks and for 1,024.

    Progress is rounded up, and `reaches(p)` is the first whole nanosecond with a progress of at least p. Both are
    monotone, so steps end in order. A step ends at its exact end rounded up to a whole nanosecond, or 1 ns earlier if
    the exact end exceeds that earlier nanosecond by less than the clock's rounding error: 2**-20 ns for each change
    of speed, plus 2**-32 of the time.

    Args:
        env: The simulation; its time is in integer nanoseconds.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._changed_ns, self._shown, self._factors = [int(env.now)], [0], [FULL_SPEED]  # at each change of speed
        self._waiting: list[tuple[int, int, simpy.Event]] = []
        self._entered = 0
        self._alarm: simpy.Timeout | None = None

    def progress(self) -> int:
        """Progress since the start of the clock, in units of 2**-20 ns at full speed."""
        elapsed_ns = int(self._env.now) - self._changed_ns[-1]
        return self._shown[-1] - (-elapsed_ns << PROGRESS_PER_FACTOR) // self._factors[-1]

    def reaches(self, progress: int) -> simpy.Event:
        """Return an event at the first whole nanosecond, now or later, with a progress of at least `progress`."""
        event = self._env.event()
        self._entered += 1
        heappush(self._waiting, (progress, self._entered, event))
        if self._waiting[0][2] is event:
            self._set_alarm()
        return event

    def slow_down(self, factor: float) -> None:
        """Set the speed: from now on everything takes `factor` times as long as at full speed."""
        stored = int(factor * FULL_SPEED)
        if stored != self._factors[-1]:
            self._shown.append(self.progress())
            self._changed_ns.append(int(self._env.now))
            self._factors.append(stored)
            self._set_alarm()

    def ends(self, start_ns: Nanoseconds, duration_ns: Nanoseconds) -> Nanoseconds:
        """Compute when computing ended; equal to the times of the events to the nanosecond.

        Args:
            start_ns: When each interval of computing started.
            duration_ns: Duration of each interval at full speed; all must have ended by now.
        """
        if len(self._factors) == 1:
            return start_ns + duration_ns
        changed_ns, shown, factors = np.array(self._changed_ns), self._array(self._shown), self._array(self._factors)
        before = changed_ns.searchsorted(start_ns, side="right") - 1
        elapsed_ns = self._array(start_ns - changed_ns[before])
        progress = shown[before] + _progress(elapsed_ns, factors[before])
        progress += self._array(duration_ns) << PROGRESS_BITS
        before = np.maximum(shown.searchsorted(progress) - 1, 0)
        later_ns = _elapsed_ns(progress - shown[before], factors[before]).astype(np.int64)
        ends: Nanoseconds = np.maximum(start_ns, changed_ns[before] + later_ns)
        return ends

    def _array(self, numbers: list[int] | Nanoseconds) -> Integers:
        """Convert to int64, or to Python integers if 64 bits might overflow: after an hour, or at factors over 16."""
        fits = int(self._env.now) < 1 << 42 and max(self._factors) < 1 << 36
        return np.asarray(numbers, np.int64 if fits else np.object_)

    def _moment_ns(self, progress: int) -> int:
        """Return the first whole nanosecond with a progress of at least `progress` if the speed does not change."""
        missing = progress - self._shown[-1]
        return self._changed_ns[-1] + ((missing - 1) * self._factors[-1] >> PROGRESS_PER_FACTOR) + 1

    def _set_alarm(self) -> None:
        """Set an alarm for the earliest waiting event, in place of the previous alarm."""
        if self._waiting:
            self._alarm = self._env.timeout(max(0, self._moment_ns(self._waiting[0][0]) - int(self._env.now)))
            self._alarm.callbacks.append(self._ring)

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:
            return
        progress = self.progress()
        while self._waiting and self._waiting[0][0] <= progress:
            heappop(self._waiting)[2].succeed()
        self._set_alarm()


DIGIT_BITS = PROGRESS_PER_FACTOR // 2
"""Products with 2**52 overflow 64 bits, so the array arithmetic uses digits of 26 bits."""
DIGIT = (1 << DIGIT_BITS) - 1


def _progress(elapsed_ns: Integers, factors: Integers) -> Integers:
    """`elapsed_ns * 2**52 / factors`, rounded up, by long division."""
    high = elapsed_ns // factors
    rest = elapsed_ns - high * factors << DIGIT_BITS
    middle = rest // factors
    rest = rest - middle * factors << DIGIT_BITS
    total: Integers = (high << 2 * DIGIT_BITS) + (middle << DIGIT_BITS) - -rest // factors
    return total


def _elapsed_ns(progress: Integers, factors: Integers) -> Integers:
    """The least number of nanoseconds with at least this `_progress`, by long multiplication."""
    below = progress - 1
    low, middle, high = below & DIGIT, below >> DIGIT_BITS & DIGIT, below >> 2 * DIGIT_BITS
    carried = low * factors >> DIGIT_BITS
    total: Integers = high * factors + (middle * factors + carried >> DIGIT_BITS) + 1
    return total


class ScheduleSegments:
    """A schedule cut into segments: the instructions from one wait to the next.

    Attributes:
        stops: The launches and waits of the schedule in order, followed by None for the end.
        waits: Number of waits.
    """

    def __init__(self, schedule: Schedule) -> None:
        instructions = [*schedule.instructions, None]
        self.stops: list[Launch | Wait | None] = [one for one in instructions if not isinstance(one, Compute)]
        self.waits = sum(isinstance(one, Wait) for one in instructions)
        self._is_stop = np.array([not isinstance(one, Compute) for one in instructions])
        self._is_wait = np.array([isinstance(one, Wait) for one in instructions])
        self._waits_before = self._is_wait.cumsum() - self._is_wait
        # By instruction: computing steps `first` to `last - 1` of its segment, up to and including the instruction.
        self._last = (~self._is_stop).cumsum()
        self._first = self._at_segment_start(self._last[None, self._is_wait])[0]

    def computed_by_stop(self, duration_ns: Nanoseconds) -> Nanoseconds:
        """Sum the computing of each rank from the start of a segment to each stop in it; shape [ranks, stops].

        Args:
            duration_ns: Duration of each computing step, as in `EngineInput.duration_ns`.
        """
        return _partial_sums(duration_ns, self._first[self._is_stop], self._last[self._is_stop])

    def ends(self, wait_end_ns: Nanoseconds, duration_ns: Nanoseconds, computation: ProgressClock) -> Nanoseconds:
        """Compute the end of each instruction; shape [ranks, instructions].

        Args:
            wait_end_ns: When each wait ended; shape [ranks, waits].
            duration_ns: Duration of each computing step, as in `EngineInput.duration_ns`.
            computation: The clock of all ranks' computation.
        """
        computed_ns = _partial_sums(duration_ns, self._first, self._last)
        end_ns = computation.ends(self._at_segment_start(wait_end_ns), computed_ns)
        end_ns[:, self._is_wait] = wait_end_ns
        return end_ns[:, :-1]

    def _at_segment_start(self, at_waits: Nanoseconds) -> Nanoseconds:
        """Take for each instruction the value at the wait that started its segment; 0 in the first segment."""
        at_start = np.zeros((len(at_waits), 1), np.int64)
        return np.concatenate([at_start, at_waits], axis=1)[:, self._waits_before]


segments_of = lru_cache(maxsize=8)(ScheduleSegments)
"""Segments by schedule, cached because all iterations of a prediction share one schedule."""


def _partial_sums(numbers: Nanoseconds, first: Nanoseconds, last: Nanoseconds) -> Nanoseconds:
    """Sum `numbers[:, first:last]` of each row for each pair of `first` and `last`."""
    up_to = np.zeros((len(numbers), numbers.shape[1] + 1), np.int64)
    numbers.cumsum(axis=1, out=up_to[:, 1:])
    sums: Nanoseconds = up_to[:, last] - up_to[:, first]
    return sums
