"""Calibrate: measure on this machine what a prediction may use, with real ranks and real collectives.

Everything is measured repeatedly: the median is kept, and the spread of the repetitions with it. Nothing here sees
a training run that is to be predicted: only collectives, copies, and the model's computation and gradients without
data parallelism.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import median

import torch

from reference.bucketing import MIB
from reference.launch import Progress, RankPool, no_progress

from ..fabric import Fabric, Linear, Processor, Sharing, Timing
from ..fabric.processor import HookCost
from ..schedule.comm_hooks import NO_HOOK, named_hook
from .collectives import gradient_bytes, time_collectives
from .hook_costs import Parts, time_hook
from .reducer_costs import time_copies, time_preparation
from .slow_downs import contention, lingering, time_contention
from .timing import fit, median_ns, outliers, spread

SIZES_BYTES = [4 * 1024 * 4**power for power in range(7)] + [32 * MIB, 64 * MIB, 128 * MIB]
"""4 KiB to 16 MiB by factors of 4, then by factors of 2."""

REPEATS = 7
OFTEN = 6
"""Collectives are measured so many times as often, unless they take long: most are short and vary much."""


def sizes_up_to(gradient_bytes: int) -> list[int]:
    """Message sizes to measure for models with so many bytes of gradients: `SIZES_BYTES`, ended by the whole."""
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
    """Measure collectives and their cost to the processor on the ranks of `pool`.

    Args:
        pool: Ranks that share this machine as they will in training.
        model: Whose computation runs against collectives for the slow-downs; as for `--model`.
        hooks: Comm hooks to measure with the model's gradients, by the names that `named_hook` takes.
        sizes_bytes: Message sizes to measure. None: up to all gradients of the model in one.
        repeats: Measurements of each; the median is kept.
        on_progress: TargetRun of every repetition.

    Raises:
        RankError: A rank failed.
        ValueError: No such hook.
    """
    for name in hooks:
        named_hook(name)  # a mistake is told before anything is measured
    if sizes_bytes is None:
        sizes_bytes = sizes_up_to(pool.run(gradient_bytes, model)[0])
    collectives = measure_collectives(pool, sizes_bytes, repeats, on_progress)
    fabric = with_slowdowns(pool, model, collectives, repeats=repeats, on_progress=on_progress)
    return measure_hooks(pool, fabric, hooks, model, repeats=repeats, on_progress=on_progress)


def measure_collectives(pool: RankPool, sizes_bytes: Iterable[int], repeats: int, on_progress: Progress) -> Fabric:
    """The part of a calibration that does not depend on the model: collectives, copies, launches."""
    sizes = sorted(sizes_bytes)
    samples = pool.run(time_collectives, sizes, OFTEN * repeats, on_progress=on_progress)[0]
    costs = pool.run(time_copies, repeats)[0]
    world_size = pool.world_size
    network = "" if pool.link_rate is None else f", links of {pool.link_rate / 1e9:g} Gbit/s"
    return Fabric(
        all_reduce=_timings(world_size, samples["all_reduce"]),
        broadcast=_timings(world_size, samples["broadcast"]),
        library=pool.backend,
        sharing=tuple(_sharing(size, samples["two"][size], samples["all_reduce"][size]) for size in sizes),
        processor=Processor(**costs),
        source=f"measured: {pool.backend}, {world_size} ranks on one {platform.machine()} machine{network}, "
        f"torch {torch.__version__}",
    )


def with_slowdowns(
    pool: RankPool, model: str, fabric: Fabric, *, repeats: int = REPEATS, on_progress: Progress = no_progress
) -> Fabric:
    """The part that does: how much its computation and collectives slow each other down, search and rebuild."""
    contended = pool.run(time_contention, model, repeats + 1, on_progress=on_progress)
    searching, rebuilding = zip(*pool.run(time_preparation, model, repeats), strict=True)
    rows = contention(contended)
    lingers_ns, lingers_error_ns = lingering(
        contended, rows, fabric.processor.launch_ns, lambda size: fabric.all_reduce_ns(size, pool.world_size)
    )
    measured = {
        "contention": rows,
        "lingers_ns": lingers_ns,
        "lingers_error_ns": lingers_error_ns,
        "search_ns_per_parameter": median(chain(*searching)),
        "rebuild_ns": median_ns(chain(*rebuilding)),
    }
    return fabric.model_copy(
        update={
            "processor": fabric.processor.model_copy(update=measured),
            "source": f"{fabric.source}; slow-downs, search and rebuild of {model}",
        }
    )


def measure_hooks(
    pool: RankPool,
    fabric: Fabric,
    hooks: Sequence[str],
    model: str,
    *,
    repeats: int = REPEATS,
    on_progress: Progress = no_progress,
) -> Fabric:
    """The fabric with what comm hooks compute; each is measured once, see `measure_hook`."""
    named = dict.fromkeys(named_hook(name).name for name in hooks)
    costs = tuple(measure_hook(pool, name, model, repeats=repeats, on_progress=on_progress) for name in named)
    return fabric.model_copy(update={"processor": fabric.processor.model_copy(update={"hooks": costs})})


def measure_hook(
    pool: RankPool, name: str, model: str, *, repeats: int = REPEATS, on_progress: Progress = no_progress
) -> HookCost:
    """What a comm hook computes for buckets of the model's gradients, without what its collectives take.

    Args:
        pool: Ranks that share this machine as they will in training.
        name: Of the hook, as `named_hook` takes it; `none` costs nothing.
        model: Whose gradients make the buckets: what PowerSGD computes depends on their shapes.
        repeats: Measurements of each bucket, on each rank.
        on_progress: TargetRun of every repetition.

    Raises:
        RankError: A rank failed.
        ValueError: No such hook.
    """
    name = named_hook(name).name
    if name == NO_HOOK.name:
        return HookCost(name=name)
    by_rank = pool.run(time_hook, name, model, repeats, on_progress=on_progress)
    buckets = [bucket for of_rank in by_rank for bucket in of_rank]
    return HookCost(name=name, world_size=pool.world_size, **{part: _fitted(buckets, part) for part in Parts._fields})


def _timings(world_size: int, samples: Mapping[int, Sequence[int]]) -> tuple[Timing, ...]:
    return tuple(
        Timing(
            world_size=world_size,
            size_bytes=size,
            ns=median_ns(taken),
            spread=spread(taken),
            repeats=len(taken),
            outliers=outliers(taken),
        )
        for size, taken in samples.items()
    )


def _sharing(size_bytes: int, two: Sequence[int], one: Sequence[int]) -> Sharing:
    return Sharing(size_bytes=size_bytes, factor=min(max(median_ns(two) / median_ns(one), 0.5), 4.0))


def _fitted(buckets: Sequence[tuple[int, Sequence[Parts]]], part: str) -> Linear:
    """A line through one part's times by bytes; what never happened costs nothing."""
    samples: dict[int, list[int]] = {}
    for size, repetitions in buckets:
        taken = [ns for parts in repetitions if (ns := getattr(parts, part)) is not None]
        if taken:
            samples.setdefault(size, []).extend(taken)
    return fit(samples)
