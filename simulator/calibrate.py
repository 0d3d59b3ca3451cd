"""Calibrate: measure on this machine what a prediction may use, with real ranks and real collectives.

All repetitions are interleaved, so that a drift of the machine's speed hits every size alike, and medians are
kept. Nothing here sees a training run that is to be predicted: only collectives, copies, and the model's
computation without data parallelism.
"""

import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls
from torch import Tensor, nn

from reference import models
from reference.bucket import Bucket
from reference.bucketing import MIB
from reference.launch import Progress, RankPool, no_progress, report_progress

from .fabric import CONCURRENCY, Fabric, Linear, Processor, Sharing, Timing

SIZES_BYTES = [4 * 1024 * 4**power for power in range(7)] + [32 * MIB, 64 * MIB, 128 * MIB]
"""4 KiB to 16 MiB by factors of 4, then up to 128 MiB: more than the gradients of the built-in models."""

GRADIENT_BYTES = [1024, 64 * 1024, MIB, 8 * MIB]
"""Sizes of the gradients that are copied."""

REPEATS = 7
CONTENTION_S = 2.0
CONTENTION_BYTES = 8 * MIB


def calibrate(
    pool: RankPool,
    model: str,
    *,
    sizes_bytes: Iterable[int] = SIZES_BYTES,
    repeats: int = REPEATS,
    on_progress: Progress = no_progress,
) -> Fabric:
    """Measure collectives and their cost to the processor on the ranks of `pool`.

    Args:
        pool: Ranks that share this machine as they will in training.
        model: Whose computation runs against collectives for the slow-downs; as for `--model`.
        sizes_bytes: Message sizes to measure.
        repeats: Measurements of each; the median is kept.
        on_progress: Told of every repetition.

    Raises:
        RankError: A rank failed.
    """
    return with_slowdowns(pool, model, measure_collectives(pool, sizes_bytes, repeats, on_progress))


def measure_collectives(pool: RankPool, sizes_bytes: Iterable[int], repeats: int, on_progress: Progress) -> Fabric:
    """The part of a calibration that does not depend on the model: collectives, copies, launches."""
    sizes = sorted(sizes_bytes)
    tables = pool.run(time_collectives, sizes, repeats, on_progress=on_progress)[0]
    costs = pool.run(time_copies, repeats)[0]
    world_size = pool.world_size
    return Fabric(
        all_reduce=_timings(world_size, tables["all_reduce"]),
        broadcast=_timings(world_size, tables["broadcast"]),
        concurrency=CONCURRENCY[pool.backend],
        sharing=tuple(
            Sharing(size_bytes=size, factor=min(max(tables["two"][size] / tables["all_reduce"][size], 0.5), 4.0))
            for size in sizes
        ),
        processor=Processor(**costs),
        source=f"measured: {pool.backend}, {world_size} ranks on one {platform.machine()} machine, "
        f"torch {torch.__version__}",
    )


def with_slowdowns(pool: RankPool, model: str, fabric: Fabric) -> Fabric:
    """The part that does: how much this model's computation and collectives slow each other down."""
    slowdowns = pool.run(time_contention, model)[0]
    return fabric.model_copy(
        update={
            "processor": fabric.processor.model_copy(update=slowdowns),
            "source": f"{fabric.source}; slow-downs with the computation of {model}",
        }
    )


def _timings(world_size: int, ns_by_size: dict[int, int]) -> tuple[Timing, ...]:
    return tuple(Timing(world_size=world_size, size_bytes=size, ns=ns) for size, ns in ns_by_size.items())


# Bodies of ranks


def time_collectives(rank: int, _world_size: int, sizes: list[int], repeats: int) -> dict[str, dict[int, int]]:
    """Median nanoseconds by size of an all-reduce, of two at a time (until both are done), of a broadcast."""
    buffers = [torch.ones(max(sizes) // 4), torch.ones(max(sizes) // 4)]
    ways: dict[str, Callable[[list[Tensor]], None]] = {
        "all_reduce": lambda pair: _all_reduce(pair[:1]),
        "two": _all_reduce,
        "broadcast": lambda pair: _wait(dist.broadcast(pair[0], 0, async_op=True)),
    }
    times: dict[str, dict[int, list[int]]] = {way: {size: [] for size in sizes} for way in ways}
    for done in range(repeats + 1):
        if rank == 0:
            report_progress("calibrating collectives", done, repeats + 1)
        for size in sizes:
            pair = [buffer[: size // 4] for buffer in buffers]
            for way, run in ways.items():
                dist.barrier()
                times[way][size].append(_time_ns(run, pair))
    return {way: {size: _median(taken[1:]) for size, taken in by_size.items()} for way, by_size in times.items()}


def time_copies(_rank: int, _world_size: int, repeats: int) -> dict[str, Any]:
    """Cost of the reducer's own steps: packing a bucket, launching it, copying out.

    The gradients are 64 MiB together where they are large, more than a cache holds, as those of a model are.
    """
    group = dist.group.WORLD
    assert group is not None
    pack: dict[int, list[float]] = {}
    copy_out: dict[int, list[float]] = {}
    launch: list[float] = []
    for size in GRADIENT_BYTES:
        parameters = [nn.Parameter(torch.ones(size // 4)) for _ in range(min(64 * MIB // size, 200))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        bucket = Bucket(range(len(parameters)), parameters)
        pack[size], copy_out[size] = [], []
        for _ in range(repeats + 1):
            bucket.reset()
            pack[size].append(_time_ns(_pack, bucket) / len(parameters))
            dist.barrier()
            start = time.perf_counter_ns()
            future = bucket.all_reduce(group)
            launch.append(time.perf_counter_ns() - start)
            future.wait()
            copy_out[size].append(_time_ns(bucket.copy_out) / len(parameters))
    return {"pack": _fit(pack), "copy_out": _fit(copy_out), "launch_ns": _median(launch)}


def time_contention(_rank: int, _world_size: int, model: str) -> dict[str, float]:
    """How much computation and collectives slow each other down, averaged over the ranks.

    A thread issues a fixed number of all-reduces one after the other while this one computes forward and
    backward passes for as long as they last; before and after, both run alone.
    """
    module, loss_fn = models.build(model)
    buffer = torch.ones(CONTENTION_BYTES // 4)

    def compute() -> None:
        module.zero_grad()
        loss_fn(module).backward()

    def reduce() -> None:
        _all_reduce([buffer])

    def alone() -> tuple[list[int], list[int]]:
        dist.barrier()
        computed = [_time_ns(compute) for _ in range(3)]
        dist.barrier()
        return computed, [_time_ns(reduce) for _ in range(10)]

    alone()  # the first touch of every buffer does not count
    computed_before, reduced_before = alone()
    lasting_ns = max(CONTENTION_S * 1e9, 4 * _median(computed_before))
    count = torch.tensor(lasting_ns / (2 * _median(reduced_before))).ceil()
    dist.broadcast(count, 0)  # all ranks must issue equally many
    computed: list[int] = []
    reduced: list[int] = []
    thread = threading.Thread(target=lambda: reduced.extend(_time_ns(reduce) for _ in range(int(count))))
    dist.barrier()
    thread.start()
    while thread.is_alive():
        computed.append(_time_ns(compute))
    computed_after, reduced_after = alone()
    slowdowns = torch.tensor(
        [
            # The last pass ran alone for a part. Low quantiles, as the machine's noise only ever adds.
            _low(computed[:-1] or computed) / _low(computed_before + computed_after),
            _low(reduced) / _low(reduced_before + reduced_after),
        ]
    )
    _all_reduce([slowdowns])
    of_compute, of_collective = (slowdowns / dist.get_world_size()).clamp(min=1.0).tolist()
    return {"compute_slowdown": of_compute, "collective_slowdown": of_collective}


def _all_reduce(tensors: list[Tensor]) -> None:
    """All of them at the same time; returns when all are done."""
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        _wait(work)


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _pack(bucket: Bucket) -> None:
    for slot in range(len(bucket.parameters)):
        bucket.put(slot)
    bucket.pack(0.5)


def _fit(samples: dict[int, list[float]]) -> Linear:
    """Fixed and per-byte cost, neither negative, with the least relative error over the sizes."""
    sizes = np.array(list(samples), dtype=float)
    times = np.array([statistics.median(taken) for taken in samples.values()])
    rows = np.column_stack([1 / times, sizes / times])
    (fixed, per_byte), _residual = nnls(rows, np.ones(len(times)))
    return Linear(fixed_ns=float(fixed), ns_per_byte=float(per_byte))


def _time_ns(action: Callable[..., object], *arguments: object) -> int:
    start = time.perf_counter_ns()
    action(*arguments)
    return time.perf_counter_ns() - start


def _low(values: Iterable[float]) -> float:
    return float(np.quantile(list(values), 0.25))


def _median(values: Iterable[float]) -> int:
    return round(statistics.median(values))
