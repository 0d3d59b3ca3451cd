"""Simulation: runs iterations with the closed form if speeds are constant, else with the event replay."""

from dataclasses import replace
from typing import Literal

import numpy as np

from ..workload.compute_times import Nanoseconds
from .closed_form import has_constant_speeds, solve
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
    """Return the duration of each iteration; shape: the leading axes of durations and costs."""
    latest: Nanoseconds = _run(engine_input, engine)[2].max(axis=-1)
    return latest


def _run(
    engine_input: EngineInput, engine: Engine, end_ns: Nanoseconds | None = None
) -> tuple[Nanoseconds, Nanoseconds, Nanoseconds]:
    """Run one iteration or many, with the arguments and results of `solve`; events take one fabric."""
    if engine == "closed_form" or (engine == "auto" and has_constant_speeds(engine_input)):
        return solve(engine_input, end_ns)
    several = engine_input.duration_ns.shape[:-2]
    if not several:
        return replay(engine_input, end_ns)
    one_fabric = replace(engine_input, cost_ns=engine_input.cost_ns.reshape(-1))
    runs = [replay(one_fabric.at(place)) for place in np.ndindex(several)]
    start_ns, done_ns, last_ns = (np.array(moments).reshape(*several, -1) for moments in zip(*runs, strict=True))
    return start_ns, done_ns, last_ns
