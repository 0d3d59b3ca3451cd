"""Copies: what the reducer itself does with a bucket."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from reference.bucket import Bucket
from reference.bucketing import MIB

from .collectives import affordable
from .samples import clock_ns, fit, median_ns, time_ns

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
