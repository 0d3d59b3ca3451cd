"""Event replay: simulates one iteration by discrete events, and is the definition of a prediction.

Each rank is a simpy process that follows the schedule on a `machine`, which runs the collectives.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from reference.files.value_ranges import LARGEST

from ..schedule.schedule import Compute, Condition, Launch, Schedule, Wait
from ..workload.compute_times import Nanoseconds
from .engine_input import EngineInput
from .machine import PROGRESS_BITS, CollectiveCost, Machine, Process, ProgressClock, RunningCollective
from .timeline import Timeline


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
        self.machine = machine_of(engine_input)
        self.alike = _rows_that_wait_alike(engine_input)
        self.wait_end_ns: list[list[int]] = [[] for _ in engine_input.ranks]
        self.latency_ns = 0
        self.collectives = [RunningCollective(self.machine.env, cost) for cost in costs_of(engine_input)]
        self.launches_missing = [len(engine_input.ranks)] * len(self.collectives)

    def run(self) -> None:
        # Ranks that compute least come first: processes then resume roughly in memory order, which is faster.
        ranks: dict[int, Process] = {}
        for segments, rows in self.alike:
            computed_ns = segments.computed_by_stop(self.engine_input.duration_ns[rows])
            for row, by_stop in zip(rows, computed_ns.tolist(), strict=True):
                ranks[row] = self._rank(row, segments, by_stop)
        for row in self.engine_input.duration_ns.sum(axis=1).argsort().tolist():
            self.machine.env.process(ranks[row])
        self.machine.env.run()
        if self.machine.now_ns > LARGEST:
            raise ValueError(
                "expected cycles of sync_every iterations to take at most 146 years, got "
                f"{self.machine.now_ns:.3g} ns with slow-downs; check the factors of the fabric"
            )

    def timeline(self) -> Timeline:
        duration_ns = self.engine_input.duration_ns
        end_ns = np.empty((len(duration_ns), len(self.engine_input.schedule.instructions)), np.int64)
        for segments, rows in self.alike:
            wait_end_ns = np.array([self.wait_end_ns[row] for row in rows], np.int64)
            end_ns[rows] = segments.ends(wait_end_ns, duration_ns[rows], self.machine.computation)
        start_ns, done_ns = (
            np.array([getattr(one, name) for one in self.collectives], np.int64) for name in ("start_ns", "done_ns")
        )
        return Timeline(self.engine_input, end_ns, start_ns, done_ns)

    def _rank(self, row: int, segments: "ScheduleSegments", computed_by_stop: list[int]) -> Process:
        """Execute the schedule, with one event for all computing up to the next wait."""
        machine, computation = self.machine, self.machine.computation
        wait_end_ns = self.wait_end_ns[row]
        progress = computation.progress()
        for stop, computed_ns in zip(segments.stops, computed_by_stop, strict=True):
            reached = progress + (computed_ns << PROGRESS_BITS)
            if isinstance(stop, Launch):
                self._register_launch(stop.collective, reached)
                continue
            if computed_ns:
                machine.add_computing_ranks(1)
                yield computation.reaches(reached)
                machine.add_computing_ranks(-1)
            if isinstance(stop, Wait):
                yield self.collectives[stop.collective].done
                wait_end_ns.append(machine.now_ns)
                progress = computation.progress()
        self.latency_ns = machine.now_ns  # the last rank overwrites the others

    def _register_launch(self, number: int, progress: int) -> None:
        """Register that a rank launches a collective when computation reaches `progress`."""
        collective = self.collectives[number]
        collective.launched = max(collective.launched, progress)
        self.launches_missing[number] -= 1
        if not self.launches_missing[number]:
            self.machine.launched_by_all(collective)


def _rows_that_wait_alike(engine_input: EngineInput) -> "list[tuple[ScheduleSegments, list[int]]]":
    """Return the rows of ranks that wait for the same collectives, with the schedule cut at those waits."""
    rows = range(len(engine_input.ranks))
    used = {wait.only for wait in engine_input.schedule.instructions if isinstance(wait, Wait) and wait.only}
    alike: dict[frozenset[Condition], list[int]] = {}
    for row in rows:
        met = frozenset(condition for condition in used if engine_input.meets[condition][row])
        alike.setdefault(met, []).append(row)
    return [(segments_of(engine_input.schedule, met), members) for met, members in alike.items()]


def machine_of(engine_input: EngineInput) -> Machine:
    """Return the machine that runs the collectives of an engine input."""
    return Machine(
        set(engine_input.queues),
        concurrency=engine_input.concurrency,
        slows_computation=engine_input.slowdowns is not None,
        lingers_ns=engine_input.lingers_ns,
    )


def costs_of(engine_input: EngineInput) -> list[CollectiveCost]:
    """Return the cost of each collective of an engine input."""
    slowdowns = engine_input.slowdowns
    factors = [((),) * len(engine_input.queues)] * 2 if slowdowns is None else slowdowns
    costs_ns: list[int] = engine_input.cost_ns.tolist()
    return list(map(CollectiveCost, costs_ns, engine_input.queues, engine_input.sharing, *factors))


class ScheduleSegments:
    """A schedule cut into segments: the instructions from one wait to the next.

    Args:
        schedule: The schedule.
        met: Conditions that a rank meets; it passes waits under other conditions without waiting.

    Attributes:
        stops: The launches and waits in order, followed by None for the end.
    """

    def __init__(self, schedule: Schedule, met: frozenset[Condition] = frozenset()) -> None:
        instructions = [*schedule.instructions, None]
        is_compute = np.array([isinstance(one, Compute) for one in instructions])
        self._is_wait = np.array([isinstance(one, Wait) and one.only in (None, *met) for one in instructions])
        self._is_stop = self._is_wait | np.array([one is None or isinstance(one, Launch) for one in instructions])
        stops = zip(instructions, self._is_stop.tolist(), strict=True)
        self.stops: list[Any] = [one for one, is_stop in stops if is_stop]
        self._waits_before = self._is_wait.cumsum() - self._is_wait
        # By instruction: computing steps `first` to `last - 1` of its segment, up to and including the instruction.
        self._last = is_compute.cumsum()
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
"""Segments by schedule and met conditions, cached because all iterations of a prediction share one schedule."""


def _partial_sums(numbers: Nanoseconds, first: Nanoseconds, last: Nanoseconds) -> Nanoseconds:
    """Sum `numbers[:, first:last]` of each row for each pair of `first` and `last`."""
    up_to = np.zeros((len(numbers), numbers.shape[1] + 1), np.int64)
    numbers.cumsum(axis=1, out=up_to[:, 1:])
    sums: Nanoseconds = up_to[:, last] - up_to[:, first]
    return sums
