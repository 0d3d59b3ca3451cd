"""Event replay: simulates one iteration by discrete events, and is the definition of a prediction.

Each rank is a process that follows the schedule on a `Cluster`. Each collective is a process too: it
starts when its last rank has launched it and its process group has a free slot, runs, and wakes the ranks that wait
for it. Computation and collectives progress at speeds that change whenever a collective or a rank starts or stops.
"""

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from heapq import heappop, heappush
from math import fsum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.files.value_ranges import LARGEST

from ..fabric import LinkShare
from ..schedule.schedule import Compute, Condition, IterationSchedule, LaunchCollective, Wait
from ..workload.compute_times import Nanoseconds
from .engine_input import EngineInput
from .event_queue import EventQueue, Process, Signal, Slots

Integers = NDArray[Any]
"""An array of int64 or of Python integers."""


def replay(
    engine_input: EngineInput, end_ns: Nanoseconds | None = None
) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
    """Simulate one iteration; arguments and results are those of `closed_form.solve`."""
    simulation = _Replay(engine_input)
    with _no_garbage_collection():
        simulation.run()
    if end_ns is not None:
        simulation.write_ends(end_ns)
    moments = [(one.start_ns, one.done_ns) for one in simulation.collectives]
    start_ns, done_ns = np.array(moments, np.int64).reshape(-1, 2).T
    return start_ns, done_ns, np.array(simulation.last_ns, np.int64)


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

    A rank waits for one signal for all computing up to its next wait. When that computing starts, the amount of
    computing before each launch is known, so the rank registers its launches in advance, by the clock's progress at
    the launch. The ends of the individual steps are computed after the simulation.
    """

    def __init__(self, engine_input: EngineInput) -> None:
        self.engine_input = engine_input
        slowdowns = engine_input.slowdowns
        self.cluster = Cluster(
            set(engine_input.queues),
            concurrency=engine_input.concurrency,
            slows_computation=slowdowns is not None,
            lingers_ns=0 if slowdowns is None else slowdowns.lingers_ns,
        )
        factors = [((),) * len(engine_input.queues)] * 2 if slowdowns is None else slowdowns[:2]
        costs_ns: list[int] = engine_input.cost_ns.tolist()
        self.collectives = [
            RunningCollective(self.cluster.events, CollectiveCost(*cost))
            for cost in zip(costs_ns, engine_input.queues, engine_input.sharing, *factors, strict=True)
        ]
        self.launches_missing = [len(engine_input.ranks)] * len(self.collectives)
        self.alike = _rows_that_wait_alike(engine_input)
        self.wait_end_ns: list[list[int]] = [[] for _ in engine_input.ranks]
        self.last_ns = [0] * len(engine_input.ranks)

    def run(self) -> None:
        # Ranks that compute least come first: processes then resume roughly in memory order, which is faster.
        ranks: dict[int, Process] = {}
        for segments, rows in self.alike:
            computed_ns = segments.computed_by_stop(self.engine_input.duration_ns[rows])
            for row, by_stop in zip(rows, computed_ns.tolist(), strict=True):
                ranks[row] = self._rank(row, segments, by_stop)
        for row in self.engine_input.duration_ns.sum(axis=1).argsort().tolist():
            self.cluster.events.start(ranks[row])
        self.cluster.events.run()
        if self.cluster.now_ns > LARGEST:
            raise ValueError(
                "expected cycles of sync_every iterations to take at most 146 years, got "
                f"{self.cluster.now_ns:.3g} ns with slow-downs; check the factors of the fabric"
            )

    def write_ends(self, end_ns: Nanoseconds) -> None:
        for segments, rows in self.alike:
            wait_end_ns = np.array([self.wait_end_ns[row] for row in rows], np.int64)
            end_ns[rows] = segments.ends(wait_end_ns, self.engine_input.duration_ns[rows], self.cluster.computation)

    def _rank(self, row: int, segments: "ScheduleSegments", computed_by_stop: list[int]) -> Process:
        """Execute the schedule, with one signal for all computing up to the next wait."""
        cluster, computation = self.cluster, self.cluster.computation
        wait_end_ns = self.wait_end_ns[row]
        progress = computation.progress()
        for stop, computed_ns in zip(segments.stops, computed_by_stop, strict=True):
            reached = progress + (computed_ns << PROGRESS_BITS)
            if isinstance(stop, LaunchCollective):
                self._register_launch(stop.collective, reached)
                continue
            if computed_ns:
                cluster.add_computing_ranks(1)
                yield computation.reaches(reached)
                cluster.add_computing_ranks(-1)
            if isinstance(stop, Wait):
                yield self.collectives[stop.collective].done
                wait_end_ns.append(cluster.now_ns)
                progress = computation.progress()
        self.last_ns[row] = cluster.now_ns

    def _register_launch(self, number: int, progress: int) -> None:
        """Register that a rank launches a collective when computation reaches `progress`."""
        collective = self.collectives[number]
        collective.launched = max(collective.launched, progress)
        self.launches_missing[number] -= 1
        if not self.launches_missing[number]:
            self.cluster.launched_by_all(collective)


def _rows_that_wait_alike(engine_input: EngineInput) -> "list[tuple[ScheduleSegments, list[int]]]":
    """Return the rows of ranks that wait for the same collectives, with the schedule cut at those waits."""
    rows = range(len(engine_input.ranks))
    used = {wait.only for wait in engine_input.schedule.instructions if isinstance(wait, Wait) and wait.only}
    alike: dict[frozenset[Condition], list[int]] = {}
    for row in rows:
        met = frozenset(condition for condition in used if engine_input.meets[condition][row])
        alike.setdefault(met, []).append(row)
    return [(segments_of(engine_input.schedule, met), members) for met, members in alike.items()]


class ScheduleSegments:
    """A schedule cut into segments: the instructions from one wait to the next.

    Args:
        schedule: The schedule.
        met: Conditions that a rank meets; it passes waits under other conditions without waiting.

    Attributes:
        stops: The launches and waits in order, followed by None for the end.
    """

    def __init__(self, schedule: IterationSchedule, met: frozenset[Condition] = frozenset()) -> None:
        instructions = [*schedule.instructions, None]
        is_compute = np.array([isinstance(one, Compute) for one in instructions])
        self._is_wait = np.array([isinstance(one, Wait) and one.only in (None, *met) for one in instructions])
        self._is_stop = self._is_wait | np.array(
            [one is None or isinstance(one, LaunchCollective) for one in instructions]
        )
        stops = zip(instructions, self._is_stop.tolist(), strict=True)
        self.stops: list[Any] = [one for one, is_stop in stops if is_stop]
        self._waits_before = self._is_wait.cumsum() - self._is_wait
        # By instruction: computing steps `first` to `last - 1` of its segment, up to and including the instruction.
        self._last = is_compute.cumsum()
        self._first = self._at_segment_start(self._last[None, self._is_wait])[0]

    def computed_by_stop(self, duration_ns: Nanoseconds) -> Nanoseconds:
        """Sum the computing of each rank from the start of a segment to each stop in it; shape [ranks, stops]."""
        return _partial_sums(duration_ns, self._first[self._is_stop], self._last[self._is_stop])

    def ends(self, wait_end_ns: Nanoseconds, duration_ns: Nanoseconds, computation: "ProgressClock") -> Nanoseconds:
        """Compute the end of each instruction, shape [ranks, instructions], from that of each wait."""
        computed_ns = _partial_sums(duration_ns, self._first, self._last)
        end_ns = computation.ends(self._at_segment_start(wait_end_ns), computed_ns)
        end_ns[:, self._is_wait] = wait_end_ns
        return end_ns[:, :-1]

    def _at_segment_start(self, at_waits: Nanoseconds) -> Nanoseconds:
        """Take for each instruction the value at the wait that started its segment; 0 in the first segment."""
        at_start = np.zeros((len(at_waits), 1), np.int64)
        return np.concatenate([at_start, at_waits], axis=1)[:, self._waits_before]


segments_of = lru_cache(maxsize=8)(ScheduleSegments)
"""Segments by schedule and met conditions, cached because all iterations of a prediction share one schedule."""


def _partial_sums(numbers: Nanoseconds, first: Nanoseconds, last: Nanoseconds) -> Nanoseconds:
    """Sum `numbers[:, first:last]` of each row for each pair of `first` and `last`."""
    up_to = np.zeros((len(numbers), numbers.shape[1] + 1), np.int64)
    numbers.cumsum(axis=1, out=up_to[:, 1:])
    sums: Nanoseconds = up_to[:, last] - up_to[:, first]
    return sums


class CollectiveCost(NamedTuple):
    """How long a collective runs, and how it and everything that runs at the same time slow each other down.

    Attributes:
        cost_ns: Duration while no other collective runs and no rank computes.
        queue: Its process group, as an index; the collectives of a group start in launch order.
        sharing: How much the other collectives that run slow it down. A collective with twice its weight slows it
            down by twice as much.
        slows_computation: Factor on computing, by the number of collectives that run, starting at one. Beside several
            collectives, the mean of their factors applies. Empty: no collective slows computing down.
        slowed_by_computation: Factor on the duration while a rank computes, by the same number. Empty: 1.
    """

    cost_ns: int
    queue: int
    sharing: LinkShare
    slows_computation: tuple[float, ...] = ()
    slowed_by_computation: tuple[float, ...] = ()


class RunningCollective:
    """A collective that was launched by at least one rank.

    Attributes:
        cost: See `CollectiveCost`.
        launched: Progress of computation at its last launch so far.
        start_ns: When it started to run; 0 before.
        done_ns: When it finished; 0 before.
        on_start: Called when it starts to run.
        done: The signal of its end.
    """

    __slots__ = ("cost", "done", "done_ns", "launched", "on_start", "start_ns")

    def __init__(self, events: EventQueue, cost: CollectiveCost, on_start: Callable[[], None] | None = None) -> None:
        self.cost, self.on_start = cost, on_start
        self.launched = 0
        self.start_ns = self.done_ns = 0
        self.done = Signal(events)


class Cluster:
    """Computation of all ranks, which has one common speed, and the collectives between the ranks.

    Args:
        queues: Process groups, as indices.
        concurrency: Collectives of one group that run at the same time.
        slows_computation: Whether any collective slows computation down.
        lingers_ns: Time for which computing stays slowed after the last collective has finished, unless another
            collective starts.

    Attributes:
        events: The event queue.
        computation: Progress of all ranks' computation.
    """

    def __init__(
        self, queues: Collection[int], *, concurrency: int, slows_computation: bool, lingers_ns: int
    ) -> None:
        self.events = EventQueue()
        self.computation = ProgressClock(self.events)
        self._slots = {queue: Slots(self.events, concurrency) for queue in queues}
        self._slows_computation = slows_computation
        self._lingers_ns = lingers_ns
        self._lingers_until_ns = 0
        self._computing_ranks = 0
        self._running: dict[RunningCollective, ProgressClock] = {}

    @property
    def now_ns(self) -> int:
        """The current time."""
        return self.events.now_ns

    def add_computing_ranks(self, change: int) -> None:
        """Register that a rank starts (1) or stops (-1) computing."""
        before = self._computing_ranks
        self._computing_ranks += change
        if not before or not self._computing_ranks:
            self._update_collective_speeds()

    def launched_by_all(self, collective: RunningCollective) -> None:
        """Run a collective as soon as computation has reached `collective.launched` and its group has a free slot."""
        self.events.start(self._run(collective))

    def _run(self, collective: RunningCollective) -> Process:
        yield self.computation.reaches(collective.launched)
        slots = self._slots[collective.cost.queue]
        yield slots.take()
        collective.start_ns = self.now_ns
        if collective.on_start is not None:
            collective.on_start()
        if collective.cost.cost_ns:
            yield from self._transfer(collective)
        collective.done_ns = self.now_ns
        collective.done.send()  # before the next collective of the group starts
        slots.give_back()

    def _transfer(self, collective: RunningCollective) -> Process:
        clock = self._running[collective] = ProgressClock(self.events)
        self._update_computation_speed()
        self._update_collective_speeds()
        yield clock.reaches(collective.cost.cost_ns << PROGRESS_BITS)
        del self._running[collective]
        self._update_computation_speed()
        self._update_collective_speeds()

    def _update_computation_speed(self) -> None:
        """Set the speed of computation after a collective has started or ended."""
        if not self._slows_computation:
            return
        if self._running:
            factors = [one.cost.slows_computation[len(self._running) - 1] for one in self._running]
            self.computation.slow_down(sum(factors) / len(factors))
        elif self._lingers_ns:
            self._lingers_until_ns = self.now_ns + self._lingers_ns
            self.events.at(self._lingers_until_ns, self._stop_lingering)
        else:
            self.computation.slow_down(1.0)

    def _stop_lingering(self, _: None) -> None:
        """Return computation to full speed, unless another collective has run since this call was entered."""
        if not self._running and self.now_ns == self._lingers_until_ns:
            self.computation.slow_down(1.0)

    def _update_collective_speeds(self) -> None:
        """Set the speeds of the running collectives after a collective or computation has started or ended."""
        others = len(self._running) - 1
        weights = fsum(one.cost.sharing.weight for one in self._running)  # the same in any order
        for collective, clock in self._running.items():
            cost = collective.cost
            slow_down, weight = cost.sharing
            factor = max(1.0, 1.0 + (slow_down - 1.0) * (weights / weight - 1.0))
            if self._computing_ranks and cost.slowed_by_computation:
                factor *= cost.slowed_by_computation[others]
            clock.slow_down(factor)


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
        events: The event queue.
    """

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._changed_ns, self._shown, self._factors = [events.now_ns], [0], [FULL_SPEED]  # at each change of speed
        self._waiting: list[tuple[int, int, Signal]] = []
        self._entered = 0
        self._last_alarm = 0

    def progress(self) -> int:
        """Progress since the start of the clock, in units of 2**-20 ns at full speed."""
        elapsed_ns = self._events.now_ns - self._changed_ns[-1]
        return self._shown[-1] - (-elapsed_ns << PROGRESS_PER_FACTOR) // self._factors[-1]

    def reaches(self, progress: int) -> Signal:
        """Return a signal at the first whole nanosecond, now or later, with a progress of at least `progress`."""
        signal = Signal(self._events)
        self._entered += 1
        heappush(self._waiting, (progress, self._entered, signal))
        if self._waiting[0][2] is signal:
            self._set_alarm()
        return signal

    def slow_down(self, factor: float) -> None:
        """Set the speed: from now on everything takes `factor` times as long as at full speed."""
        stored = int(factor * FULL_SPEED)
        if stored != self._factors[-1]:
            self._shown.append(self.progress())
            self._changed_ns.append(self._events.now_ns)
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
        fits = self._events.now_ns < 1 << 42 and max(self._factors) < 1 << 36
        return np.asarray(numbers, np.int64 if fits else np.object_)

    def _moment_ns(self, progress: int) -> int:
        """Return the first whole nanosecond with a progress of at least `progress` if the speed does not change."""
        missing = progress - self._shown[-1]
        return self._changed_ns[-1] + ((missing - 1) * self._factors[-1] >> PROGRESS_PER_FACTOR) + 1

    def _set_alarm(self) -> None:
        """Set an alarm for the earliest waiting signal, in place of the previous alarm."""
        if self._waiting:
            self._last_alarm += 1
            moment_ns = max(self._events.now_ns, self._moment_ns(self._waiting[0][0]))
            self._events.at(moment_ns, self._ring, self._last_alarm)

    def _ring(self, alarm: int) -> None:
        if alarm != self._last_alarm:  # replaced by a later one
            return
        progress = self.progress()
        while self._waiting and self._waiting[0][0] <= progress:
            heappop(self._waiting)[2].send()
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
