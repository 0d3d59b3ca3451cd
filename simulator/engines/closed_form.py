"""Simulation: by a closed form where one is known, else by the event replay.

The closed form computes the timeline of the event replay by a recurrence. All ranks follow the schedule together, so
each instruction is one operation on arrays over the ranks, and over any number of iterations on leading axes. Many
iterations in which collectives run one at a time and slow computation down have a recurrence too: a collective starts
after its last launch, so the speeds at which the ranks compute up to a launch are known before it.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..schedule.schedule import Compute, LaunchCollective
from ..workload.compute_times import Floats, Nanoseconds
from .engine_input import EngineInput
from .event_replay import FACTOR_BITS, FULL_SPEED, PROGRESS_BITS, replay
from .timeline import Timeline

Engine = Literal["auto", "events", "closed_form"]
"""The event replay, the closed form for constant speeds, or "auto": arrays where they serve, else the replay."""

MANY = 5
"""Least number of iterations for which arrays are faster than as many replays."""
SHORT_NS, SLOW = 2**40, 4.0
"""Iterations of 18 minutes, and slow-downs, from which on progress times a factor needs more than 64 bits."""


def simulate(engine_input: EngineInput, engine: Engine = "auto") -> Timeline:
    """Simulate one iteration."""
    run = solve if _has_recurrence(engine_input, engine) else replay
    return Timeline(engine_input, *run(engine_input))


def latencies_ns(engine_input: EngineInput, engine: Engine = "auto") -> Nanoseconds:
    """Return the duration of each iteration; shape: the leading axes of durations."""
    several = engine_input.duration_ns.shape[:-2]
    if _has_recurrence(engine_input, engine):
        last_ns = solve(engine_input)[0][..., -1]
    elif engine == "auto" and _fits_arrays(engine_input):
        last_ns = _solve_slowed(engine_input)
    elif several:
        each_ns = [latencies_ns(engine_input.at(place), engine) for place in np.ndindex(several)]
        return np.reshape(each_ns, several)
    else:
        last_ns = replay(engine_input)[0][:, -1]
    latest: Nanoseconds = last_ns.max(axis=-1)
    return latest


def _has_recurrence(engine_input: EngineInput, engine: Engine) -> bool:
    return engine == "closed_form" or (engine == "auto" and has_constant_speeds(engine_input))


def solve(engine_input: EngineInput) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
    """Execute the instructions of one iteration, or of many, in order, for all ranks at once.

    Each collective starts at `max(last launch, first free slot)` and runs for its cost.

    Returns:
        The end of each instruction, shape [..., ranks, instructions], and start and end of each collective, shape
        [..., collectives]; the leading axes are those of durations.

    Raises:
        ValueError: Speeds are not constant; use the event replay.
    """
    if not has_constant_speeds(engine_input):
        raise ValueError("closed form: expected constant speeds, but the fabric has slow-downs; use engine='auto'")
    schedule, duration_ns, cost_ns = engine_input.schedule, engine_input.duration_ns, engine_input.cost_ns
    iterations = duration_ns.shape[:-2]
    now = np.zeros(duration_ns.shape[:-1], np.int64)
    end = np.empty((*now.shape, len(schedule.instructions)), np.int64)
    start, done = (np.empty((*iterations, len(schedule.collectives)), np.int64) for _ in range(2))
    free = np.zeros((*iterations, engine_input.concurrency), np.int64)  # when each slot is free again
    step = 0
    for place, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Compute):
            now = now + duration_ns[..., step]
            step += 1
        elif isinstance(instruction, LaunchCollective):
            number = instruction.collective
            start[..., number] = np.maximum(now.max(axis=-1), free.min(axis=-1))
            done[..., number] = start[..., number] + cost_ns[..., number]
            np.put_along_axis(free, free.argmin(axis=-1)[..., None], done[..., number, None], axis=-1)
        else:
            waited = np.maximum(now, done[..., instruction.collective, None])
            now = waited if instruction.only is None else np.where(engine_input.meets[instruction.only], waited, now)
        end[..., place] = now
    return end, start, done


def _fits_arrays(engine_input: EngineInput) -> bool:
    """Whether there are many short iterations in which collectives run one at a time."""
    duration_ns, slow_down = engine_input.duration_ns, engine_input.slow_down
    slowest = np.max(slow_down)
    if engine_input.concurrency > 1 or duration_ns.ndim != 3 or len(duration_ns) < MANY or slowest >= SLOW:
        return False
    longest_ns = duration_ns.sum(axis=-1, dtype=float).max() + engine_input.cost_ns.sum(axis=-1, dtype=float).max()
    return bool(longest_ns * slowest < SHORT_NS)


def _solve_slowed(engine_input: EngineInput) -> Nanoseconds:
    """Return when each rank ends iterations in which collectives, which run one at a time, slow computation down."""
    schedule, duration_ns = engine_input.schedule, engine_input.duration_ns
    cost_ns = np.broadcast_to(engine_input.cost_ns, (len(duration_ns), len(schedule.collectives)))
    clock = _SlowedProgress(duration_ns.shape[:-1], len(schedule.collectives), engine_input.slow_down)
    now, progress = np.zeros((2, *duration_ns.shape[:-1]), np.int64)
    done, step = np.empty(cost_ns.shape, np.int64), 0
    for instruction in schedule.instructions:
        if isinstance(instruction, Compute):
            progress = progress + (duration_ns[..., step] << PROGRESS_BITS)
            step += 1
            continue
        now = np.maximum(now, clock.reaches(progress))
        number = instruction.collective
        if isinstance(instruction, LaunchCollective):
            done[:, number] = clock.run(now.max(axis=-1), cost_ns[:, number])
        else:
            met = True if instruction.only is None else engine_input.meets[instruction.only]
            now = np.where(met, np.maximum(now, done[:, number, None]), now)
            progress = np.where(met, clock.at(now), progress)
    last_ns: Nanoseconds = np.maximum(now, clock.reaches(progress))
    return last_ns


class _SlowedProgress:
    """Progress of computation in many iterations, slower while a collective runs; what `ProgressClock` is for one."""

    def __init__(self, shape: tuple[int, ...], collectives: int, slow_down: float | Floats) -> None:
        self._factor = (np.broadcast_to(slow_down, shape[0])[:, None] * FULL_SPEED).astype(np.int64)
        self._rows, self._edges = np.arange(shape[0])[:, None], 0
        self._edge_ns, self._progress = np.full((2, shape[0], 2 * collectives + 2), np.iinfo(np.int64).max)
        self._edge_ns[:, 0] = self._progress[:, 0] = 0  # then at each start, in odd places, and at each end
        self._place = np.zeros(shape, np.int64)  # the last edge that each rank has passed

    def run(self, launched_ns: Nanoseconds, cost_ns: Nanoseconds) -> Nanoseconds:
        """Run a collective after its last launch and the one before; returns its end."""
        before_ns, progress = self._edge_ns[:, self._edges], self._progress[:, self._edges]
        start_ns = np.maximum(launched_ns, before_ns)
        progress = progress + ((start_ns - before_ns) << PROGRESS_BITS)
        done_ns: Nanoseconds = start_ns + cost_ns
        gained = self._slowed(cost_ns[:, None])[:, 0]
        both = slice(self._edges + 1, self._edges + 3)
        self._edge_ns[:, both] = np.stack([start_ns, done_ns], axis=-1)
        self._progress[:, both] = np.stack([progress, progress + gained], axis=-1)
        self._edges += 2
        return done_ns

    def reaches(self, progress: NDArray[np.int64]) -> Nanoseconds:
        """Return the first whole nanosecond with a progress of at least `progress`."""
        place = self._pass(self._progress, progress - 1)
        missing = progress - self._progress[self._rows, place] - 1
        high, low = missing >> FACTOR_BITS, missing & (FULL_SPEED - 1)
        rest = ((low >> 16) * self._factor + ((low & 0xFFFF) * self._factor >> 16)) >> 16
        slowed_ns = (high * self._factor + rest) >> PROGRESS_BITS  # missing * factor >> 52, in 64 bits
        own_ns = 1 + np.where(place % 2, slowed_ns, missing >> PROGRESS_BITS)
        moment_ns: Nanoseconds = self._edge_ns[self._rows, place] + own_ns
        return moment_ns

    def at(self, moment_ns: Nanoseconds) -> NDArray[np.int64]:
        """Return the progress at a moment."""
        place = self._pass(self._edge_ns, moment_ns)
        own_ns = moment_ns - self._edge_ns[self._rows, place]
        progress: NDArray[np.int64] = self._progress[self._rows, place]
        return progress + np.where(place % 2, self._slowed(own_ns), own_ns << PROGRESS_BITS)

    def _pass(self, edges: NDArray[np.int64], sought: NDArray[np.int64]) -> NDArray[np.int64]:
        """Move each rank on to the last edge that is not above what it seeks."""
        while (ahead := edges[self._rows, self._place + 1] <= sought).any():
            self._place = self._place + ahead
        return self._place

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
