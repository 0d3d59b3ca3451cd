"""Event replay: simulates one iteration by discrete events on simpy, and is the definition of a prediction.

Each rank is a process that follows the schedule on a `Cluster`. Each collective is a process too: it starts when its
last rank has launched it and the process group, a resource, has a free slot, runs, and wakes the ranks that wait for
it. Computation and collectives progress at speeds that change whenever a collective starts or ends.
"""

from collections.abc import Generator
from heapq import heappop, heappush
from math import fsum
from typing import Any, NamedTuple

import numpy as np
import simpy

from ...reference.files.value_ranges import LARGEST
from ..fabric import LinkShare
from ..schedule.schedule import Compute, Condition, LaunchCollective
from ..workload.compute_times import Nanoseconds
from .timeline import EngineInput

Process = Generator[simpy.Event, Any, None]


def replay(engine_input: EngineInput) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
    """Simulate one iteration; the results are those of `closed_form.solve`."""
    cluster = Cluster(concurrency=engine_input.concurrency, slow_down=float(engine_input.slow_down))
    costs = zip(engine_input.cost_ns.tolist(), engine_input.sharing, strict=True)
    collectives = [RunningCollective(cluster.env, CollectiveCost(*cost)) for cost in costs]
    launches_missing = [len(engine_input.ranks)] * len(collectives)

    def follow(duration_ns: list[int], met: set[Condition], ends_ns: list[int]) -> Process:
        """Follow the schedule. Between two waits progress adds up exactly, so steps do not add up rounding errors."""
        durations, progress = iter(duration_ns), 0
        for instruction in engine_input.schedule.instructions:
            if isinstance(instruction, Compute):
                if own_ns := next(durations):
                    progress += own_ns << PROGRESS_BITS
                    yield cluster.computation.reaches(progress)
            elif isinstance(instruction, LaunchCollective):
                number = instruction.collective
                launches_missing[number] -= 1
                if not launches_missing[number]:
                    cluster.launched_by_all(collectives[number])
            elif instruction.only is None or instruction.only in met:
                yield collectives[instruction.collective].done
                progress = cluster.computation.progress()
            ends_ns.append(cluster.now_ns)

    ends_ns: list[list[int]] = [[] for _ in engine_input.ranks]
    for row, duration_ns in enumerate(engine_input.duration_ns.tolist()):
        met = {condition for condition, ranks in engine_input.meets.items() if ranks[row]}
        cluster.env.process(follow(duration_ns, met, ends_ns[row]))
    cluster.env.run()
    if cluster.now_ns > LARGEST:
        raise ValueError(
            "expected cycles of sync_every iterations to take at most 146 years, got "
            f"{cluster.now_ns:.3g} ns with slow-downs; check the factors of the fabric"
        )
    start_ns, done_ns = np.array([(one.start_ns, one.done_ns) for one in collectives], np.int64).reshape(-1, 2).T
    return np.array(ends_ns, np.int64), start_ns, done_ns


class CollectiveCost(NamedTuple):
    """How long a collective runs, and how it and the others that run at the same time slow each other down."""

    cost_ns: int  #: duration while no other collective runs
    sharing: LinkShare
    """How much the others that run slow it down. One with twice its weight slows it down by twice as much."""


class RunningCollective:
    """A collective that was launched by at least one rank."""

    __slots__ = ("cost", "done", "done_ns", "start_ns")

    def __init__(self, env: simpy.Environment, cost: CollectiveCost) -> None:
        self.cost = cost
        self.start_ns = self.done_ns = 0  #: when it started to run, and when it finished; 0 before
        self.done = env.event()  #: its end


class Cluster:
    """Computation of all ranks, which has one common speed, and the collectives between the ranks.

    Args:
        concurrency: Collectives that run at the same time; they start in launch order.
        slow_down: Factor on the time of computing while any collective runs.
    """

    def __init__(self, *, concurrency: int, slow_down: float = 1.0) -> None:
        self.env = simpy.Environment()  #: the simulation; its time is in whole nanoseconds
        self.computation = ProgressClock(self.env)  #: progress of all ranks' computation
        self._slots = simpy.Resource(self.env, concurrency)
        self._slow_down = slow_down
        self._running: dict[RunningCollective, ProgressClock] = {}

    @property
    def now_ns(self) -> int:
        """The current time."""
        return int(self.env.now)

    def launched_by_all(self, collective: RunningCollective) -> None:
        """Run a collective as soon as a slot is free."""
        self.env.process(self._run(collective))

    def _run(self, collective: RunningCollective) -> Process:
        with self._slots.request() as slot:
            yield slot
            collective.start_ns = self.now_ns
            if collective.cost.cost_ns:
                clock = self._running[collective] = ProgressClock(self.env)
                self._update_speeds()
                yield clock.reaches(collective.cost.cost_ns << PROGRESS_BITS)
                del self._running[collective]
                self._update_speeds()
            collective.done_ns = self.now_ns
            collective.done.succeed()

    def _update_speeds(self) -> None:
        """Set the speeds of computation and of the running collectives after a collective has started or ended."""
        self.computation.slow_down(self._slow_down if self._running else 1.0)
        weights = fsum(one.cost.sharing.weight for one in self._running)  # the same in any order
        for collective, clock in self._running.items():
            slow_down, weight = collective.cost.sharing
            clock.slow_down(max(1.0, 1.0 + (slow_down - 1.0) * (weights / weight - 1.0)))


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

    The simulation's time is in whole nanoseconds. Progress is rounded up, and `reaches(p)` is the first whole
    nanosecond with a progress of at least p. Both are monotone, so steps end in order. A step ends at its exact end
    rounded up to a whole nanosecond, or 1 ns earlier if the exact end exceeds that earlier nanosecond by less than
    the clock's rounding error: 2**-20 ns for each change of speed, plus 2**-32 of the time.
    """

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._changed_ns, self._shown, self._factor = int(env.now), 0, FULL_SPEED  # at the last change of speed
        self._waiting: list[tuple[int, int, simpy.Event]] = []
        self._entered = 0
        self._alarm: simpy.Event | None = None

    def progress(self) -> int:
        """Progress since the start of the clock, in units of 2**-20 ns at full speed."""
        elapsed_ns = int(self._env.now) - self._changed_ns
        return self._shown - (-elapsed_ns << PROGRESS_PER_FACTOR) // self._factor

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
        if stored != self._factor:
            self._shown, self._changed_ns, self._factor = self.progress(), int(self._env.now), stored
            self._set_alarm()

    def _set_alarm(self) -> None:
        """Set an alarm for the earliest waiting event, in place of the previous alarm."""
        if self._waiting:
            missing = self._waiting[0][0] - self._shown
            moment_ns = self._changed_ns + ((missing - 1) * self._factor >> PROGRESS_PER_FACTOR) + 1
            self._alarm = self._env.timeout(max(0, moment_ns - int(self._env.now)))
            self._alarm.callbacks.append(self._ring)

    def _ring(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:  # replaced by a later one
            return
        progress = self.progress()
        while self._waiting and self._waiting[0][0] <= progress:
            heappop(self._waiting)[2].succeed()
        self._set_alarm()
