"""Simulation: by a closed form if speeds are constant, else by the event replay.

The closed form computes the timeline of the event replay by a recurrence. All ranks follow the schedule together, so
each instruction is one operation on arrays over the ranks, and over any number of iterations on leading axes.
"""

from typing import Literal

import numpy as np

from ..schedule.schedule import Compute, LaunchCollective
from ..workload.compute_times import Nanoseconds
from .engine_input import EngineInput
from .event_replay import replay
from .timeline import Timeline

Engine = Literal["auto", "events", "closed_form"]
"""The event replay, the closed form, or "auto": the closed form if speeds are constant, else the event replay."""


def simulate(engine_input: EngineInput, engine: Engine = "auto") -> Timeline:
    """Simulate one iteration."""
    end_ns = np.empty((len(engine_input.ranks), len(engine_input.schedule.instructions)), np.int64)
    start_ns, done_ns, _last = _run(engine_input, engine, end_ns)
    return Timeline(engine_input, end_ns, start_ns, done_ns)


def latencies_ns(engine_input: EngineInput, engine: Engine = "auto") -> Nanoseconds:
    """Return the duration of each iteration; shape: the leading axes of durations."""
    latest: Nanoseconds = _run(engine_input, engine)[2].max(axis=-1)
    return latest


def _run(
    engine_input: EngineInput, engine: Engine, end_ns: Nanoseconds | None = None
) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
    """Run one iteration or many, with the arguments and results of `solve`."""
    if engine == "closed_form" or (engine == "auto" and has_constant_speeds(engine_input)):
        return solve(engine_input, end_ns)
    several = engine_input.duration_ns.shape[:-2]
    if not several:
        return replay(engine_input, end_ns)
    runs = [replay(engine_input.at(place)) for place in np.ndindex(several)]
    start_ns, done_ns, last_ns = (np.array(moments).reshape(*several, -1) for moments in zip(*runs, strict=True))
    return start_ns, done_ns, last_ns


def solve(
    engine_input: EngineInput, end_ns: Nanoseconds | None = None
) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
    """Execute the instructions in order, for all ranks at once.

    Each collective starts at `max(last launch, first free slot)` and runs for its cost.

    Args:
        engine_input: One iteration, or many.
        end_ns: Receives the end of each instruction; shape [..., ranks, instructions].

    Returns:
        Start and end of each collective, shape [..., collectives], and the end of each rank, shape [..., ranks];
        the leading axes are those of durations.

    Raises:
        ValueError: Speeds are not constant; use the event replay.
    """
    if not has_constant_speeds(engine_input):
        raise ValueError("closed form: expected constant speeds, but the fabric has slow-downs; use engine='auto'")
    schedule, duration_ns, cost_ns = engine_input.schedule, engine_input.duration_ns, engine_input.cost_ns
    iterations = duration_ns.shape[:-2]
    now = np.zeros(duration_ns.shape[:-1], np.int64)
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
        if end_ns is not None:
            end_ns[..., place] = now
    return start, done, now


def has_constant_speeds(engine_input: EngineInput) -> bool:
    """Whether the speed of computing and of each collective is the same whatever else runs."""
    shares = engine_input.concurrency > 1 and any(share.slow_down > 1 for share in engine_input.sharing)
    return engine_input.slow_down == 1 and not shares
