"""Tutorial 3: what overlap saves, in virtual time and by the clock, and pictures of it."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

import ddplab
import simulator
from ddplab.conformance.class_under_test import Subject
from ddplab.conformance.overlap import reducer_of
from ddplab.demo import TRACE
from ddplab.emulation.time_dilation import ScaleModel
from reference.launch import RankPool
from reference.trace import Trace
from simulator import plot_colours
from simulator.fabric import Fabric

from . import emulated
from .plots import log_ticks, mark_guess, new_axes

RANKS = 2
CAP_MB = 5
LATENCY_NS = 20_000
SLOW_MOTION = {1: 1.2, 10: 1.5, 30: 4, 100: 10}
"""By rate in Gbit/s, how many times as slowly everything runs by the clock: Gloo needs a millisecond a message."""
BYTE_SCALE = 1 / 16
"""Size of all tensors by the clock, and rate of the network, as fractions of the original's."""
OURS = "reference.data_parallel:DistributedDataParallel"
MINIMAL = {"off": "reference.minimal:BucketedDataParallel", "on": "reference.minimal:OverlappedDataParallel"}
Reducer = Literal["minimal", "ours"]
Plan = tuple[tuple[int, ...], ...]


@cache
def v100() -> Trace:
    """ResNet-50 on one V100 with a batch of 32, from a public profile."""
    return Trace.load(TRACE)


def network(gbit_per_s: float, slow_motion: float = 1, byte_scale: float = 1) -> Fabric:
    """A ring whose ranks send at this rate, with 20 microseconds a hop."""
    bytes_per_s = gbit_per_s * 1e9 / 8 * byte_scale / slow_motion
    return Fabric.from_alpha_beta(round(LATENCY_NS * slow_motion), bytes_per_s)


def predict(gbit_per_s: float, **settings: Any) -> simulator.Prediction:
    """The simulated iteration; an emulated V100 has no costs beyond those of its trace."""
    settings = {"bucket_cap_mb": CAP_MB} | settings
    return simulator.predict(v100(), network(gbit_per_s), world_size=RANKS, assume=False, **settings)


@cache
def plan(order: Literal["ready", "reverse", "forward"] = "ready") -> Plan:
    """Buckets of 5 MiB in this order of the parameters."""
    return tuple(tuple(bucket) for bucket in predict(10, order=order).buckets)


def communication_ms(gbit_per_s: float) -> float:
    """Time of all all-reduces, one after the other."""
    sizes_bytes = [sum(v100().sizes_bytes[index] for index in bucket) for bucket in plan()]
    return sum(network(gbit_per_s).all_reduce_ns(size, RANKS) for size in sizes_bytes) / 1e6


def saved_in_virtual_time(reducer: Reducer, gbit_per_s: float) -> float:
    """Milliseconds that overlap saves on two emulated V100s in virtual time: the same on every machine."""
    without, with_overlap = (_virtual_ms(reducer, overlap, gbit_per_s) for overlap in ("off", "on"))
    return without - with_overlap


def saved_by_the_clock(pool: RankPool, gbit_per_s: int) -> float | None:
    """Milliseconds that overlap saves by the clock with this project's reducer; None if this machine is too busy."""
    without, with_overlap = by_the_clock(
        pool, gbit_per_s, [_with_plan(_buckets(overlap)) for overlap in ("off", "on")]
    )
    return None if without is None or with_overlap is None else without - with_overlap


def by_the_clock(pool: RankPool, gbit_per_s: int, candidates: Sequence[emulated.Candidate]) -> list[float | None]:
    """Milliseconds of the fastest iteration of each candidate; None where this machine is too busy."""
    slow_motion = SLOW_MOTION[gbit_per_s]
    trace = ScaleModel(dilation=slow_motion, byte_scale=BYTE_SCALE).trace(v100(), iterations=1)
    slow = network(gbit_per_s, slow_motion, BYTE_SCALE)
    iterations = 1 if gbit_per_s == min(SLOW_MOTION) else 2  # one takes over a second
    times = pool.run(emulated.iteration_ms, trace, slow, candidates, 1, iterations)[0]
    return [min(one.ms) / slow_motion if one.keeps_up else None for one in times]


def in_order(order: Literal["reverse", "forward"]) -> emulated.Candidate:
    """This project's reducer with buckets in this order."""
    return _with_plan(plan(order))


def _with_plan(buckets: Plan) -> emulated.Candidate:
    return emulated.Candidate(OURS, {"plan": [list(bucket) for bucket in buckets]})


def _buckets(overlap: str) -> Plan:
    """Without overlap, the first bucket needs the last gradients, and all others wait behind it."""
    return plan() if overlap == "on" else plan()[::-1]


def _virtual_ms(reducer: Reducer, overlap: str, gbit_per_s: float) -> float:
    emulate = partial(ddplab.emulate, v100(), network(gbit_per_s), world_size=RANKS, assume=False)
    if reducer == "minimal":
        found = emulate(reducer=reducer_of(Subject(MINIMAL[overlap])), bucket_cap_mb=CAP_MB)
    else:
        found = emulate(plan=_buckets(overlap))
    return float(found.iteration_ns / 1e6)


def ready_curve(trace: Trace) -> tuple[NDArray[Any], NDArray[Any]]:
    """Moments as parts of the backward pass, and the part of all bytes that is ready by then."""
    one = trace.ranks[0].iterations[-1]
    moments = (np.array(one.ready_ns) - one.backward_start_ns) / (one.backward_end_ns - one.backward_start_ns)
    order = np.argsort(moments)
    return moments[order], np.cumsum(np.array(trace.sizes_bytes)[order]) / sum(trace.sizes_bytes)


def draw_ready(traces: Mapping[str, Trace], guess_percent: float | None) -> Axes:
    """Draw, by model, the part of all bytes that is ready over the backward pass, with a guess for half-time."""
    ax = new_axes()
    ax.axvline(0.5, color=plot_colours.QUIET, linestyle=":")
    for (name, trace), colour in zip(traces.items(), plot_colours.LINES, strict=False):
        moments, part = ready_curve(trace)
        ax.step([0, *moments], [0, *part], where="post", color=colour)
        ax.text(0.3, float(np.interp(0.3, moments, part)) + 0.04, name, color=colour, ha="right")
        half = part[moments <= 0.5].max()
        ax.annotate(f"{half:.0%}", (0.5, half), (4, -14), textcoords="offset points", color=colour)
    ax.set_xlabel("part of the backward pass")
    ax.set_ylabel("part of the bytes that is ready")
    mark_guess(ax, guess_percent, "%", x=0.5, scale=1 / 100)
    return ax


def draw_saved(
    virtual_ms: Mapping[tuple[Reducer, int], float],
    clock_ms: Mapping[int, float | None],
    backward_ms: float,
    guesses_ms: Mapping[int, float | None],
) -> Axes:
    """Draw what overlap saves by rate, below the limit.

    Args:
        virtual_ms: By reducer and rate in Gbit/s, in virtual time.
        clock_ms: By rate, by the clock; None: not measured.
        backward_ms: Duration of the backward pass.
        guesses_ms: The learner's, by rate; None: no guess.
    """
    ax = new_axes(7, 3.6)
    rates = np.geomspace(0.8, 120, 100)
    communication = [communication_ms(rate) for rate in rates]
    ax.plot(rates, np.full_like(rates, backward_ms), ":", color=plot_colours.QUIET)
    ax.plot(rates, communication, ":", color=plot_colours.QUIET)
    ax.text(115, backward_ms + 1.5, "backward pass", color=plot_colours.QUIET, ha="right")
    ax.text(11, 75, "communication", color=plot_colours.QUIET)
    ax.plot(rates, np.minimum(backward_ms, communication), color=plot_colours.INK, linewidth=1, label="the limit")
    for reducer, marker, colour in (("ours", "o", plot_colours.COMPUTATION), ("minimal", "x", plot_colours.EXPOSED)):
        points = {rate: ms for (of, rate), ms in virtual_ms.items() if of == reducer}
        ax.plot(
            list(points), list(points.values()), marker, color=colour, markersize=8, label=f"{reducer}, virtual time"
        )
    points = {rate: ms for rate, ms in clock_ms.items() if ms is not None}
    style: dict[str, Any] = {"color": plot_colours.COPIES, "markersize": 4, "label": "ours, by the clock"}
    ax.plot(list(points), list(points.values()), "s", **style)
    log_ticks(ax, list(SLOW_MOTION))
    ax.set_ylim(0, 90)
    ax.set_xlabel("network, Gbit/s")
    ax.set_ylabel("overlap saves, ms")
    ax.legend(frameon=False, fontsize=9, loc="lower left")
    for rate, guess_ms in guesses_ms.items():
        mark_guess(ax, guess_ms, "ms", x=rate)
    return ax


def draw_order(longer_percent: Mapping[int, float | None]) -> Axes:
    """Draw how much longer an iteration takes in forward order: simulated, and measured by the clock by rate."""
    ax = new_axes(7, 2.8)
    rates = np.geomspace(0.8, 120, 100)
    times = {
        order: np.array([predict(rate, order=order).iteration_ns for rate in rates])
        for order in ("forward", "reverse")
    }
    simulated = 100 * (times["forward"] / times["reverse"] - 1)
    ax.plot(rates, simulated, color=plot_colours.INK, linewidth=1)
    measured = {rate: percent for rate, percent in longer_percent.items() if percent is not None}
    ax.plot(list(measured), list(measured.values()), "o", color=plot_colours.COPIES)
    ax.fill_between(rates, 0, simulated, where=(simulated > 10).tolist(), color=plot_colours.SMALL)
    ax.text(float(rates[simulated.argmax()]), simulated.max() / 3, "order costs\nover 10 %", ha="center")
    log_ticks(ax, list(SLOW_MOTION))
    ax.set_xlabel("network, Gbit/s")
    ax.set_ylabel("forward order takes longer, %")
    return ax
