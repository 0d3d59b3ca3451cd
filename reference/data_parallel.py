"""Data parallelism as a module wrapper: the naive version first, then `DistributedDataParallel`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .bucketing import Buckets, bucket_caps, check_partition, initial_buckets
from .buffers import broadcast_coalesced
from .parameters import bucket_key, size_bytes, sparse_parameters, trainable_parameters
from .reducer import Reducer


class NaiveDataParallel(nn.Module):
    """One all-reduce a parameter, after the backward pass: right, and slow. Kept for teaching.

    Call `average_gradients` between the backward pass and the optimiser step, on every rank.
    """

    def __init__(self, module: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.module = module
        self.process_group = _initialized_group(process_group)
        broadcast_coalesced([*module.parameters(), *module.buffers()], self.process_group)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Whatever the module returns."""
        return self.module(*inputs, **kwargs)

    def average_gradients(self) -> None:
        """Replace every gradient by its mean over the ranks."""
        world_size = dist.get_world_size(self.process_group)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.process_group)
                parameter.grad /= world_size


class DistributedDataParallel(nn.Module):
    """Wraps a module so that its gradients are averaged over all ranks while the backward pass runs.

    Every rank constructs it at the same time with the same arguments. Ranks start from rank 0's parameters
    and buffers; forward returns what the module returns; after each backward pass every rank holds the same
    averaged gradients. The state dict is that of torch's class: the module's, behind the prefix `module.`.

    Args:
        module: The module to train; its parameters must not be added, removed or frozen afterwards.
        process_group: The ranks that train together. None: the default group.
        bucket_cap_mb: Size in MiB at which a bucket closes. None: 25, and 1 for the first bucket.
        bucket_cap_mb_list: One size a bucket, the last for all that follow; overrides `bucket_cap_mb`.
        broadcast_buffers: Whether each synchronised forward pass starts from rank 0's buffers.
        plan: Parameter indices or names by bucket, in launch order; such buckets are never rebuilt.

    Raises:
        RuntimeError: No process group, or parameters that differ between ranks.
        ValueError: Nothing to train, sparse gradients, or a plan that is not a partition of the parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        broadcast_buffers: bool = True,
        plan: Sequence[Sequence[int | str]] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.process_group = _initialized_group(process_group)
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        self._buffers_are_stale = True
        setup = _agree(module, plan, bucket_cap_mb, bucket_cap_mb_list, self.process_group)
        broadcast_coalesced([*module.parameters(), *module.buffers()], self.process_group)
        self.reducer = Reducer(
            trainable_parameters(module),
            setup.buckets,
            rebuild_caps_bytes=setup.rebuild_caps_bytes,
            group=self.process_group,
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Whatever the module returns, with this rank's inputs."""
        synchronize = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronize:
            self.reducer.prepare_for_forward()
        if self.broadcast_buffers and self._buffers_are_stale:
            broadcast_coalesced(list(self.module.buffers()), self.process_group)
        output = self.module(*inputs, **kwargs)
        # As in torch: buffers are sent again only after a forward pass whose gradients are averaged.
        self._buffers_are_stale = synchronize
        if synchronize:
            self.reducer.prepare_for_backward()
        elif torch.is_grad_enabled():
            self.reducer.expect_nothing()
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: forward and backward passes in here average nothing.

        The first synchronised backward pass afterwards averages all that has been accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def _initialized_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError(
            "expected an initialised process group, there is none: call torch.distributed.init_process_group "
            "first, or start the script with reference.launch.run_ranks"
        )
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    return group


@dataclass(frozen=True)
class _Setup:
    """What all ranks must have alike; tensors as name, shape, strides and dtype."""

    parameters: list[tuple[str, tuple[int, ...], tuple[int, ...], str]]
    buffers: list[tuple[str, tuple[int, ...], tuple[int, ...], str]]
    buckets: Buckets
    rebuild_caps_bytes: list[int] | None


def _agree(
    module: nn.Module,
    plan: Sequence[Sequence[int | str]] | None,
    bucket_cap_mb: float | None,
    bucket_cap_mb_list: Sequence[float] | None,
    group: dist.ProcessGroup,
) -> _Setup:
    """This rank's setup, if it makes sense and all ranks have the same.

    Every rank learns what is wrong on any of them; one that went on alone would hang in the next collective.
    """
    mine: _Setup | ValueError
    try:
        mine = _set_up(module, plan, bucket_caps(bucket_cap_mb, bucket_cap_mb_list))
    except ValueError as error:
        mine = error
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    for theirs in everyone:
        if isinstance(theirs, ValueError):
            raise theirs
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            raise RuntimeError(_difference(everyone[0], theirs, rank))
    return everyone[0]  # type: ignore[no-any-return]  # gathered objects have no type


def _set_up(module: nn.Module, plan: Sequence[Sequence[int | str]] | None, caps_bytes: list[int]) -> _Setup:
    parameters = trainable_parameters(module)
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no trainable parameter, so there is nothing to average")
    if sparse := sparse_parameters(module) & set(parameters):
        raise ValueError(f"sparse gradients cannot be averaged yet: set sparse=False for {', '.join(sorted(sparse))}")
    tensors = list(parameters.values())
    if plan is None:
        keys = [bucket_key(tensor) for tensor in tensors]
        buckets = initial_buckets([size_bytes(tensor) for tensor in tensors], caps_bytes, keys=keys)
    else:
        buckets = _resolve_plan(plan, parameters)
    return _Setup(
        parameters=[_describe(name, tensor) for name, tensor in module.named_parameters()],
        buffers=[_describe(name, tensor) for name, tensor in module.named_buffers()],
        buckets=buckets,
        rebuild_caps_bytes=caps_bytes if plan is None else None,
    )


def _describe(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...], str]:
    return name, tuple(tensor.shape), tensor.stride(), str(tensor.dtype)


def _difference(first: _Setup, other: _Setup, rank: int) -> str:
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


def _resolve_plan(plan: Sequence[Sequence[int | str]], parameters: dict[str, nn.Parameter]) -> Buckets:
    """Names to parameter indices; a bucket of mixed dtypes or devices is refused."""
    indices = {name: index for index, name in enumerate(parameters)}
    if unknown := {entry for bucket in plan for entry in bucket if isinstance(entry, str)} - set(indices):
        raise ValueError(f"plan: no trainable parameter is called {sorted(unknown)[0]!r}")
    buckets = [[indices[entry] if isinstance(entry, str) else entry for entry in bucket] for bucket in plan]
    check_partition(buckets, len(parameters))
    keys = [bucket_key(parameter) for parameter in parameters.values()]
    for number, bucket in enumerate(buckets):
        if len({keys[index] for index in bucket}) > 1:
            raise ValueError(f"plan: bucket {number} mixes dtypes or devices; give each its own bucket")
    return buckets
