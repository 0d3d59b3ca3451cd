"""Machine: ranks that compute and collectives that run at the same time, at speeds that depend on each other.

Each collective is a simpy process: it starts when its last rank has launched it and its process group has a free
slot, runs, and wakes the ranks that wait for it. The caller supplies the ranks.

Computation and collectives progress at speeds that change whenever a collective or a rank starts or stops.
"""

from collections.abc import Collection, Generator
from heapq import heappop, heappush
from math import fsum
from typing import Any, NamedTuple

import numpy as np
import simpy
from numpy.typing import NDArray

from ..fabric import LinkShare
from ..workload.compute_times import Nanoseconds

Process = Generator[simpy.Event, Any, None]
Integers = NDArray[Any]
"""An array of int64 or of Python integers."""


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
        done: The event of its end.
    """

    __slots__ = ("cost", "done", "done_ns", "launched", "start_ns")

    def __init__(self, env: simpy.Environment, cost: CollectiveCost) -> None:
        self.cost = cost
        self.launched = 0
        self.start_ns = self.done_ns = 0
        self.done = env.event()

    def on_start(self) -> None:
        """Called when it starts to run."""


class Machine:
    """Computation of all ranks, which has one common speed, and the collectives between the ranks.

    Args:
        queues: Process groups, as indices.
        concurrency: Collectives of one group that run at the same time.
        slows_computation: Whether any collective slows computation down.
        lingers_ns: Time for which computing stays slowed after the last collective has finished, unless another
            collective starts.

    Attributes:
        env: The simulation; its time is in integer nanoseconds.
        computation: Progress of all ranks' computation.
    """

    def __init__(
        self, queues: Collection[int], *, concurrency: int, slows_computation: bool, lingers_ns: int
    ) -> None:
        self.env = simpy.Environment()
        self.computation = ProgressClock(self.env)
        self._slots = {queue: simpy.Resource(self.env, concurrency) for queue in queues}
        self._slows_computation = slows_computation
        self._lingers_ns = lingers_ns
        self._lingers_until_ns = 0
        self._computing_ranks = 0
        self._running: dict[RunningCollective, ProgressClock] = {}

    @property
    def now_ns(self) -> int:
        """The current time."""
        return int(self.env.now)

    def add_computing_ranks(self, change: int) -> None:
        """Register that a rank starts (1) or stops (-1) computing."""
        before = self._computing_ranks
        self._computing_ranks += change
        if not before or not self._computing_ranks:
            self._update_collective_speeds()

    def launched_by_all(self, collective: RunningCollective) -> None:
        """Run a collective as soon as computation has reached `collective.launched` and its group has a free slot."""
        self.env.process(self._run(collective))

    def _run(self, collective: RunningCollective) -> Process:
        yield self.computation.reaches(collective.launched)
        with self._slots[collective.cost.queue].request() as slot:
            yield slot
            collective.start_ns = self.now_ns
            collective.on_start()
            if collective.cost.cost_ns:
                yield from self._transfer(collective)
        collective.done_ns = self.now_ns
        collective.done.succeed()

    def _transfer(self, collective: RunningCollective) -> Process:
        clock = self._running[collective] = ProgressClock(self.env)
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
            self.env.timeout(self._lingers_ns).callbacks.append(self._stop_lingering)
        else:
            self.computation.slow_down(1.0)

    def _stop_lingering(self, _event: simpy.Event) -> None:
        """Return computation to full speed, unless another collective has started since the timeout was set."""
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
