"""All ranks must construct alike: they show each other what they were given; one's mistake is raised on all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .arguments import check_module
from .bucketing import Buckets, check_partition, initial_buckets
from .parameters import bucket_key, ignored_names, size_bytes, sparse_parameters, trainable_parameters

Description = tuple[str, tuple[int, ...], tuple[int, ...], str]
"""A tensor's name, shape, strides and dtype."""


@dataclass(frozen=True)
class Setup:
    """What all ranks must have alike."""

    parameters: list[Description]
    buffers: list[Description]
    buckets: Buckets
    rebuild_caps_bytes: list[int] | None


def agree(make: Callable[[], Setup], group: dist.ProcessGroup, *, exchange: bool = True) -> Setup:
    """This rank's setup, if it makes sense and all ranks have the same.

    Every rank learns what is wrong on any of them; one that went on alone would hang in the next collective.

    Args:
        make: Makes it.
        group: The ranks.
        exchange: False: trust the other ranks, and communicate nothing.

    Raises:
        RuntimeError: The setups differ, or a rank raised one.
        ValueError: A rank raised one.
    """
    if not exchange:
        return make()
    mine: Setup | Exception
    try:
        mine = make()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must know
        mine = error
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for theirs in everyone:
        if isinstance(theirs, Exception):
            raise theirs
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RuntimeError(_difference(everyone[0], theirs, rank))
    return everyone[0]  # type: ignore[no-any-return]  # gathered objects have no type


def set_up(
    module: nn.Module,
    plan: Sequence[Sequence[int | str]] | None,
    initial_caps_bytes: Sequence[int],
    rebuild_caps_bytes: Sequence[int],
    *,
    with_buffers: bool,
) -> Setup:
    """This rank's own setup; `with_buffers` where buffers are synchronised too, and so must be alike.

    Raises:
        RuntimeError: As `check_module`.
        ValueError: As `check_module`, or a plan that is not a partition of the parameters.
    """
    trainable = trainable_parameters(module)
    check_module(module, trainable.values())
    sparse = sparse_parameters(module)
    if plan is None:
        buckets = initial_buckets(
            [size_bytes(parameter) for parameter in trainable.values()],
            initial_caps_bytes,
            keys=[bucket_key(parameter) for parameter in trainable.values()],
            sparse=[name in sparse for name in trainable],
        )
    else:
        buckets = _resolve_plan(plan, trainable, sparse)
    ignored = ignored_names(module)
    return Setup(
        parameters=[_describe(*named) for named in module.named_parameters() if named[0] not in ignored],
        buffers=[_describe(*named) for named in module.named_buffers() if with_buffers and named[0] not in ignored],
        buckets=buckets,
        rebuild_caps_bytes=list(rebuild_caps_bytes) if plan is None else None,
    )


def _describe(name: str, tensor: Tensor) -> Description:
    return name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype)


def _difference(first: Setup, other: Setup, rank: int) -> str:
    """Where rank 0 and `rank` differ, in one line."""
    for what in ("parameters", "buffers"):
        ours, theirs = getattr(first, what), getattr(other, what)
        for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                return (
                    f"{what[:-1]} {index} differs between ranks (name, shape, strides, dtype): "
                    f"rank 0 has {a}, rank {rank} has {b}"
                )
        if len(ours) != len(theirs):
            return (
                f"rank 0 has {len(ours)} {what}, rank {rank} has {len(theirs)}: build the same module on every rank"
            )
    return f"rank 0 and rank {rank} were given different plans or bucket caps, or froze different parameters"


def _resolve_plan(
    plan: Sequence[Sequence[int | str]], parameters: dict[str, nn.Parameter], sparse: set[str]
) -> Buckets:
    """Names to parameter indices; a bucket of mixed dtypes or devices is refused, and a shared sparse one."""
    indices = {name: index for index, name in enumerate(parameters)}
    if unknown := {entry for bucket in plan for entry in bucket if isinstance(entry, str)} - set(indices):
        raise ValueError(f"plan: no trainable parameter is called {sorted(unknown)[0]!r}")
    buckets = [[indices[entry] if isinstance(entry, str) else entry for entry in bucket] for bucket in plan]
    check_partition(buckets, len(parameters))
    keys: list[tuple[torch.dtype, torch.device]] = [bucket_key(parameter) for parameter in parameters.values()]
    names = list(parameters)
    for number, bucket in enumerate(buckets):
        if len({keys[index] for index in bucket}) > 1:
            raise ValueError(f"plan: bucket {number} mixes dtypes or devices; give each its own bucket")
        if len(bucket) > 1 and (alone := sparse & {names[index] for index in bucket}):
            raise ValueError(
                f"plan: bucket {number} holds {min(alone)}, whose gradients are sparse; give it its own bucket"
            )
    return buckets
