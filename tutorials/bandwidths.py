"""Tutorial 6: what comm hooks cost on a V100, the bandwidths at which they shorten an iteration, and a picture."""

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod, sqrt

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from ddplab import CommHook, Fabric, Trace, models, simulator
from ddplab.simulator import plot_colours
from ddplab.simulator.fabric import Linear
from ddplab.simulator.inputs_with_default_costs import COPY_START_NS, memory_of
from ddplab.simulator.schedule.comm_hook_messages import named_hook
from figures.traces_and_fabrics import resnet50

from .plots import mark_guess, opened

RANK = 4
"""Rank of PowerSGD's approximation."""
POWER_SGD = f"power_sgd:{RANK}"
WORLD_SIZE = 16
LATENCY_NS = 10_000
COSTS = ("compress", "recompress", "decompress")
"""Computation of a hook: before the first all-reduce, between both, and after the last."""
COLOURS = {
    "none": plot_colours.INK,
    "fp16": plot_colours.COPIES,
    "bf16": plot_colours.COMPUTATION,
    POWER_SGD: plot_colours.EXPOSED,
}


@cache
def shapes() -> tuple[tuple[int, ...], ...]:
    """Shapes of the parameters of ResNet-50."""
    return tuple(tuple(parameter.shape) for parameter in models.build("resnet50-224")[0].parameters())


def matrices() -> list[tuple[int, int]]:
    """Rows and columns of the parameters that PowerSGD compresses."""
    return [(shape[0], prod(shape[1:])) for shape in shapes() if len(shape) > 1]


def gradient_bytes() -> int:
    """Bytes of all gradients of ResNet-50."""
    return 4 * sum(map(prod, shapes()))


def _with_costs(name: str, costs: Sequence[tuple[float, float]]) -> CommHook:
    linear = {
        part: Linear(fixed_ns=fixed, ns_per_byte=per_byte)
        for part, (fixed, per_byte) in zip(COSTS, costs, strict=True)
    }
    return named_hook(name).model_copy(update=linear)


@cache
def v100() -> Trace:
    """ResNet-50 on a V100 with the shapes of its parameters, which PowerSGD needs and the profile lacks."""
    trace = resnet50()
    parameters = tuple(
        one.model_copy(update={"shape": shape})
        for one, shape in zip(trace.workload.parameters, shapes(), strict=True)
    )
    return trace.model_copy(update={"workload": trace.workload.model_copy(update={"parameters": parameters})})


def hooks_of_v100() -> tuple[dict[str, CommHook], dict[str, float]]:
    """Hooks with the least cost that a V100's data sheet allows, and the milliseconds of each in an iteration.

    Every byte that a step reads or writes moves at the memory's rate, and every kernel costs its start.
    """
    buckets = len(simulator.predict(v100(), network(10), world_size=WORLD_SIZE, assume=False).buckets)
    per_bucket = len(matrices()) / buckets
    bytes_per_s = memory_of("NVIDIA V100")
    assert bytes_per_s is not None
    bytes_per_ns = bytes_per_s / 1e9
    half = ((2, 10 / 4), (0, 0), (1, 6 / 4))
    moved = {  # by step: kernels in a bucket, and bytes read and written for each byte of the gradients
        "fp16": half,
        "bf16": half,
        POWER_SGD: ((2 * per_bucket, 16 / 4), (2 * per_bucket, 4 / 4), (3 * per_bucket, 24 / 4)),
    }
    hooks, total_ms = {"none": named_hook("none")}, {}
    for name, steps in moved.items():
        costs = [(kernels * COPY_START_NS, moves / bytes_per_ns) for kernels, moves in steps]
        hooks[name] = _with_costs(name, costs)
        total_ms[name] = sum(buckets * fixed + per_byte * gradient_bytes() for fixed, per_byte in costs) / 1e6
    return hooks, total_ms


def dearer(hook: CommHook, factor: float) -> CommHook:
    """The hook with computation that takes `factor` times as long, and the same messages."""
    return hook.model_copy(update={part: getattr(hook, part).times(factor) for part in COSTS})


def network(gbit_per_s: float) -> Fabric:
    """A ring of links of this rate, with 10 microseconds a hop."""
    return Fabric.from_alpha_beta(alpha_ns=LATENCY_NS, bytes_per_s=gbit_per_s * 1e9 / 8)


def iteration_ms(hook: CommHook, gbit_per_s: float) -> float:
    """Milliseconds of an iteration of 16 V100s."""
    one = simulator.predict(
        v100(), network(gbit_per_s), world_size=WORLD_SIZE, hook=hook, bucket_cap_mb=25, assume=False
    )
    return one.iteration_ns / 1e6


def crossover(hook: CommHook, other: CommHook, low: float = 0.5, high: float = 400.0) -> float | None:
    """The Gbit/s up to which `hook` is faster than `other`, within 1 %; None if one is faster everywhere."""

    def lead(gbit_per_s: float) -> float:
        return iteration_ms(other, gbit_per_s) - iteration_ms(hook, gbit_per_s)

    if lead(low) <= 0 or lead(high) >= 0:
        return None
    while high / low > 1.01:
        middle = sqrt(low * high)
        low, high = (middle, high) if lead(middle) > 0 else (low, middle)
    return sqrt(low * high)


def draw_bandwidths(
    hooks: Mapping[str, CommHook], crossovers: Mapping[str, float | None], guess_gbit_per_s: float | None
) -> Figure:
    """Draw iterations over the bandwidth: above in ms, below as a multiple of the iteration without a hook.

    Args:
        hooks: By name, with "none".
        crossovers: By hook, the bandwidth up to which the hook is faster than none.
        guess_gbit_per_s: The learner's guess of PowerSGD's crossover.
    """
    bandwidths = np.geomspace(0.5, 400, 15)
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 5), layout="constrained", sharex=True)
    plain = np.array([iteration_ms(hooks["none"], gbit) for gbit in bandwidths])
    for name, hook in hooks.items():
        dashes = "--" if name == "bf16" else "-"
        times = np.array([iteration_ms(hook, gbit) for gbit in bandwidths])
        above.plot(bandwidths, times, label=name, color=COLOURS[name], linestyle=dashes)
        below.plot(bandwidths, times / plain, color=COLOURS[name], linestyle=dashes)
        if name != "none":
            free = np.array([iteration_ms(named_hook(name), gbit) for gbit in bandwidths])
            below.plot(bandwidths, free / plain, ":", color=COLOURS[name], linewidth=1)
        if (gbit := crossovers.get(name)) is not None:
            below.plot(gbit, 1, "o", color=COLOURS[name], zorder=5)
            place = (0, {"fp16": 6, "bf16": -14}.get(name, -26))
            below.annotate(f"{gbit:.0f}", (gbit, 1), place, textcoords="offset points", ha="center", fontsize=9)
    above.set_xscale("log")
    below.set_xticks([1, 10, 100], ["1", "10", "100"])
    below.set_xlabel("link, Gbit/s")
    for ax in (above, below):
        opened(ax).set_ylim(bottom=0)
    below.set_ylim(top=1.25)  # room for the guess
    mark_guess(below, guess_gbit_per_s, "Gbit/s", y=1.15, colour=COLOURS[POWER_SGD])
    above.set_ylabel("iteration, ms")
    below.set_ylabel("iteration / iteration without hook")
    above.legend(frameon=False)
    return figure
