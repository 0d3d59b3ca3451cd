"""Checks at construction: the arguments, the module, and that all ranks were given the same."""

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _get_device_index
from torch.distributed.device_mesh import DeviceMesh

from ..bucketing import BucketAssignment, check_partition, initial_buckets
from ..parameters import bucket_key, ignored_names, size_bytes, sparse_parameters, trainable_parameters

Devices = Sequence[int | torch.device]

OUT_OF_SCOPE = {
    "mixed_precision": "torch.autocast in forward, with torch.amp.GradScaler for float16",
    "delay_all_reduce_named_params": "a bucket plan: plan=[...] launches these parameters last",
    "param_to_hook_all_reduce": "a bucket plan: plan=[...] launches these parameters last",
}
"""Arguments of torch's that are not supported, and what to use instead."""


def refuse_out_of_scope(**arguments: object) -> None:
    """Raise NotImplementedError for an argument of torch's that is not supported here."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported; use {OUT_OF_SCOPE[name]}")


def resolve_group(group: dist.ProcessGroup | None, mesh: DeviceMesh | None = None) -> dist.ProcessGroup:
    """The ranks that train together: those of `group`, of a one-dimensional `mesh`, or all.

    Raises:
        RuntimeError: There is no process group, both were given, or the mesh has more dimensions.
        NotImplementedError: The mesh is a slice of one with more dimensions (tensor parallelism).
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "expected an initialised process group, there is none: call torch.distributed.init_process_group "
            "first, or start the script with reference.launch.run_ranks"
        )
    if mesh is None:
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        return group
    if group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {mesh}.")
    if mesh._get_root_mesh() != mesh:
        raise NotImplementedError(
            f"device_mesh: {mesh} is a slice of {mesh._get_root_mesh()}; data parallelism beside tensor parallelism "
            "is not supported, use torch.distributed.fsdp.fully_shard on the whole mesh"
        )
    return mesh.get_group(mesh_dim=0)


def resolve_devices(
    parameters: Collection[nn.Parameter], device_ids: Devices | None, output_device: int | torch.device | None
) -> tuple[list[int] | None, int | None]:
    """The GPU that inputs are moved to, as a list of one, and that of the outputs; None: left where they are.

    Raises:
        ValueError: More than one device id, or one for a module on the CPU or on several devices, or a module
            on several types of devices.
    """
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element, got {list(device_ids)}")
    devices = {parameter.device for parameter in parameters}
    if len({device.type for device in devices}) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {sorted(map(str, devices))}."
        )
    if not device_ids or len(devices) > 1 or next(iter(devices)).type == "cpu":
        if device_ids or output_device is not None:
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with a module on a single "
                f"GPU, but got device_ids {device_ids}, output_device {output_device}, and module parameters on "
                f"{sorted(map(str, devices))}."
            )
        return None, None
    moved_to = [_get_device_index(device, optional=True) for device in device_ids]
    out = moved_to[0] if output_device is None else _get_device_index(output_device, optional=True)
    return moved_to, out


def resolve_buffer_sync(*, broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether buffers are broadcast before forward, and whether they are at construction."""
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated "
            "and its value is ignored when `forward_sync_buffers` is provided.",
            FutureWarning,
            stacklevel=3,
        )
    elif broadcast_buffers is not None:
        warnings.warn(
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, which still broadcasts buffers "
            "at construction; `broadcast_buffers=False` does not.",
            FutureWarning,
            stacklevel=3,
        )
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    return broadcast_buffers is not False, broadcast_buffers is not False


def warn_of_check_reduction(*, check_reduction: bool) -> None:
    """The argument has had no effect for years."""
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Avoid using it.",
            FutureWarning,
            stacklevel=3,
        )


def check_module(module: nn.Module, parameters: Collection[nn.Parameter]) -> None:
    """Refuse a module that cannot be trained in parallel.

    Raises:
        RuntimeError: Nothing to train, or parameters that have no shape yet.
        ValueError: SyncBatchNorm outside of a GPU.
    """
    name = type(module).__name__
    if not parameters:
        raise RuntimeError(
            f"DistributedDataParallel is not needed when a module doesn't have any parameter that requires a "
            f"gradient: {name} has no trainable parameter"
        )
    for parameter_name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"Modules with uninitialized parameters can't be used with `DistributedDataParallel`: {name} has "
                f"{parameter_name}. Run a dummy forward pass to correctly initialize the modules"
            )
    on_cpu = next(iter(parameters)).device.type == "cpu"
    if on_cpu and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")


Description = tuple[str, tuple[int, ...], tuple[int, ...], str]
"""A tensor's name, shape, strides and dtype."""


@dataclass(frozen=True)
class Setup:
    """What all ranks must have alike."""

    parameters: list[Description]
    buffers: list[Description]
    buckets: BucketAssignment
    rebuild_caps_bytes: list[int] | None


def verify_setup(make: Callable[[], Setup], group: dist.ProcessGroup, *, exchange: bool = True) -> Setup:
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
) -> BucketAssignment:
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
