"""Measures the reducer's own work: packing, launching, copying out, graph search, rebuild."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reference import models
from reference.bucketing import MIB, bucket_caps, initial_buckets
from reference.buckets import Bucket, Buckets, Features
from reference.parameters import bucket_key, size_bytes, sparse_parameters, trainable_parameters
from reference.reducer import accumulators
from reference.unused_parameters import reachable, tensors_in

from .collectives import affordable
from .timing import clock_ns, fit, median_ns, observe_collectives, time_ns

GRADIENT_BYTES = [1024, 64 * 1024, MIB, 8 * MIB]
"""Sizes of the gradients that are copied."""


def time_copies(_rank: int, _world_size: int, repeats: int) -> dict[str, Any]:
    """Fields of `Processor`: packing a gradient into its bucket, launching a bucket, copying a gradient out.

    The gradients are 64 MiB together where they are large, more than a cache holds, as those of a model are.
    """
    group = dist.group.WORLD
    assert group is not None
    packing: dict[int, list[float]] = {}
    copying_out: dict[int, list[float]] = {}
    launching: list[float] = []
    for size in GRADIENT_BYTES:
        parameters = [nn.Parameter(torch.ones(size // 4)) for _ in range(min(64 * MIB // size, 200))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        bucket = Bucket(range(len(parameters)), parameters)
        packing[size], copying_out[size] = [], []
        due, begun = repeats, clock_ns()
        for done in range(repeats + 1):
            if done == 1:
                due = affordable(clock_ns() - begun, repeats)
            if done > due:
                break
            bucket.reset()
            packing[size].append(time_ns(pack, bucket) / len(parameters))
            dist.barrier()
            start = clock_ns()
            future = bucket.all_reduce(group)
            launching.append(clock_ns() - start)
            future.wait()
            copying_out[size].append(time_ns(bucket.copy_out) / len(parameters))
    return {"pack": fit(packing), "copy_out": fit(copying_out), "launch_ns": median_ns(launching)}


def pack(bucket: Bucket, scale: float = 0.5) -> None:
    """As the reducer does once the last gradient is there; the bucket has been reset."""
    for slot in range(len(bucket.parameters)):
        bucket.put(slot)
    bucket.pack(scale)


REBUILT_CAP_MB = 25.0
"""DDP's default. The cost is one of parameters, hardly one of buckets."""


def time_preparation(_rank: int, _world_size: int, model: str, repeats: int) -> tuple[list[float], list[int]]:
    """Nanoseconds a parameter of searching the graph for unused ones; nanoseconds of rebuilding the buckets.

    The first of each is left out.
    """
    module, loss_fn = models.build(model)
    parameters = trainable_parameters(module)
    searching = [_search_ns(module, loss_fn, list(parameters.values())) for _ in range(repeats + 1)]
    rebuilding = [_rebuild_ns(module, parameters) for _ in range(repeats + 1)]
    return [ns / len(parameters) for ns in searching[1:]], rebuilding[1:]


def _search_ns(module: nn.Module, loss_fn: models.Loss, parameters: list[nn.Parameter]) -> int:
    """Of the graph behind the module's outputs, made anew as in each iteration."""
    outputs: list[Tensor] = []
    hook = module.register_forward_hook(lambda _module, _inputs, output: outputs.extend(tensors_in(output)))
    try:
        loss_fn(module)
    finally:
        hook.remove()
    indices = {node: index for index, node in enumerate(accumulators(parameters))}
    return time_ns(reachable, outputs, indices)


def first_buckets(module: nn.Module, parameters: dict[str, nn.Parameter]) -> Buckets:
    """One bucket for each kind of gradient, as torch begins; to be rebuilt by the default cap."""
    tensors, sparse = list(parameters.values()), sparse_parameters(module)
    begun = initial_buckets(
        [size_bytes(tensor) for tensor in tensors],
        bucket_caps(float("inf")),
        keys=[bucket_key(tensor) for tensor in tensors],
        sparse=[name in sparse for name in parameters],
    )
    return Buckets(
        tensors,
        begun,
        rebuild_caps_bytes=bucket_caps(REBUILT_CAP_MB),
        sparse=frozenset(index for index, name in enumerate(parameters) if name in sparse),
        features=Features(),
    )


def _rebuild_ns(module: nn.Module, parameters: dict[str, nn.Parameter]) -> int:
    """From one bucket into default buckets; without the broadcast of the order."""
    group = dist.group.WORLD
    assert group is not None
    buckets = first_buckets(module, parameters)
    with torch.no_grad(), observe_collectives("broadcast") as broadcasts:
        start = clock_ns()
        buckets.rebuild_if_due(range(len(parameters))[::-1], group)
        total_ns = clock_ns() - start
    (broadcast,) = broadcasts
    return total_ns - (broadcast.wait() - broadcast.issued_ns)
