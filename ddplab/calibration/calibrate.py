"""Calibrates this machine: measures, on real ranks, the costs that predictions use.

Measurements are repeated; the fabric holds their median and spread. Only collectives, copies and
the model's computation without data parallelism are measured, never a training run that is to be predicted.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

import torch

from ..reference.bucketing import MIB
from ..reference.launch import Progress, RankPool, no_progress
from ..simulator.fabric import Fabric, Linear, Processor, Sharing, Timing
from ..simulator.fabric.link_sharing import LARGEST_FACTOR, LEAST_FACTOR, relative_weights
from ..simulator.fabric.processor_costs import HookCost
from ..simulator.schedule.comm_hook_messages import NO_HOOK, named_hook
from .collective_times import Samples, gradient_bytes, time_collectives
from .comm_hook_costs import HookParts, time_hook
from .reducer_costs import time_copies, time_search_and_rebuild
from .repeated_timing import fit_linear, median_ns, relative_spread
from .slow_downs import fit_slow_down, time_contention

SIZES_BYTES = [4 * 1024 * 4**power for power in range(7)] + [32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB]
"""4 KiB to 16 MiB by factors of 4, then by factors of 2."""
REPEATS = 7
COLLECTIVE_REPEATS = 6
"""Repetitions of a collective per repetition of anything else, because most collectives are short and vary much."""


def sizes_up_to(gradient_bytes: int, backend: str = "gloo") -> list[int]:
    """Return the message sizes to measure: those in `SIZES_BYTES` below `gradient_bytes`, and `gradient_bytes`.

    With NCCL, at least all of `SIZES_BYTES`: they take seconds, and other models may be predicted from them too.
    """
    if backend == "nccl" and gradient_bytes <= SIZES_BYTES[-1]:
        return SIZES_BYTES
    return [size for size in SIZES_BYTES if size < gradient_bytes] + [max(4, gradient_bytes - gradient_bytes % 4)]


def calibrate(
    pool: RankPool,
    model: str,
    *,
    hooks: Sequence[str] = (),
    sizes_bytes: Iterable[int] | None = None,
    repeats: int = REPEATS,
    on_progress: Progress = no_progress,
) -> Fabric:
    """Measure collectives, and the processor costs of collectives and of the reducer, on the ranks of `pool`.

    The ranks share this machine as they will in training. The computation of `model` runs next to collectives to
    measure its slow-down, and its gradients are those of the `hooks`, which have the names that `named_hook` takes.
    Without `sizes_bytes`, messages are of up to all gradients. Of `repeats` repetitions, the median is kept.

    Raises:
        RankError: A rank failed.
        ValueError: There is no such hook.
    """
    for name in hooks:
        named_hook(name)  # raises an error before anything is measured
    if sizes_bytes is None:
        sizes_bytes = sizes_up_to(pool.run(gradient_bytes, model)[0], pool.backend)
    collectives = measure_collectives(pool, sizes_bytes, repeats, on_progress)
    fabric = with_slowdowns(pool, model, collectives, repeats=repeats, on_progress=on_progress)
    return measure_hooks(pool, fabric, hooks, model, repeats=repeats, on_progress=on_progress)


def measure_collectives(
    pool: RankPool, sizes_bytes: Iterable[int], repeats: int, on_progress: Progress = no_progress
) -> Fabric:
    """Measure the costs that do not depend on the model: collectives, copies and launches."""
    sizes = sorted(sizes_bytes)
    samples = pool.run(time_collectives, sizes, COLLECTIVE_REPEATS * repeats, on_progress=on_progress)[0]
    world_size = pool.world_size
    return Fabric(
        all_reduce=_timings(world_size, samples["all_reduce"]),
        broadcast=_timings(world_size, samples["broadcast"]),
        library=pool.backend,
        sharing=_sharing(samples),
        processor=Processor(**pool.run(time_copies, repeats)[0]),
        source=f"measured: {pool.backend}, {world_size} rank{'s' * (world_size > 1)} on one "
        f"{platform.machine()} machine, torch {torch.__version__}",
    )


def with_slowdowns(
    pool: RankPool, model: str, fabric: Fabric, *, repeats: int = REPEATS, on_progress: Progress = no_progress
) -> Fabric:
    """Measure the costs that depend on the model: slow-down, search for unused parameters, rebuild of buckets."""
    measured: dict[str, Any] = {}
    if pool.world_size > 1:  # a single rank sends nothing, so there is no slow-down
        times_by_rank = pool.run(time_contention, model, repeats + 1, on_progress=on_progress)
        measured["slow_down"], measured["slow_down_error"] = fit_slow_down(times_by_rank)
    searching, rebuilding = zip(*pool.run(time_search_and_rebuild, model, repeats), strict=True)
    measured["search_ns_per_parameter"] = median(chain(*searching))
    measured["rebuild_ns"] = median_ns(chain(*rebuilding))
    source = f"{fabric.source}; slow-down, search and rebuild of {model}"
    return fabric.with_processor(**measured).model_copy(update={"source": source})


def measure_hooks(
    pool: RankPool,
    fabric: Fabric,
    hooks: Sequence[str],
    model: str,
    *,
    repeats: int = REPEATS,
    on_progress: Progress = no_progress,
) -> Fabric:
    """Measure the computing time of comm hooks for buckets of the model's gradients, without their collectives.

    The cost of PowerSGD depends on the shapes of the gradients. A repeated name is measured once.
    """
    costs = []
    for name in dict.fromkeys(named_hook(name).name for name in hooks):
        if name == NO_HOOK.name:
            costs.append(HookCost(name=name))
            continue
        by_rank = pool.run(time_hook, name, model, repeats, on_progress=on_progress)
        buckets = [bucket for of_rank in by_rank for bucket in of_rank]
        parts = {part: _fit_part(buckets, part) for part in HookParts._fields}
        parts["decompress"] = parts["decompress"].times(1 / named_hook(name).gathered(pool.world_size))
        costs.append(HookCost(name=name, **parts))
    return fabric.with_processor(hooks=tuple(costs))


def _sharing(samples: Samples) -> tuple[Sharing, ...]:
    alone_ns, two_ns, beside_larger_ns = (
        {size: median_ns(taken) for size, taken in samples[name].items()}
        for name in ("all_reduce", "two", "beside_larger")
    )
    weights = relative_weights(alone_ns, two_ns, beside_larger_ns)
    factors = {size: min(max(ns / alone_ns[size], LEAST_FACTOR), LARGEST_FACTOR) for size, ns in two_ns.items()}
    return tuple(
        Sharing(size_bytes=size, factor=factors[size], weight=weight)
        for size, weight in zip(sorted(two_ns), weights, strict=True)
    )


def _timings(world_size: int, samples: Mapping[int, Sequence[int]]) -> tuple[Timing, ...]:
    return tuple(
        Timing(world_size=world_size, size_bytes=size, ns=median_ns(times), spread=relative_spread(times))
        for size, times in samples.items()
    )


def _fit_part(buckets: Sequence[tuple[int, Sequence[HookParts]]], part: str) -> Linear:
    """Fit a line to the times of one part by bytes; a part that the hook does not have costs nothing."""
    samples: dict[int, list[int]] = {}
    for size, calls in buckets:
        for call in calls:
            if (ns := getattr(call, part)) is not None:
                samples.setdefault(size, []).append(ns)
    return fit_linear(samples)
