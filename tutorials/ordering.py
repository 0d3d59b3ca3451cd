"""Tutorials 3 and 4: recorded buckets of our reducer, and when buckets in two orders are done."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddplab import DistributedDataParallel, Trace, models, record
from ddplab.reference.parameters import trainable_parameters


def record_reducer(_rank: int, _world_size: int, model: str, arguments: Mapping[str, Any], iterations: int) -> Trace:
    """Record when each gradient is ready, and when our reducer launches, finishes and copies out each bucket."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, **arguments)
    with record(ddp, model=model) as recording:
        for _ in range(iterations):
            loss_fn(ddp).backward()
    return recording.trace


def buckets_by_iteration(
    _rank: int, _world_size: int, model: str, cap_mb: float, iterations: int
) -> list[list[list[str]]]:
    """Parameter names of each bucket, in each iteration."""
    module, loss_fn = models.build(model)
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap_mb)
    names = list(trainable_parameters(module))
    seen = []
    for _ in range(iterations):
        loss_fn(ddp).backward()
        seen.append([[names[index] for index in bucket] for bucket in ddp.reducer.buckets.assignment])
    return seen


def done_ms(ready_ms: Sequence[float], *, per_bucket: int, all_reduce_ms: float) -> tuple[float, float]:
    """When the last bucket is done, in reverse registration order and in registration order.

    Args:
        ready_ms: When the gradient of each parameter is ready, in registration order; all have the same size.
        per_bucket: Number of parameters in a bucket.
        all_reduce_ms: Duration of the all-reduce of a bucket.
    """
    ends = []
    for order in (ready_ms[::-1], ready_ms):
        end = 0.0
        for first in range(0, len(order), per_bucket):
            end = max(end, *order[first : first + per_bucket]) + all_reduce_ms
        ends.append(end)
    return ends[0], ends[1]
