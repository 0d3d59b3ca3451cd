"""Tutorial 10: what comm hooks cost, the bandwidths at which they shorten an iteration, and pictures of both."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod, sqrt
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

import simulator
from ddplab import models
from figures.traces_and_fabrics import resnet50
from reference.trace import Trace
from simulator import plot_colours
from simulator.fabric import Fabric, Linear
from simulator.schedule.comm_hook_messages import CommHook, named_hook
from simulator.workload.default_gpu_costs import COPY_START_NS, memory_of

from .plots import mark_guess, opened

RANK = 4
"""Rank of PowerSGD's approximation."""
POWER_SGD = f"power_sgd:{RANK}"
WORLD_SIZE = 16
USUAL: dict[str, Any] = {"world_size": WORLD_SIZE, "bucket_cap_mb": 25, "assume": False}
"""Settings of the predictions."""
LATENCY_NS = 10_000
BUCKET_BYTES = 25 * 2**20
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


def _processor_seconds(*steps: Callable[[], object]) -> NDArray[np.float64]:
    """Processor time of each step, the least of three rounds; waiting for a core does not count."""
    rounds = []
    for _ in range(3):
        moments = [time.thread_time()]
        for step in steps:
            step()
            moments.append(time.thread_time())
        rounds.append(np.diff(moments))
    return np.asarray(np.min(rounds, axis=0))


def _cast_seconds(dtype: torch.dtype) -> tuple[float, float, float]:
    bucket = torch.randn(BUCKET_BYTES // 4)
    half = bucket.to(dtype)
    before, after = _processor_seconds(lambda: bucket.to(dtype).div_(WORLD_SIZE), lambda: bucket.copy_(half))
    return before / BUCKET_BYTES, 0.0, after / BUCKET_BYTES


def _power_sgd_seconds() -> tuple[float, float, float]:
    total = np.zeros(3)
    for rows, columns in matrices():
        matrix, error, approximation = torch.randn(3, rows, columns)
        q, p = torch.randn(columns, RANK), torch.randn(rows, RANK)

        def compress() -> None:
            matrix.add_(error)  # noqa: B023  # called within the loop
            torch.mm(matrix, q, out=p)  # noqa: B023

        def recompress() -> None:
            p.copy_(torch.linalg.qr(p).Q)  # noqa: B023
            torch.mm(matrix.T, p, out=q)  # noqa: B023

        def decompress() -> None:
            torch.mm(p, q.T, out=approximation)  # noqa: B023
            torch.sub(matrix, approximation, out=error)  # noqa: B023
            matrix.copy_(approximation)  # noqa: B023

        total += _processor_seconds(compress, recompress, decompress)
    before, between, after = total / gradient_bytes()
    return before, between, after


def hook_seconds() -> dict[str, tuple[float, float, float]]:
    """By hook, seconds of its computation for a byte of the gradients, on one core of this machine; see `COSTS`.

    The steps are those of `reference/comm_hooks/compress.py` and `powersgd.py`, on a bucket of 25 MiB and on all
    matrices of ResNet-50.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks, and so that the thread's time is all time
    try:
        return {
            "fp16": _cast_seconds(torch.float16),
            "bf16": _cast_seconds(torch.bfloat16),
            POWER_SGD: _power_sgd_seconds(),
        }
    finally:
        torch.set_num_threads(threads)


def hooks_from(seconds: Mapping[str, Sequence[float]]) -> dict[str, CommHook]:
    """Hooks of the simulator by name with such costs, and "none"."""
    hooks = {"none": named_hook("none")}
    for name, of_hook in seconds.items():
        hooks[name] = _with_costs(name, [(0.0, 1e9 * one) for one in of_hook])
    return hooks


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
    buckets = len(simulator.predict(v100(), network(10), **USUAL).buckets)
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


def iteration_ms(trace: Trace, hook: CommHook, gbit_per_s: float) -> float:
    """Milliseconds of an iteration of 16 ranks."""
    one = simulator.predict(trace, network(gbit_per_s), hook=hook, **USUAL)
    return one.iteration_ns / 1e6


def backward_ms(trace: Trace) -> float:
    """Milliseconds of the backward pass of the last recorded iteration of rank 0."""
    one = trace.ranks[0].iterations[-1]
    return (one.backward_end_ns - one.backward_start_ns) / 1e6


def crossover(trace: Trace, hook: CommHook, other: CommHook, low: float = 0.5, high: float = 400.0) -> float | None:
    """The Gbit/s up to which `hook` is faster than `other`, within 1 %; None if one is faster everywhere."""

    def lead(gbit_per_s: float) -> float:
        return iteration_ms(trace, other, gbit_per_s) - iteration_ms(trace, hook, gbit_per_s)

    if lead(low) <= 0 or lead(high) >= 0:
        return None
    while high / low > 1.01:
        middle = sqrt(low * high)
        low, high = (middle, high) if lead(middle) > 0 else (low, middle)
    return sqrt(low * high)


Machines = Mapping[str, tuple[Trace, Mapping[str, CommHook]]]
"""By machine, its trace and its hooks by name, "none" first."""


def draw_bandwidths(
    machines: Machines, crossovers: Mapping[tuple[str, str], float | None], guess_gbit_per_s: float | None = None
) -> Figure:
    """Draw iterations over the bandwidth: above in ms, below as a multiple of the iteration without a hook.

    Args:
        machines: What to draw.
        crossovers: By machine and hook, the bandwidth up to which the hook is faster than none.
        guess_gbit_per_s: The learner's guess of PowerSGD's crossover on the first machine.
    """
    bandwidths = np.geomspace(0.5, 400, 15)
    figure, axes = plt.subplots(2, len(machines), figsize=(7, 5), layout="constrained", sharex=True, squeeze=False)
    for (above, below), (machine, (trace, hooks)) in zip(axes.T, machines.items(), strict=True):
        plain = np.array([iteration_ms(trace, hooks["none"], gbit) for gbit in bandwidths])
        for name, hook in hooks.items():
            dashes = "--" if name == "bf16" else "-"
            times = np.array([iteration_ms(trace, hook, gbit) for gbit in bandwidths])
            above.plot(bandwidths, times, label=name, color=COLOURS[name], linestyle=dashes)
            below.plot(bandwidths, times / plain, color=COLOURS[name], linestyle=dashes)
            if name != "none":
                free = np.array([iteration_ms(trace, named_hook(name), gbit) for gbit in bandwidths])
                below.plot(bandwidths, free / plain, ":", color=COLOURS[name], linewidth=1)
            if (gbit := crossovers.get((machine, name))) is not None:
                below.plot(gbit, 1, "o", color=COLOURS[name], zorder=5)
                place = (0, {"fp16": 6, "bf16": -14}.get(name, -26))
                word = f"{gbit:.0f}" if gbit > 100 else f"{gbit:.2g}"
                below.annotate(word, (gbit, 1), place, textcoords="offset points", ha="center", fontsize=9)
        above.set_xscale("log")
        above.set_title(machine, loc="left", fontsize=10)
        below.set_xticks([1, 10, 100], ["1", "10", "100"])
        below.set_xlabel("link, Gbit/s")
        for ax in (above, below):
            opened(ax).set_ylim(bottom=0)
        below.set_ylim(top=1.25)  # room for the guess
    mark_guess(axes[1, 0], guess_gbit_per_s, "Gbit/s", y=1.15, colour=COLOURS[POWER_SGD])
    axes[0, 0].set_ylabel("iteration, ms")
    axes[1, 0].set_ylabel("iteration / iteration without hook")
    axes[0, 0].legend(frameon=False)
    return figure
