"""Tutorial 3: what overlap saves, in virtual time, and pictures of it."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

import ddplab
from ddplab import Fabric, Trace
from ddplab.demo import TRACE
from ddplab.simulator import plot_colours

from .plots import log_ticks, mark_guess, new_axes

RANKS = 2
CAP_MB = 5
LATENCY_NS = 20_000
RATES = (1, 10, 30, 100)
"""Networks of the pictures, in Gbit/s."""
Plan = tuple[tuple[int, ...], ...]


@cache
def v100() -> Trace:
    """ResNet-50 on one V100 with a batch of 32, from a public profile."""
    return Trace.load(TRACE)


def network(gbit_per_s: float) -> Fabric:
    """A ring whose ranks send at this rate, with 20 microseconds a hop."""
    return Fabric.from_alpha_beta(LATENCY_NS, gbit_per_s * 1e9 / 8)


def predict(gbit_per_s: float, **settings: Any) -> ddplab.Prediction:
    """The simulated iteration; an emulated V100 has no costs beyond those of its trace."""
    settings = {"bucket_cap_mb": CAP_MB} | settings
    return ddplab.predict(v100(), network(gbit_per_s), world_size=RANKS, assume=False, **settings)


@cache
def plan(order: Literal["ready", "reverse", "forward"] = "ready") -> Plan:
    """Buckets of 5 MiB in this order of the parameters."""
    return tuple(tuple(bucket) for bucket in predict(10, order=order).buckets)


@cache
def communication_ms(gbit_per_s: float) -> float:
    """Time of all all-reduces, one after the other."""
    sizes_bytes = [sum(v100().sizes_bytes[index] for index in bucket) for bucket in plan()]
    return sum(network(gbit_per_s).all_reduce_ns(size, RANKS) for size in sizes_bytes) / 1e6


def saved_in_virtual_time(gbit_per_s: float) -> float:
    """Milliseconds that overlap saves this project's reducer on two emulated V100s: the same on every machine.

    Without overlap, the first bucket needs the last gradients, and all others wait behind it.
    """
    without, with_overlap = (
        ddplab.emulate(v100(), network(gbit_per_s), world_size=RANKS, plan=buckets, assume=False).iteration_ns
        for buckets in (plan()[::-1], plan())
    )
    return float(without - with_overlap) / 1e6


def ready_curve(trace: Trace) -> tuple[NDArray[Any], NDArray[Any]]:
    """Moments as parts of the backward pass, and the part of all bytes that is ready by then."""
    one = trace.ranks[0].iterations[-1]
    moments = (np.array(one.ready_ns) - one.backward_start_ns) / (one.backward_end_ns - one.backward_start_ns)
    order = np.argsort(moments)
    return moments[order], np.cumsum(np.array(trace.sizes_bytes)[order]) / sum(trace.sizes_bytes)


def draw_ready(guess_percent: float | None) -> Axes:
    """Draw the part of ResNet-50's bytes that is ready over the backward pass, with a guess for half-time."""
    ax = new_axes()
    ax.axvline(0.5, color=plot_colours.QUIET, linestyle=":")
    moments, part = ready_curve(v100())
    ax.step([0, *moments], [0, *part], where="post", color=plot_colours.COMPUTATION)
    half = part[moments <= 0.5].max()
    ax.annotate(f"{half:.0%}", (0.5, half), (4, -14), textcoords="offset points", color=plot_colours.COMPUTATION)
    ax.set_xlabel("part of the backward pass")
    ax.set_ylabel("part of the bytes that is ready")
    mark_guess(ax, guess_percent, "%", x=0.5, scale=1 / 100)
    return ax


def draw_saved(saved_ms: Mapping[int, float], backward_ms: float, guesses_ms: Mapping[int, float | None]) -> Axes:
    """Draw what overlap saves by rate, below the limit.

    Args:
        saved_ms: By rate in Gbit/s.
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
    ax.plot(list(saved_ms), list(saved_ms.values()), "o", color=plot_colours.COMPUTATION, label="a real reducer")
    log_ticks(ax, RATES)
    ax.set_ylim(0, 90)
    ax.set_xlabel("network, Gbit/s")
    ax.set_ylabel("overlap saves, ms")
    ax.legend(frameon=False, fontsize=9, loc="lower left")
    for rate, guess_ms in guesses_ms.items():
        mark_guess(ax, guess_ms, "ms", x=rate)
    return ax
