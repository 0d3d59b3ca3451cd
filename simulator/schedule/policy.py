"""Policy: settings of the reducer, and how the training script uses it."""

import reprlib
from collections.abc import Sequence
from typing import Any, Literal, Self, TypedDict

from pydantic import Field, field_validator, model_validator

from reference.bucketing import Order, bucket_caps
from reference.files import Settings

from .comm_hooks import NO_HOOK, CommHook, named_hook

Phase = Literal["steady", "first", "second", "rebuild"]


class Policy(Settings, strict=False):
    """Arguments of `DistributedDataParallel`, under its names, and how it is used; see each field.

    `hook` also takes the name of a comm hook, as `named_hook` does.
    """

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
        description="order in which parameters fill buckets, a name, all but `ready` as a plan; the user's wish",
    )
    order_seed: int = Field(default=0, description="seed of the order `random`, no unit; the user's choice")
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
        description="whether buckets in which no rank uses a parameter are not sent, yes or no; DDP's argument",
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
        description="which iteration, a name: `first`, `second` (of a static graph, which rebuilds one later than "
        "others), `rebuild` (the one that rebuilds buckets), or `steady` (all later); the user's question",
    )

    @field_validator("hook", mode="before")
    @classmethod
    def _hook_by_name(cls, hook: Any) -> Any:
        if isinstance(hook, str):
            try:
                return named_hook(hook)
            except ValueError as error:  # pydantic puts the field's name in front
                raise ValueError(str(error).removeprefix("hook: ")) from None
        if not isinstance(hook, CommHook | dict):
            raise ValueError(f"expected a CommHook or the name of one, such as 'fp16', got {reprlib.repr(hook)}")
        return hook

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
        """Whether the reducer rebuilds its buckets after the first iteration."""
        follows_readiness = self.plan is None and self.order == "ready"
        return follows_readiness and (self.static_graph or not self.find_unused_parameters)

    @property
    def has_rebuilt(self) -> bool:
        """Whether the buckets of this phase are the rebuilt ones."""
        return self.rebuilds and self.phase not in ("first", "second")

    @property
    def launches_at_the_end(self) -> bool:
        """Whether all buckets are launched after the backward pass, as in a static graph's first iteration."""
        return self.static_graph and self.phase == "first"

    def caps_bytes(self) -> list[int]:
        """Caps for `reference.bucketing.assign_buckets`."""
        caps_mb = self.bucket_cap_mb_list
        if caps_mb is None and self.first_bucket_mb is not None:
            caps_mb = (self.first_bucket_mb, 25 if self.bucket_cap_mb is None else self.bucket_cap_mb)
        return bucket_caps(self.bucket_cap_mb, caps_mb)


class PolicySettings(TypedDict, total=False):
    """Fields of `Policy` as keyword arguments of `predict` and `sweep`."""

    bucket_cap_mb: float | None
    bucket_cap_mb_list: Sequence[float] | None
    first_bucket_mb: float | None
    plan: Sequence[Sequence[int]] | None
    order: Order
    order_seed: int
    broadcast_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    gradient_as_bucket_view: bool
    hook: CommHook | str
    sparse_density: float
    sync_every: int
    process_groups: int
    phase: Phase
