"""Schedule: the buckets of an iteration, and the steps of every rank, which differ in durations and in a few waits.

A rank computes, launches collectives and waits for them. Collectives are numbered in launch order. The order of the
steps is that of `ddplab.reference.reducer`: gradients become ready, full buckets are packed, buckets are launched
strictly in bucket order, and after the backward pass each bucket is waited for and copied out. Before the forward
pass, rank 0 broadcasts its buffers in few flat tensors, which are copied out too.

With the grouping "module", steps and order are those of FSDP2's `replicate()` in torch 2.13, and the buckets are the
modules that it wraps. Their parameters are copied for the forward pass ("unshard"). When the backward pass of a
module is done, its gradients are copied into a flat tensor, which is copied into the one that is reduced. Gradients
are then views of the averages, so nothing is copied out. The rank waits after the backward pass.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from ...reference import bucketing, message_sizes
from ...reference.bucketing import BucketAssignment
from ...reference.trace import Buffer, Parameter
from ..workload.compute_times import RecordedModel
from .comm_hook_messages import NO_HOOK, Message, Transport, gradient_bytes
from .policy import ITEM_BYTES, Policy

ComputeKind = Literal[
    "unsynchronized", "rebuild", "unshard", "forward", "search", "backward", "pack", "compress", "launch",
    "recompress", "decompress", "copy_out", "step",
]  # fmt: skip
CollectiveKind = Literal["join", "order", "broadcast", "all_reduce", "second_all_reduce", "bitmap"]


class Compute(NamedTuple):
    """The rank computes; the duration is in `EngineInput.duration_ns`."""

    kind: ComputeKind
    bucket: int | None = None  #: None for "copy_out": the buffers
    iteration: int = 0  #: for the kinds "unsynchronized" and "unshard": index of the iteration in its cycle


class LaunchCollective(NamedTuple):
    """The rank issues a collective and continues."""

    collective: int


class Condition(NamedTuple):
    """A condition that only some ranks meet."""

    kind: Literal["without_inputs", "with_unused", "all_used"]
    """The rank has run out of inputs under Join; some parameter got no gradient; or every parameter got one."""
    iteration: int = 0  #: for "without_inputs": before which iteration of the cycle, as an index


class Wait(NamedTuple):
    """The rank waits until a collective has finished."""

    collective: int
    only: Condition | None = None  #: which ranks wait; None: all


Instruction = Compute | LaunchCollective | Wait


class Collective(NamedTuple):
    """A `transport` of `size_bytes` between all ranks; `bucket` is None if it carries no gradients."""

    kind: CollectiveKind
    bucket: int | None
    transport: Transport
    size_bytes: int


@dataclass(frozen=True, slots=True)
class IterationSchedule:
    """What every rank does in one iteration, or in one cycle."""

    instructions: tuple[Instruction, ...]  #: steps, launches and waits, in order
    collectives: tuple[Collective, ...]  #: the collectives that the ranks launch and wait for, in launch order
    buckets: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    """Parameter indices by bucket, in launch order."""
    gradient_bytes: tuple[tuple[int, ...], ...] = field(default=(), compare=False)
    """Bytes of each gradient's values, likewise."""
    buffer_bytes: tuple[int, ...] = field(default=(), compare=False)  #: bytes of each buffer that rank 0 broadcasts
    launches_at_the_end: bool = field(default=False, compare=False)
    """Whether all buckets are launched after the backward pass."""
    launches_last_at_the_end: bool = field(default=False, compare=False)
    """Whether the last bucket is, and each bucket is packed right before its launch."""
    steps: tuple[Compute, ...] = field(init=False, repr=False, compare=False)
    """The computing steps, in order: the columns of `EngineInput.duration_ns`."""

    def __post_init__(self) -> None:
        steps = tuple(instruction for instruction in self.instructions if isinstance(instruction, Compute))
        object.__setattr__(self, "steps", steps)

    @property
    def launches(self) -> list[int]:
        """By collective, the place of its launch among the instructions."""
        return [place for place, one in enumerate(self.instructions) if isinstance(one, LaunchCollective)]


def buckets_of(policy: Policy, model: RecordedModel) -> BucketAssignment:
    """Assign the model's parameters to buckets as the reducer would under this policy, in launch order.

    Raises:
        ValueError: The plan does not contain every parameter exactly once, mixes dtypes in a bucket, or has a bucket
            that holds a parameter with sparse gradients and another one; or the model cannot be grouped by modules.
    """
    keys = [parameter.dtype for parameter in model.parameters]
    if policy.grouping == "module":
        return _module_buckets(model)
    if policy.plan is not None:
        bucketing.check_partition(policy.plan, len(keys), name="plan")
        for number, bucket in enumerate(policy.plan):
            if len(kinds := sorted({keys[index] for index in bucket})) > 1:
                raise ValueError(f"plan: expected one dtype per bucket, bucket {number} has {' and '.join(kinds)}")
            if alone := [index for index in bucket if len(bucket) > 1 and model.parameters[index].sparse]:
                name = model.parameters[alone[0]].name
                raise ValueError(f"plan: expected {name} alone, because its gradient is sparse, got bucket {bucket}")
        return [list(bucket) for bucket in policy.plan]
    first_caps, caps = policy.two_stage_caps()
    sizes = [parameter.size_bytes for parameter in model.parameters]
    sparse = [parameter.sparse for parameter in model.parameters]
    if policy.order == "ready" and not (policy.rebuilds and policy.phase not in ("first", "second")):
        return bucketing.initial_buckets(sizes, first_caps, keys=keys, sparse=sparse)
    ready_order = bucketing.rebuild_order(model.ready_order, len(keys))
    return bucketing.plan_buckets(policy.order, sizes, caps, ready_order=ready_order, keys=keys, sparse=sparse)


def _module_buckets(model: RecordedModel) -> BucketAssignment:
    """Assign the model's parameters to the modules that FSDP2 averages, in launch order."""
    parameters = model.parameters
    if sparse := next((one.name for one in parameters if one.sparse), None):
        raise ValueError(f"grouping: expected no sparse gradients, which FSDP2 refuses, got that of {sparse}")
    buckets = bucketing.module_buckets([one.name for one in parameters], model.ready_order)
    for bucket in buckets:
        if len(kinds := sorted({parameters[index].dtype for index in bucket})) > 1:
            name = parameters[bucket[0]].name
            raise ValueError(
                f"grouping: expected one dtype in each module, as FSDP2 does, got {' and '.join(kinds)} with {name}"
            )
    return buckets


BUCKET_STEPS: tuple[ComputeKind, ...] = ("backward", "pack", "compress", "launch")
"""Computing steps of a rank up to the launch of a bucket's collective."""
UNSENT_BUCKET_STEPS = BUCKET_STEPS[:2]
"""`BUCKET_STEPS` of a bucket that is never sent."""


def build_schedule(
    policy: Policy, model: RecordedModel, *, joins: bool = False, world_size: int = 1
) -> IterationSchedule:
    """List the steps of one synchronised iteration, after the iterations under `no_sync` of its cycle.

    The compute times of the model are not used. With `joins`, the ranks train under Join. The number of ranks has an
    effect with the policy's `zero`.

    Raises:
        ValueError: The plan is invalid (see `buckets_of`), a gradient is sparse and the policy's comm hook does not
            support sparse gradients, or the parameters have several dtypes with `zero`.
    """
    writer = _Writer()
    by_module, updated_bytes = policy.grouping == "module", _updated_bytes(policy, model, world_size)
    buffers = model.buffers if policy.broadcast_buffers and not (by_module or model.has_communication) else ()
    _precede_forward(writer, policy, model, buffers, joins=joins)
    if by_module:
        writer.compute("unshard", iteration=policy.sync_every - 1)
    writer.compute("forward")
    if policy.graph_may_change:
        writer.compute("search")
    buckets = buckets_of(policy, model)
    members = [[model.parameters[index] for index in bucket] for bucket in buckets]
    messages = [
        module_message(parameters, policy) if by_module else policy.hook.message(parameters, policy.sparse_density)
        for parameters in members
    ]
    knows_unused = policy.skip_all_reduce_unused_params and not policy.launches_at_the_end
    skipped = model.never_used if knows_unused else frozenset[int]()
    unsent = {number for number, bucket in enumerate(buckets) if skipped.issuperset(bucket)}
    awaited = _launch_buckets(writer, messages, unsent)
    sends_bitmap = policy.graph_may_change or policy.launches_at_the_end
    if sends_bitmap:
        map_bytes = len(model.parameters) * message_sizes.USED_MAP_BYTES
        bitmap = writer.launch(Collective("bitmap", None, "all_reduce", map_bytes))
    writer.compute("backward")
    if sends_bitmap:  # the bitmap decides whether the gradient of an unused parameter is copied out
        writer.wait(bitmap, only=Condition("with_unused"))
    for bucket in range(len(buckets)):
        if bucket in awaited:
            writer.wait(awaited[bucket])
        if bucket not in unsent and not by_module:
            writer.compute("decompress", bucket)
            writer.compute("copy_out", bucket)
    if sends_bitmap:
        writer.wait(bitmap, only=Condition("all_used"))
    writer.compute("step")
    updated = []
    for size in updated_bytes:
        writer.compute("launch")
        updated.append(writer.launch(Collective("broadcast", None, "broadcast", size)))
    for broadcast in updated:
        writer.wait(broadcast)
    return IterationSchedule(
        tuple(writer.instructions),
        tuple(writer.collectives),
        buckets=tuple(map(tuple, buckets)),
        gradient_bytes=tuple(tuple(gradient_bytes(parameters, policy.sparse_density)) for parameters in members),
        buffer_bytes=tuple(buffer.size_bytes for buffer in buffers),
        launches_at_the_end=policy.launches_at_the_end,
        launches_last_at_the_end=by_module,
    )


def _updated_bytes(policy: Policy, model: RecordedModel, world_size: int) -> list[int]:
    """Return the bytes of each broadcast of updated parameters: those of rank 0 first, then those of rank 1, ..."""
    if policy.zero is None:
        return []
    if len(kinds := sorted({one.dtype for one in model.parameters})) > 1:
        raise ValueError(f"zero: expected one dtype, as ZeroRedundancyOptimizer does, got {' and '.join(kinds)}")
    shards = bucketing.optimizer_shards([prod(one.shape) for one in model.parameters], world_size)
    sizes = [[model.parameters[index].size_bytes for index in shard] for shard in shards]
    if policy.zero == "parameters":
        return [size for own in sizes for size in own]
    return [sum(own) or EMPTY_SHARD_BYTES for own in sizes]


EMPTY_SHARD_BYTES = 4
"""Broadcast by a rank without parameters if those of a rank are broadcast together."""


def module_message(parameters: Sequence[Parameter], policy: Policy) -> Message:
    """Return the message of a module of these parameters that FSDP2 averages.

    Raises:
        ValueError: The policy has a comm hook.
    """
    if policy.hook != NO_HOOK:
        raise ValueError(
            f"hook: expected none with grouping='module', got {policy.hook.name}; FSDP2's replicate() has no comm "
            "hooks, and reduce_dtype makes its all-reduces smaller"
        )
    if policy.reduce_dtype is None:
        return Message("all_reduce", sum(one.size_bytes for one in parameters))
    return Message("all_reduce", sum(prod(one.shape) for one in parameters) * ITEM_BYTES[policy.reduce_dtype])


def build_join_end(policy: Policy, model: RecordedModel) -> IterationSchedule:
    """List the steps under Join after all ranks have run out of inputs: all receive the model of one rank."""
    writer = _Writer()
    for size in (message_sizes.JOIN_COUNT_BYTES, message_sizes.JOIN_RANK_BYTES):
        writer.complete(Collective("join", None, "all_reduce", size))
    writer.broadcast([*model.parameters, *(model.buffers if policy.broadcast_buffers else ())])
    return IterationSchedule(tuple(writer.instructions), tuple(writer.collectives))


def _precede_forward(
    writer: "_Writer", policy: Policy, model: RecordedModel, buffers: Sequence[Buffer], *, joins: bool
) -> None:
    """Write the iterations under `no_sync`, and what precedes the forward pass of the last iteration."""
    count_ranks = Collective("join", None, "all_reduce", message_sizes.JOIN_COUNT_BYTES)
    for iteration in range(policy.sync_every):
        without_inputs = Condition("without_inputs", iteration)
        if joins:
            writer.complete(count_ranks, only=without_inputs)
        if iteration == 0:  # only an iteration after a synchronised one rebuilds buckets and broadcasts buffers
            if policy.phase == "rebuild" and policy.rebuilds:
                size = len(model.parameters) * message_sizes.READY_ORDER_BYTES
                writer.complete(Collective("order", None, "broadcast", size))
                writer.compute("rebuild")
            if joins and buffers:
                writer.complete(Collective("join", None, "all_reduce", message_sizes.JOIN_RANK_BYTES))
            writer.broadcast(buffers)
            if buffers:
                writer.compute("copy_out")
        if joins:
            writer.complete(count_ranks, only=without_inputs)
        if iteration < policy.sync_every - 1:
            if policy.grouping == "module":
                writer.compute("unshard", iteration=iteration)
            writer.compute("unsynchronized", iteration=iteration)


def _launch_buckets(writer: "_Writer", messages: Sequence[Message | None], unsent: Collection[int]) -> dict[int, int]:
    """Write the backward pass up to the last launch; return, by bucket, the collective that completes its averages.

    A second collective is launched after the first one of the next bucket, or at once for the last bucket, as in
    `ddplab.reference.comm_hooks.powersgd`.
    """
    awaited: dict[int, int] = {}
    pending: list[tuple[int, Collective]] = []  # the second collective of the previous bucket, if any

    def launch_second() -> None:
        for bucket, collective in pending:
            writer.wait(awaited[bucket])
            writer.compute("recompress", bucket)
            awaited[bucket] = writer.launch(collective)
        pending.clear()

    for bucket, message in enumerate(messages):
        for kind in UNSENT_BUCKET_STEPS if bucket in unsent else BUCKET_STEPS:
            writer.compute(kind, bucket)
        if message is None or bucket in unsent:
            continue
        awaited[bucket] = writer.launch(Collective("all_reduce", bucket, message.transport, message.first_bytes))
        launch_second()
        if message.second_bytes is not None:
            pending.append((bucket, Collective("second_all_reduce", bucket, message.transport, message.second_bytes)))
    launch_second()
    return awaited


class _Writer:
    """Appends instructions, and numbers collectives in the order in which they are launched."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self.collectives: list[Collective] = []

    def compute(self, kind: ComputeKind, bucket: int | None = None, iteration: int = 0) -> None:
        self.instructions.append(Compute(kind, bucket, iteration))

    def launch(self, collective: Collective) -> int:
        """Append the launch; return the number of the collective."""
        self.collectives.append(collective)
        self.instructions.append(LaunchCollective(len(self.collectives) - 1))
        return len(self.collectives) - 1

    def wait(self, collective: int, only: Condition | None = None) -> None:
        self.instructions.append(Wait(collective, only))

    def complete(self, collective: Collective, only: Condition | None = None) -> None:
        """Launch a collective and wait for it at once."""
        self.wait(self.launch(collective), only)

    def broadcast(self, tensors: Sequence[Parameter | Buffer]) -> None:
        """Broadcast tensors in pieces of one dtype, and wait for all of them."""
        sizes, keys = [tensor.size_bytes for tensor in tensors], [tensor.dtype for tensor in tensors]

        def launch(piece: Sequence[int]) -> int:
            return self.launch(Collective("broadcast", None, "broadcast", sum(sizes[index] for index in piece)))

        message_sizes.send_in_pieces(sizes, keys, launch, self.wait)
