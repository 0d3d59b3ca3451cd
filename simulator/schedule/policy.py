"""Policy: what the reducer is told, and the buckets and collectives that follow from it."""

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from reference.bucketing import (
    MIB,
    BucketAssignment,
    Order,
    assign_buckets,
    bucket_caps,
    check_partition,
    first_iteration_caps,
    initial_buckets,
    plan_buckets,
)
from reference.schema import Settings
from reference.trace import Buffer, Parameter, Trace

from ..workload.compute_times import ready_order, unused_parameters
from .comm_hooks import NO_HOOK, CommHook
from .schedule import JoinEnd, Outline

Phase = Literal["steady", "first", "second", "rebuild"]
BITMAP_BYTES = 4
"""Of one parameter in the map of used ones, which is int32 (torch: `local_used_map`)."""
ORDER_BYTES = 8
"""Of one parameter in the order of readiness that rank 0 tells all."""
JOIN_BYTES = 4
"""Of the one float that ranks add up under Join: to count those with inputs, and to tell whether any averages."""
PIECE_BYTES = 250 * MIB
"""Of buffers that are broadcast together."""
RANK_BYTES = 8
"""Of the highest rank that has inputs, whose buffers count under Join."""


class Policy(Settings, strict=False):
    """Arguments of `DistributedDataParallel`, under its names, and how it is used; see each field."""

    bucket_cap_mb: float | None = Field(
        default=25, description="size at which a bucket closes, MiB, None: 25, and 1 for the first; DDP's argument"
    )
    bucket_cap_mb_list: tuple[float, ...] | None = Field(
        default=None, description="sizes of the first, second, ... bucket, MiB, the last holds on; DDP's argument"
    )
    first_bucket_mb: float | None = Field(
        default=None, description="size of the first bucket alone, MiB; torch's kDefaultFirstBucketBytes"
    )
    plan: tuple[tuple[int, ...], ...] | None = Field(
        default=None,
        description="buckets in launch order in place of caps and order, parameter indices; our DDP's argument",
    )
    order: Order = Field(
        default="ready",
        description="how parameters are walked into buckets, a name, all but `ready` as a plan; the user's wish",
    )
    order_seed: int = Field(default=0, description="decides the order `random`, no unit; the user's choice")
    broadcast_buffers: bool = Field(
        default=True, description="whether rank 0's go to all before each forward pass, yes or no; DDP's argument"
    )
    find_unused_parameters: bool = Field(
        default=False,
        description="whether to search the graph, add up a bitmap and never rebuild, yes or no; DDP's argument",
    )
    static_graph: bool = Field(
        default=False,
        description="whether the first launches come after the backward pass, yes or no; DDP's argument",
    )
    skip_all_reduce_unused_params: bool = Field(
        default=False,
        description="whether buckets in which no rank uses a parameter stay, yes or no; DDP's argument",
    )
    gradient_as_bucket_view: bool = Field(
        default=False, description="whether averages need no copying out of buckets, yes or no; DDP's argument"
    )
    hook: CommHook = Field(
        default=NO_HOOK, description="what is sent and computed for each bucket, bytes and ns; register_comm_hook"
    )
    sparse_density: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="rows of a sparse gradient that a batch touches, a fraction of the parameter's; "
        "distinct tokens of a batch by the vocabulary",
    )
    sync_every: int = Field(
        default=1, ge=1, description="iterations in a cycle, all but the last under `no_sync`, a count; the script's"
    )
    process_groups: int = Field(
        default=1, ge=1, description="queues that take collectives in turn, a count; the script's process groups"
    )
    phase: Phase = Field(
        default="steady",
        description="which iteration, a name: `first`, `second` (a static graph's, which rebuilds one later than "
        "others), `rebuild` (the one with it), or `steady` (all later); the user's question",
    )

    @model_validator(mode="after")
    def _has_caps(self) -> Self:
        self.caps_bytes()
        if self.bucket_cap_mb_list is not None and self.first_bucket_mb is not None:
            raise ValueError("first_bucket_mb: expected none beside bucket_cap_mb_list, whose first entry it is")
        return self

    @model_validator(mode="after")
    def _has_features_that_go_together(self) -> Self:
        if self.phase == "second" and not self.static_graph:
            raise ValueError("phase: expected static_graph with `second`: without, the second iteration is `rebuild`")
        if self.skip_all_reduce_unused_params and not self.find_unused_parameters:
            raise ValueError("skip_all_reduce_unused_params: expected find_unused_parameters, which finds them")
        return self

    @property
    def unused_allowed(self) -> bool:
        """Whether a parameter may get no gradient."""
        return self.find_unused_parameters or self.static_graph

    @property
    def rebuilds(self) -> bool:
        """Whether buckets are laid out anew after the first iteration."""
        follows_readiness = self.plan is None and self.order == "ready"
        return follows_readiness and (self.static_graph or not self.find_unused_parameters)

    @property
    def has_rebuilt(self) -> bool:
        """Whether that has happened."""
        return self.rebuilds and self.phase not in ("first", "second")

    @property
    def launches_at_the_end(self) -> bool:
        """Whether all buckets are launched after the backward pass: a static graph counts in its first iteration."""
        return self.static_graph and self.phase == "first"

    def caps_bytes(self) -> list[int]:
        """Caps for `reference.bucketing.assign_buckets`."""
        caps_mb = self.bucket_cap_mb_list
        if caps_mb is None and self.first_bucket_mb is not None:
            caps_mb = (self.first_bucket_mb, 25 if self.bucket_cap_mb is None else self.bucket_cap_mb)
        return bucket_caps(self.bucket_cap_mb, caps_mb)


def buckets_of(policy: Policy, trace: Trace) -> BucketAssignment:
    """The buckets that the reducer would use for the trace's model, in launch order.

    Raises:
        ValueError: A plan that leaves a parameter out, has it twice, or an unknown one.
    """
    if policy.plan is not None:
        check_partition(policy.plan, len(trace.sizes_bytes), name="plan")
        for number, bucket in enumerate(policy.plan):
            if len(kinds := sorted({trace.keys[index] for index in bucket})) > 1:
                raise ValueError(f"plan: expected one dtype a bucket, bucket {number} has {' and '.join(kinds)}")
        return [list(bucket) for bucket in policy.plan]
    sizes, keys, sparse, caps = trace.sizes_bytes, trace.keys, trace.sparse, policy.caps_bytes()
    if policy.order == "ready" and not policy.has_rebuilt:
        listed = policy.bucket_cap_mb_list is not None
        caps = first_iteration_caps(
            caps, listed=listed, graph_may_change=policy.find_unused_parameters and not policy.static_graph
        )
        return initial_buckets(sizes, caps, keys=keys, sparse=sparse)
    ready, unused = ready_order(trace)
    return plan_buckets(
        policy.order,
        sizes,
        caps,
        ready_order=ready + unused,
        keys=keys,
        sparse=sparse,
        seed=policy.order_seed,
    )


def outline_of(policy: Policy, trace: Trace, buckets: Sequence[Sequence[int]], *, joins: bool) -> Outline:
    """What an iteration under this policy consists of.

    Args:
        policy: What the reducer is told.
        trace: Of the model.
        buckets: Parameter indices by bucket, in launch order.
        joins: Whether the ranks train under Join.
    """
    parameters = trace.workload.parameters
    static_first = policy.static_graph and policy.phase == "first"
    searches = policy.find_unused_parameters and not policy.static_graph
    broadcasts = policy.broadcast_buffers and trace.workload.source == "module"
    always, sometimes = unused_parameters(trace)
    skipped = always if policy.skip_all_reduce_unused_params and searches else frozenset()
    return Outline(
        messages=tuple(
            policy.hook.message([parameters[index] for index in bucket], policy.sparse_density) for bucket in buckets
        ),
        skipped=frozenset(number for number, bucket in enumerate(buckets) if skipped.issuperset(bucket)),
        local_iterations=policy.sync_every - 1,
        rebuild_bytes=len(parameters) * ORDER_BYTES if policy.phase == "rebuild" and policy.rebuilds else None,
        join_bytes=JOIN_BYTES if joins else None,
        source_bytes=RANK_BYTES if joins and broadcasts and trace.workload.buffers else None,
        buffer_bytes=pieces_bytes(trace.workload.buffers) if broadcasts else (),
        searches=searches,
        bitmap_bytes=len(parameters) * BITMAP_BYTES if searches or static_first else None,
        leaves_some_out=bool(sometimes),
    )


def join_end_of(policy: Policy, trace: Trace) -> JoinEnd:
    """What ranks send under Join once all have run out of inputs: the model, as far as a trace knows it."""
    tensors: list[Parameter | Buffer] = [
        *trace.workload.parameters,
        *(trace.workload.buffers if policy.broadcast_buffers else ()),
    ]
    return JoinEnd(JOIN_BYTES, RANK_BYTES, pieces_bytes(tensors))


def pieces_bytes(tensors: Sequence[Parameter | Buffer]) -> tuple[int, ...]:
    """Bytes of the pieces in which tensors are broadcast, as `reference.broadcast` cuts them."""
    sizes, keys = [tensor.size_bytes for tensor in tensors], [tensor.dtype for tensor in tensors]
    return tuple(sum(sizes[index] for index in piece) for piece in assign_buckets(sizes, [PIECE_BYTES], keys=keys))
