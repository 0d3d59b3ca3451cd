"""Tutorial 2: how long an iteration takes under any data-parallel class, in virtual time, and pictures of it."""

from collections.abc import Mapping
from functools import cache

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

import simulator
from ddplab import emulate
from ddplab.conformance.class_under_test import Subject
from ddplab.conformance.overlap import reducer_of
from ddplab.demo import TRACE
from figures.traces_and_fabrics import gloo
from reference.trace import Trace
from simulator import plot_colours
from simulator.fabric import Fabric

from .own_code import forget
from .plots import log_ticks, mark_guess, new_axes

RANKS = 2
GBIT_PER_S = 10
SMALLEST_BYTES = 4
CAPS_MB = (0.1, 0.3, 1, 3, 5, 10, 25, 50, 98)
"""Bucket caps of the picture; the last one holds all gradients of ResNet-50."""


@cache
def v100() -> Trace:
    """ResNet-50 on one V100 with a batch of 32, from a public profile."""
    return Trace.load(TRACE)


def gloo_latency_us() -> float:
    """Latency of a hop of Gloo's ring in microseconds, as calibrated over links of 10 Gbit/s."""
    return gloo().all_reduce_ns(SMALLEST_BYTES, RANKS) / RANKS / 1e3


def network(latency_us: float | None = None) -> Fabric:
    """A ring of links of 10 Gbit/s with this latency of a hop; None: Gloo's."""
    hop_us = gloo_latency_us() if latency_us is None else latency_us
    return Fabric.from_alpha_beta(round(1000 * hop_us), GBIT_PER_S * 1e9 / 8)


def computation_ms() -> float:
    """Milliseconds of an iteration without communication."""
    one = v100().ranks[0].iterations[0]
    return (one.end_ns - one.forward_start_ns) / 1e6


def all_reduces_ms(*sizes_bytes: int) -> float:
    """Milliseconds of all-reduces of these sizes, one after the other."""
    return sum(network().all_reduce_ns(size, RANKS) for size in sizes_bytes) / 1e6


def iteration_ms(name: str, cap_mb: float = 25) -> float:
    """Milliseconds of an iteration on two V100s under the class `module:class`, in virtual time.

    Args:
        name: The class; if it has a method `average_gradients`, this is called after each backward pass.
        cap_mb: Bucket cap, if the class has buckets.

    Raises:
        ValueError: There is no such class.
        RankError: The class raised an error, or its ranks launch different collectives.
    """
    forget()
    emulated: simulator.Prediction = emulate(
        v100(), network(), world_size=RANKS, reducer=reducer_of(Subject(name)), bucket_cap_mb=cap_mb, assume=False
    )
    return emulated.iteration_ns / 1e6


def predict(cap_mb: float, latency_us: float | None = None) -> simulator.Prediction:
    """The predicted iteration, with buckets in reverse order of registration."""
    return simulator.predict(
        v100(), network(latency_us), world_size=RANKS, bucket_cap_mb=cap_mb, order="reverse", assume=False
    )


def draw_steps(times_ms: Mapping[str, float], guesses_ms: Mapping[str, float | None]) -> Axes:
    """Draw one bar for each class: computation, then exposed communication; with the learner's guesses.

    Args:
        times_ms: Milliseconds of an iteration, by name.
        guesses_ms: Guesses for some of the names; None: no guess.
    """
    ax = new_axes(7, 4)
    computed, names = computation_ms(), list(times_ms)
    ax.barh(names, [computed] * len(names), 0.6, color=plot_colours.COMPUTATION, label="computation")
    exposed = [ms - computed for ms in times_ms.values()]
    ax.barh(names, exposed, 0.6, left=computed, color=plot_colours.EXPOSED, label="exposed communication")
    for place, ms in enumerate(times_ms.values()):
        ax.text(ms + 5, place, f"{ms:.0f} ms", va="center")
    ax.legend(frameon=False, loc="lower right")
    ax.set_ylim(len(names) - 0.4, -0.8)
    ax.set_xlabel("iteration, ms")
    for name, guess_ms in guesses_ms.items():
        mark_guess(ax, guess_ms, "ms", y=names.index(name) - 0.45)
    return ax


def draw_caps(latency_us: float) -> Axes:
    """Draw the predicted iteration by bucket cap, for one latency of a hop in microseconds."""
    ax = new_axes(7, 2.8)
    predictions = [predict(cap_mb, latency_us) for cap_mb in CAPS_MB]
    times_ms = [one.iteration_ns / 1e6 for one in predictions]
    ax.plot(CAPS_MB, times_ms, "o-", color=plot_colours.COMPUTATION)
    for cap_mb, ms, one in zip(CAPS_MB, times_ms, predictions, strict=True):
        if cap_mb in (0.1, 5, 25, 98):
            words = f"{len(one.buckets)} bucket{'s' * (len(one.buckets) > 1)}"
            ax.annotate(words, (cap_mb, ms), (0, 8), textcoords="offset points", ha="center")
    log_ticks(ax, CAPS_MB)
    ax.margins(x=0.1, y=0.2)
    ax.set_xlabel("bucket cap, MiB")
    ax.set_ylabel("predicted iteration, ms")
    return ax


def show_caps(latency_us: float) -> None:
    """Draw and show the picture now, as a slider requires; arguments as of `draw_caps`."""
    draw_caps(latency_us)
    plt.show()
