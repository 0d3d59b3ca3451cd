"""Checks at construction: of the arguments, of the module, and that both are the same on all ranks."""

import pickle
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _get_device_index
from torch.distributed.device_mesh import DeviceMesh

from ..bucketing import BucketAssignment, check_partition, initial_buckets, two_stage_caps
from ..constructor_arguments import Options
from ..errors import CollectiveError
from ..parameters import ModuleTensors, bucket_key

Description = tuple[str, tuple[int, ...], tuple[int, ...], str, bool]
"""A tensor's name, shape, strides, dtype, and whether it is trained."""


def resolve_group(group: dist.ProcessGroup | None, mesh: DeviceMesh | None = None) -> dist.ProcessGroup:
    """The process group to average over: `group`, the group of a one-dimensional `mesh`, or the default group.

    Raises RuntimeError if there is no process group, for both arguments, and for a mesh of more than one dimension.
    """
    if group is None and mesh is None and not dist.is_initialized():
        raise RuntimeError(
            "expected an initialised process group, there is none: call torch.distributed.init_process_group "
            "first, or start the script with ddplab.run_ranks"
        )
    if mesh is None:
        group = group if group is not None else dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):  # torch's NON_GROUP_MEMBER
            raise RuntimeError("process_group: expected a group with this rank, got one that this rank is not in")
        return group
    if group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if mesh.ndim != 1:
        raise RuntimeError(
            f"Only 1D device mesh is supported, but got {mesh}. Pass the slice to average over: mesh['name']"
        )
    return mesh.get_group(mesh_dim=0)


def resolve_devices(parameters: Collection[nn.Parameter], options: Options) -> tuple[list[int] | None, int | None]:
    """The GPU that inputs are moved to, as a list of one index, and `output_device` as an index.

    None for both: the module is not on a single GPU, or no device was given. Raises ValueError if `device_ids` has
    several elements; devices are given although the module is on the CPU or on several devices; or the module is on
    several types of devices.
    """
    device_ids, output_device = options.device_ids, options.output_device
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(f"device_ids can only be None or contain a single element, got {list(device_ids)}")
    devices = {parameter.device for parameter in parameters}
    if len({device.type for device in devices}) > 1:
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but input module "
            f"parameters locate in {sorted(map(str, devices))}."
        )
    if not device_ids or len(devices) > 1 or next(iter(devices)).type == "cpu":
        if device_ids or output_device:  # torch's class accepts 0 for a module on the CPU too
            raise ValueError(
                "DistributedDataParallel device_ids and output_device arguments only work with a module on a single "
                f"GPU, but got device_ids {device_ids}, output_device {output_device}, and module parameters on "
                f"{sorted(map(str, devices))}."
            )
        return None, None
    moved_to = [_get_device_index(device, optional=True) for device in device_ids]
    return moved_to, moved_to[0] if output_device is None else _get_device_index(output_device, optional=True)


def resolve_deprecated(
    *, check_reduction: bool, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[bool, bool]:
    """Warn of deprecated arguments; returns whether to send buffers before forward passes, and at construction."""
    message = (
        "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead, which still broadcasts buffers "
        "at construction; `broadcast_buffers=False` does not."
    )
    if forward_sync_buffers is not None:
        message = (
            "Both `broadcast_buffers` and `forward_sync_buffers` were specified. `broadcast_buffers` is deprecated "
            "and its value is ignored when `forward_sync_buffers` is provided."
        )
    if check_reduction:
        unused = "The `check_reduction` argument in `DistributedDataParallel` module is deprecated. Avoid using it."
        warnings.warn(unused, FutureWarning, stacklevel=3)
    if broadcast_buffers is not None:
        warnings.warn(message, FutureWarning, stacklevel=3)
    if forward_sync_buffers is not None:
        return forward_sync_buffers, True
    return broadcast_buffers is not False, broadcast_buffers is not False


def check_module(module: nn.Module, trainable: dict[str, nn.Parameter]) -> None:
    """Raise RuntimeError, ValueError or TypeError for a module, with these parameters, that cannot be trained."""
    name = type(module).__name__
    if not trainable:
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
    for parameter_name, parameter in trainable.items():
        if parameter.is_inference() or not parameter.is_leaf:
            raise TypeError(
                f"expected a leaf of autograd's graph, no inference tensor, got {parameter_name} of {name}. Make "
                "parameters outside of torch.inference_mode(), and not by operations that autograd records"
            )
    on_cpu = next(iter(trainable.values())).device.type == "cpu"
    if on_cpu and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")


@dataclass(frozen=True)
class Setup:
    """Everything that must be the same on all ranks."""

    parameters: list[Description]
    buffers: list[Description]
    buckets: BucketAssignment
    sparse: list[bool]  #: whether gradients are sparse tensors, by parameter index
    rebuild_caps_bytes: list[int] | None  #: caps for the rebuild in ready order; None: `buckets` stay
    arguments: dict[str, object]  #: those that decide which collectives an iteration has


def verify_setup(
    make: Callable[[], tuple[ModuleTensors, Setup]], group: dist.ProcessGroup, module: nn.Module, *, exchange: bool
) -> tuple[ModuleTensors, Setup]:
    """Make this rank's setup from the module's tensors, and check that all ranks have the same.

    An error of `make` on any rank is raised on all of them: a rank that went on alone would hang in the next
    collective. Ranks compare digests. Only if those differ, or a rank raised an error, do they exchange setups and
    errors, and raise RuntimeError if the setups differ. Without `exchange`, nothing is communicated.
    """
    if not exchange:
        return make()
    mine: Setup | Exception
    try:
        tensors, mine = make()
        message = pickle.dumps(mine)
    except Exception as error:  # noqa: BLE001 - all ranks must raise it, whatever it is
        mine, message = error, _pickled(error)
    device = exchange_device(module, group)
    # The length is sent along, so that a second exchange can pad all messages to the longest.
    digest = sha256(repr(mine).encode()).digest()
    head = b"".join([bytes([isinstance(mine, Exception)]), len(message).to_bytes(8, "big"), digest])
    heads = _all_gather(head, group, device)
    if not any(head[0] for head in heads) and len({head[9:] for head in heads}) == 1:
        assert isinstance(mine, Setup)
        return tensors, mine
    longest = max(int.from_bytes(head[1:9], "big") for head in heads)
    everyone = [pickle.loads(data) for data in _all_gather(message.ljust(longest, b"\0"), group, device)]
    for theirs in everyone:
        if isinstance(theirs, Exception):
            raise theirs
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RuntimeError(_difference(everyone[0], theirs, rank))
    return tensors, everyone[0]


def exchange_device(module: nn.Module, group: dist.ProcessGroup) -> torch.device:
    """The device on which the ranks of `group` exchange bytes about `module`; of one type on all ranks.

    The CPU where the group has a backend for it, because modules might be on different types of devices on different
    ranks. Otherwise the module's own device and not the current one: a script that passes `device_ids=[rank]`
    need not have called `set_device`, and then the current device of every rank is GPU 0, which NCCL refuses.
    """
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds:
        return torch.device("cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type in kinds or not kinds:  # a process group written in Python names no types
            return tensor.device
    return group.bound_device_id or torch.device(min(kinds, default="cpu"))


def _all_gather(data: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """The bytes of every rank, all of one length; raises CollectiveError if a rank does not take part in time."""
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(mine) for _ in range(group.size())]
    try:
        dist.all_gather(gathered, mine, group=group)
    except RuntimeError as error:
        expected = f"rank {group.rank()}: expected every rank to construct the wrapper with init_sync=True"
        raise CollectiveError(group.rank(), f"{expected}, a rank did not answer: {error}") from error
    return [bytes(theirs.tolist()) for theirs in gathered]


def _pickled(error: Exception) -> bytes:
    """Pickle an error; one that cannot be pickled becomes a RuntimeError with its message."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - an exception class may define its own pickling, which may raise anything
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return data


def set_up(
    module: nn.Module, tensors: ModuleTensors, options: Options, others: dict[str, object], *, with_buffers: bool
) -> Setup:
    """This rank's setup, for the tensors of `module`: buckets follow the plan or, without one, are assigned by size.

    Buffers are compared only `with_buffers`, that is, if they are synchronised; `others` are further arguments.
    Raises errors as `check_module` does, and ValueError if the plan is not a partition of the parameters.
    """
    check_module(module, tensors.trainable)
    bucketed, plan = tensors.bucketed, options.plan
    sparse = [name in tensors.sparse for name in bucketed]
    trigger, flags = options.param_to_hook_all_reduce, ("static_graph", "skip_all_reduce_unused_params")
    caps_mb = options.bucket_cap_mb, options.bucket_cap_mb_list
    initial_caps, rebuild_caps = two_stage_caps(*caps_mb, graph_may_change=options.graph_may_change)
    if plan is None:
        sizes_bytes = [parameter.nbytes for parameter in bucketed.values()]
        keys = [bucket_key(parameter) for parameter in bucketed.values()]
        buckets = initial_buckets(sizes_bytes, initial_caps, keys=keys, sparse=sparse)
    else:
        buckets = _resolve_plan(plan, bucketed, tensors.sparse)
    return Setup(
        parameters=[_describe(*named) for named in tensors.parameters.items()],
        buffers=[_describe(*named) for named in tensors.buffers.items() if with_buffers],
        buckets=buckets,
        sparse=sparse,
        rebuild_caps_bytes=rebuild_caps if plan is None else None,
        arguments={
            **{name: getattr(options, name) for name in ("find_unused_parameters", *flags)},
            "broadcast_buffers": with_buffers,
            "delay_all_reduce_named_params": [name for name in tensors.trainable if name not in bucketed],
            "param_to_hook_all_reduce": [name for name, one in tensors.trainable.items() if one is trigger],
            **others,
        },
    )


def _describe(name: str, tensor: Tensor) -> Description:
    return name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad


def _difference(first: Setup, other: Setup, rank: int) -> str:
    """The first difference between the setups of rank 0 and of `rank`, in one line."""
    differing = [name for name, given in first.arguments.items() if given != other.arguments[name]]
    if differing:
        given, instead = ({name: setup.arguments[name] for name in differing} for setup in (first, other))
        return f"rank 0 was given {given}, rank {rank} {instead}: pass the same on all ranks"
    for what in ("parameters", "buffers"):
        ours, theirs = getattr(first, what), getattr(other, what)
        for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if a != b:
                return (
                    f"{what[:-1]} {index} differs between ranks (name, shape, strides, dtype, trained): "
                    f"rank 0 has {a}, rank {rank} has {b}"
                )
        if len(ours) != len(theirs):
            return f"rank 0 has {len(ours)} {what}, rank {rank} has {len(theirs)}: build the same module on all ranks"
    return f"rank 0 and rank {rank} were given different plans or bucket caps, or froze different parameters"


def _resolve_plan(
    plan: Sequence[Sequence[int | str]], parameters: dict[str, nn.Parameter], sparse: set[str]
) -> BucketAssignment:
    indices = {name: index for index, name in enumerate(parameters)}
    if unknown := {entry for bucket in plan for entry in bucket if isinstance(entry, str)} - set(indices):
        raise ValueError(f"plan: no trainable parameter is called {sorted(unknown)[0]!r}")
    buckets = [[indices[entry] if isinstance(entry, str) else entry for entry in bucket] for bucket in plan]
    check_partition(buckets, len(parameters))
    keys = [bucket_key(parameter) for parameter in parameters.values()]
    names = list(parameters)
    for number, bucket in enumerate(buckets):
        if len({keys[index] for index in bucket}) > 1:
            raise ValueError(f"plan: bucket {number} mixes dtypes or devices; give each its own bucket")
        if len(bucket) > 1 and (alone := sparse & {names[index] for index in bucket}):
            raise ValueError(
                f"plan: bucket {number} holds {min(alone)}, whose gradients are sparse; give it its own bucket"
            )
    return buckets
