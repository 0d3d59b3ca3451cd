"""Simulation: by a closed form where one is known, else by the event replay.

The closed form computes the timeline of the event replay by a recurrence. All ranks follow the schedule together, so
each instruction is one operation on arrays over the ranks, and over any number of iterations on leading axes. What a
rank has computed is its progress, and a clock says when it has come so far: progress is time if speeds are constant.
Collectives that run one at a time and slow computation down have a clock too: a collective starts after its last
launch, so the speeds at which the ranks compute up to a launch are known before it.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..schedule.schedule import Compute, LaunchCollective
from ..workload.compute_times import Nanoseconds
from .event_replay import FACTOR_BITS, FULL_SPEED, PROGRESS_BITS, replay
from .timeline import EngineInput, Timeline

Engine = Literal["auto", "events", "closed_form"]
"""The event replay, the closed form for constant speeds, or "auto": the closed form if there is one, else replay."""

SHORT_NS, SLOW = 2**40, 4.0
"""Iterations of 18 minutes, and slow-downs, from which on progress times a factor needs more than 64 bits."""


def simulate(engine_input: EngineInput, engine: Engine = "auto", *, ends_only: bool = False) -> Timeline:
    """Simulate one iteration, or as many as there are on the leading axes of the input.

    With `ends_only`, only the ends of iterations are needed: ends of other computing steps may be too small.

    Raises:
        ValueError: The closed form was asked for, but speeds are not constant.
    """
    constant = has_constant_speeds(engine_input)
    if engine == "closed_form" and not constant:
        raise ValueError("closed form: expected constant speeds, but the fabric has slow-downs; use engine='auto'")
    if engine != "events" and (constant or _slows_only_computation(engine_input)):
        return solve(engine_input, ends_only=ends_only)
    several = engine_input.duration_ns.shape[:-2]  # () for one iteration, whose only place is ()
    each = [replay(engine_input.at(place)) for place in np.ndindex(several)]
    moments = (np.reshape(one, (*several, *one[0].shape)) for one in zip(*each, strict=True))
    return Timeline(engine_input, *moments)


def latencies_ns(engine_input: EngineInput, engine: Engine = "auto") -> Nanoseconds:
    """Return the duration of each iteration; shape: the leading axes of durations."""
    latest: Nanoseconds = simulate(engine_input, engine, ends_only=True).end_ns[..., -1].max(axis=-1)
    return latest


def solve(engine_input: EngineInput, *, ends_only: bool = False) -> Timeline:
    """Execute the instructions of one iteration, or of many, in order, for all ranks at once; see `simulate`."""
    schedule, duration_ns = engine_input.schedule, engine_input.duration_ns
    iterations, last = duration_ns.shape[:-2], len(schedule.instructions) - 1
    cost_ns = np.broadcast_to(engine_input.cost_ns, (*iterations, len(schedule.collectives)))
    now, progress = np.zeros((2, *duration_ns.shape[:-1]), np.int64)
    end = np.zeros((*now.shape, last + 1), np.int64)
    start, done = np.empty((2, *cost_ns.shape), np.int64)
    clock = (_Time if has_constant_speeds(engine_input) else _SlowedTime)(engine_input)
    step = 0
    for place, instruction in enumerate(schedule.instructions):
        is_step = isinstance(instruction, Compute)
        if is_step:
            progress = progress + (duration_ns[..., step] << clock.bits)
            step += 1
        if not is_step or not ends_only or place == last:
            now = np.maximum(now, clock.reaches(progress))
        if isinstance(instruction, LaunchCollective):
            number = instruction.collective
            start[..., number], done[..., number] = clock.run(now.max(axis=-1), cost_ns[..., number])
        elif not isinstance(instruction, Compute):
            waited = np.maximum(now, done[..., instruction.collective, None])
            if instruction.only is None:
                now, progress = waited, clock.at(waited)
            else:
                met = engine_input.meets[instruction.only]
                now = np.where(met, waited, now)
                progress = np.where(met, clock.at(now), progress)
        end[..., place] = now
    return Timeline(engine_input, end, start, done)


def _slows_only_computation(engine_input: EngineInput) -> bool:
    """Whether collectives run one at a time, and the iterations are so short that progress fits into 64 bits."""
    slowest = np.max(engine_input.slow_down)
    if engine_input.concurrency > 1 or slowest >= SLOW:
        return False
    duration_ns, cost_ns = engine_input.duration_ns, engine_input.cost_ns
    longest_ns = duration_ns.sum(axis=-1, dtype=float).max() + cost_ns.sum(axis=-1, dtype=float).max()
    return bool(longest_ns * slowest < SHORT_NS)


class _Time:
    """The clock at constant speeds, with the slots in which collectives run; progress is in nanoseconds."""

    bits = 0

    def __init__(self, engine_input: EngineInput) -> None:
        slots = (*engine_input.duration_ns.shape[:-2], engine_input.concurrency)
        self._free = np.zeros(slots, np.int64)  # when each is free again

    def run(self, launched_ns: Nanoseconds, cost_ns: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
        """Run a collective after its last launch in the first free slot; returns its start and end."""
        start_ns = np.maximum(launched_ns, self._free.min(axis=-1))
        done_ns = start_ns + cost_ns
        np.put_along_axis(self._free, self._free.argmin(axis=-1)[..., None], np.expand_dims(done_ns, -1), axis=-1)
        return start_ns, done_ns

    def reaches(self, progress: NDArray[np.int64]) -> Nanoseconds:
        return progress

    def at(self, moment_ns: Nanoseconds) -> NDArray[np.int64]:
        return moment_ns


class _SlowedTime:
    """The clock if computation is slower while a collective runs, one at a time; what `ProgressClock` is for events.

    *Edges* are the starts and ends of collectives, between which the speed is constant: after an edge in an odd place
    computation is slow. Their moments, and the progress until each, lie one row of iterations after the other.
    """

    bits = PROGRESS_BITS

    def __init__(self, engine_input: EngineInput) -> None:
        self._shape = engine_input.duration_ns.shape[:-1]
        rows, edges = int(np.prod(self._shape[:-1])), 2 * len(engine_input.schedule.collectives) + 2
        self._factor = (np.broadcast_to(engine_input.slow_down, rows)[:, None] * FULL_SPEED).astype(np.int64)
        self._edge_ns, self._progress = np.full((2, rows * edges), np.iinfo(np.int64).max)
        self._last = np.arange(0, rows * edges, edges)  # the last edge that is known of each row
        self._edge_ns[self._last] = self._progress[self._last] = 0
        self._passed = np.repeat(self._last[:, None], self._shape[-1], axis=1)  # the last edge passed by each rank

    def run(self, launched_ns: Nanoseconds, cost_ns: Nanoseconds) -> tuple[Nanoseconds, Nanoseconds]:
        """Run a collective after its last launch and the one before; returns its start and end."""
        before_ns, progress = self._edge_ns[self._last], self._progress[self._last]
        start_ns = np.maximum(launched_ns.reshape(-1), before_ns)
        progress = progress + ((start_ns - before_ns) << PROGRESS_BITS)
        done_ns = start_ns + cost_ns.reshape(-1)
        self._edge_ns[self._last + 1], self._progress[self._last + 1] = start_ns, progress
        self._last = self._last + 2
        gained = self._slowed(cost_ns.reshape(-1, 1))[:, 0]
        self._edge_ns[self._last], self._progress[self._last] = done_ns, progress + gained
        return start_ns.reshape(launched_ns.shape), done_ns.reshape(launched_ns.shape)

    def reaches(self, progress: NDArray[np.int64]) -> Nanoseconds:
        """Return the first whole nanosecond with a progress of at least `progress`.

        Progress is rounded up, so it is at least p from the first nanosecond on at which the exact progress exceeds
        p - 1. The last edge with less than p is before that moment.
        """
        below = progress.reshape(self._passed.shape) - 1
        passed = self._pass(self._progress, below)
        missing = below - self._progress.take(passed)
        high, low = missing >> FACTOR_BITS, missing & (FULL_SPEED - 1)
        rest = ((low >> 16) * self._factor + ((low & 0xFFFF) * self._factor >> 16)) >> 16
        slowed_ns = (high * self._factor + rest) >> PROGRESS_BITS  # missing * factor >> 52, in 64 bits
        own_ns = 1 + np.where(passed & 1, slowed_ns, missing >> PROGRESS_BITS)
        moment_ns: Nanoseconds = (self._edge_ns.take(passed) + own_ns).reshape(self._shape)
        return moment_ns

    def at(self, moment_ns: Nanoseconds) -> NDArray[np.int64]:
        """Return the progress at a moment."""
        moment_ns = moment_ns.reshape(self._passed.shape)
        passed = self._pass(self._edge_ns, moment_ns)
        own_ns = moment_ns - self._edge_ns.take(passed)
        gained = np.where(passed & 1, self._slowed(own_ns), own_ns << PROGRESS_BITS)
        return (self._progress.take(passed) + gained).reshape(self._shape)

    def _pass(self, edges: NDArray[np.int64], sought: NDArray[np.int64]) -> NDArray[np.int64]:
        """Move each rank on to the last edge that is not above what it seeks."""
        while np.count_nonzero(ahead := edges.take(self._passed + 1) <= sought):
            self._passed = self._passed + ahead
        return self._passed

    def _slowed(self, elapsed_ns: Nanoseconds) -> NDArray[np.int64]:
        """Return the progress beside a collective, elapsed << 52 over the factor rounded up, in 64 bits."""
        whole, rest = np.divmod(elapsed_ns << PROGRESS_BITS, self._factor)
        middle, rest = np.divmod(rest << 28, self._factor)
        progress: NDArray[np.int64] = (whole << FACTOR_BITS) + (middle << 4) - (-rest << 4) // self._factor
        return progress


def has_constant_speeds(engine_input: EngineInput) -> bool:
    """Whether the speed of computing and of each collective is the same whatever else runs."""
    shares = engine_input.concurrency > 1 and any(share.slow_down > 1 for share in engine_input.sharing)
    return bool(np.all(engine_input.slow_down == 1)) and not shares
