"""Measures the reducer's own costs: packing, launching, copying out, the graph search, and the rebuild."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import models
from ..reference.autograd_hooks import accumulators, tensors_in
from ..reference.bucketing import MIB
from ..reference.buckets import Bucket
from ..reference.data_parallel import DistributedDataParallel
from ..reference.launch import rank_device
from ..reference.parameters import reachable, trainable_parameters
from . import repeated_timing as timing
from .collective_times import within_budget

GRADIENT_BYTES = [1024, 64 * 1024, MIB, 8 * MIB]
BUCKET_BYTES = 64 * MIB
"""Size of the bucket that large gradients fill; exceeds the caches, as the gradients of a model do."""


def time_copies(_rank: int, _world_size: int, repeats: int) -> dict[str, Any]:
    """Measure the costs of packing a gradient into its bucket, of launching a bucket and of copying a gradient out.

    The times of the slowest rank count, because the others wait for it. A bucket is also all-reduced, which takes
    long on a slow network. Returns fields of `Processor`.
    """
    group = dist.group.WORLD
    assert group is not None
    packing: dict[int, list[float]] = {}
    copying_out: dict[int, list[float]] = {}
    launching: list[float] = []
    for size in GRADIENT_BYTES:
        count = min(BUCKET_BYTES // size, 200)
        parameters = [nn.Parameter(torch.ones(size // 4, device=rank_device())) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        bucket = Bucket(range(len(parameters)), parameters)
        packed_ns, copied_ns = list[int](), list[int]()
        for _ in within_budget(repeats):
            bucket.reset()
            timing.meet()
            packed_ns.append(timing.time_ns(pack_bucket, bucket))
            timing.meet()
            timing.let_host_lead()
            start = timing.read_clock()
            future = bucket.all_reduce(group)
            start_ns, end_ns = timing.in_ns(start, timing.read_clock())
            launching.append(end_ns - start_ns)
            future.wait()
            copied_ns.append(timing.time_ns(bucket.copy_out))
        packing[size] = [ns / len(parameters) for ns in timing.of_slowest_rank(packed_ns)]
        copying_out[size] = [ns / len(parameters) for ns in timing.of_slowest_rank(copied_ns)]
    pack, copy_out = timing.fit_linear(packing), timing.fit_linear(copying_out)
    return {"pack": pack, "copy_out": copy_out, "launch_ns": timing.median_ns(launching)}


def pack_bucket(bucket: Bucket, scale: float = 0.5) -> None:
    """Put all gradients into a bucket that was reset and pack it, as the reducer does when the bucket is ready."""
    bucket.put(range(len(bucket.parameters)))
    bucket.pack(scale)


def time_search_and_rebuild(_rank: int, _world_size: int, model: str, repeats: int) -> tuple[list[float], list[int]]:
    """Return nanoseconds per parameter of each search of the graph for unused ones, and of each rebuild of buckets.

    The first time of each is left out.
    """
    module, loss_fn = models.build(model)
    parameters = trainable_parameters(module)
    searching = [_search_ns(module, loss_fn, list(parameters.values())) for _ in range(repeats + 1)]
    return [ns / len(parameters) for ns in searching[1:]], [_rebuild_ns(module) for _ in range(repeats + 1)][1:]


def _search_ns(module: nn.Module, loss_fn: models.Loss, parameters: list[nn.Parameter]) -> int:
    """Return the nanoseconds to search the graph of the module's outputs, which is new for each search."""
    outputs: list[Tensor] = []
    with module.register_forward_hook(lambda _module, _inputs, output: outputs.extend(tensors_in(output))):
        loss_fn(module)
    indices = {node: index for index, node in enumerate(accumulators(parameters))}
    start = timing.clock_ns()  # the host searches, whatever a GPU does meanwhile
    reachable(outputs, indices)
    return timing.clock_ns() - start


def _rebuild_ns(module: nn.Module) -> int:
    """Return the nanoseconds to rebuild one bucket into default buckets, without the broadcast of the ready order."""
    ddp = wrapped(module)
    buckets = ddp.reducer.buckets
    with torch.no_grad(), timing.timed_collectives("broadcast") as broadcasts:
        start = timing.clock_ns()
        buckets.rebuild_if_due(range(len(buckets.bucket_of))[::-1], ddp.process_group)
        total_ns = timing.clock_ns() - start
    (broadcast,) = broadcasts
    return total_ns - (broadcast.wait() - broadcast.issued_ns)


def wrapped(module: nn.Module) -> DistributedDataParallel:
    """Wrap a module, with one bucket for each kind of gradient at first; its backward passes average nothing."""
    ddp = DistributedDataParallel(module, init_sync=False)
    ddp.reducer.detach()
    return ddp
