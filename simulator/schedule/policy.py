"""Policy: settings of the reducer, and how the training script uses it."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypedDict

from pydantic import Field, field_validator, model_validator

from ...reference.bucketing import Order, may_change, two_stage_caps
from ...reference.files.reading import Schema
from ...reference.files.value_ranges import CycleLength
from .comm_hook_messages import NO_HOOK, CommHook, named_hook

Phase = Literal["steady", "first", "second", "rebuild"]
Grouping = Literal["buckets", "fusion", "module"]
ZeroBroadcasts = Literal["parameters", "buckets"]
ReduceDtype = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: Mapping[ReduceDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
DDP_ONLY = (
    *("bucket_cap_mb_list", "plan", "find_unused_parameters", "static_graph"),
    *("skip_all_reduce_unused_params", "gradient_as_bucket_view", "hook", "zero"),
)
"""Fields of `Policy` that have no counterpart in FSDP2's `replicate()`."""


class PolicySettings(TypedDict, total=False):
    """The fields of `Policy`, as keyword arguments of `predict` and of the other functions that take them."""

    bucket_cap_mb: float | None
    bucket_cap_mb_list: Sequence[float] | None
    plan: Sequence[Sequence[int]] | None
    grouping: Grouping
    reduce_dtype: ReduceDtype | None
    order: Order
    broadcast_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    skip_all_reduce_unused_params: bool
    gradient_as_bucket_view: bool
    hook: CommHook | str
    sparse_density: float
    zero: ZeroBroadcasts | None
    cuda_graph: bool
    sync_every: int
    phase: Phase


class Policy(Schema, strict=False):
    """Arguments of `DistributedDataParallel`, by their names in torch, and how the training script uses it.

    `hook` also accepts the name of a comm hook; see `named_hook`.
    """

    bucket_cap_mb: float | None = None
    """bucket cap, MiB (None: 25, and 1 for the first bucket); DDP's argument"""
    bucket_cap_mb_list: tuple[float, ...] | None = None
    """caps of the first, second, ... bucket, MiB (the last cap applies to all later buckets); DDP's argument"""
    plan: tuple[tuple[int, ...], ...] | None = None
    """explicit buckets in launch order, which replace caps and order, parameter indices; argument of our DDP"""
    grouping: Grouping = "buckets"
    """what is all-reduced together, a name: `buckets`, as by DDP; `fusion`, the same, but a gradient that is alone in
    its bucket is not copied, as by Horovod and `torch._utils._flatten_dense_tensors`; or `module`, as by FSDP2's
    `replicate()`, each module that it wraps (`wrapped_modules` in `reference/bucketing.py`); chosen by the user"""
    reduce_dtype: ReduceDtype | None = None
    """dtype of the all-reduces of the grouping `module`, a name (None: the gradients'); as in MixedPrecisionPolicy"""
    order: Order = "ready"
    """order in which parameters fill buckets, a name (in training, all but `ready` need a plan, and `ready_from_last`
    the variable DDP_SET_LAST_BUCKET_CAP=1); chosen by the user"""
    broadcast_buffers: bool = True
    """whether rank 0 broadcasts its buffers before forward passes, yes or no; DDP's argument"""
    find_unused_parameters: bool = False
    """whether the reducer searches the graph for unused parameters, all-reduces a bitmap of them and never rebuilds
    its buckets, yes or no; DDP's argument"""
    static_graph: bool = False
    """whether the graph is the same in each iteration, so that all buckets of the first iteration are launched after
    its backward pass, yes or no; DDP's argument"""
    skip_all_reduce_unused_params: bool = False
    """whether buckets of which no rank uses a parameter are left out, yes or no; DDP's argument"""
    gradient_as_bucket_view: bool = False
    """whether gradients are views of buckets, so that averages are not copied out, yes or no; DDP's argument"""
    hook: CommHook = NO_HOOK
    """comm hook, which determines the bytes and the computation of each bucket, a name; for register_comm_hook"""
    sparse_density: float = Field(default=1.0, gt=0, le=1)
    """rows of a sparse gradient that one batch touches, a fraction of the parameter's rows; distinct tokens of a
    batch divided by the size of the vocabulary"""
    zero: ZeroBroadcasts | None = None
    """what torch's ZeroRedundancyOptimizer broadcasts after its step, a name: `parameters`, each alone, or `buckets`,
    those of a rank together, as with parameters_as_bucket_view (None: no such optimizer); from the training script"""
    cuda_graph: bool = False
    """whether a CUDA graph replays an iteration, so that no kernel waits for the host, yes or no; from the script"""
    sync_every: CycleLength = 1
    """iterations per cycle, of which all but the last run under `no_sync`, a count; from the training script"""
    phase: Phase = "steady"
    """iteration to predict, a name: `first`, `second` (only for a static graph, which rebuilds buckets in the third
    iteration), `rebuild` (the iteration that rebuilds buckets), `steady` (all later); chosen by the user"""

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

    @field_validator("plan", mode="before")
    @classmethod
    def _plan_is_no_name(cls, plan: Any) -> Any:
        if isinstance(plan, str):
            what = "a list of buckets, each a list of parameter indices, such as [[2, 3], [0, 1]]"
            raise ValueError(
                f"expected {what} (`buckets` in a file of `ddplab tune --out`), got {reprlib.repr(plan)}"
            )
        return plan

    @model_validator(mode="after")
    def _has_features_that_go_together(self) -> Self:
        self.two_stage_caps()  # raises if a cap is negative
        if self.phase == "second" and not self.static_graph:
            raise ValueError(
                "phase: expected static_graph=True for `second`; otherwise the second iteration is `rebuild`"
            )
        if self.cuda_graph and (self.phase != "steady" or self.graph_may_change):
            raise ValueError(
                "cuda_graph: expected a steady iteration that searches for no unused parameters to replay"
            )
        if self.skip_all_reduce_unused_params and not self.find_unused_parameters:
            raise ValueError("skip_all_reduce_unused_params: expected find_unused_parameters=True, which it requires")
        return self

    @model_validator(mode="after")
    def _has_what_modules_have(self) -> Self:
        if self.grouping == "module":
            for name in DDP_ONLY:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name}: expected the default with grouping='module', because FSDP2's replicate() has no "
                        f"such setting, got {getattr(self, name)!r}"
                    )
        elif self.reduce_dtype is not None:
            raise ValueError(
                f"reduce_dtype: expected grouping='module', got {self.grouping!r}; DDP's all-reduces have the dtype "
                "of the gradients, or that of a comm hook such as 'bf16'"
            )
        return self

    @classmethod
    def given(cls, policy: "Policy | None", settings: Mapping[str, Any], *, joins: bool = False) -> "Policy":
        """Return the policy, made from `settings`, keyword arguments of `predict`, if `policy` is None.

        Raises:
            ValueError: Both were given, a setting has an invalid value, or the reducer refuses one under Join.
            TypeError: A setting is not a field of `Policy`.
        """
        if unknown := [name for name in settings if name not in cls.model_fields]:
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}; settings are {', '.join(cls.model_fields)}")
        if policy is not None and settings:
            raise ValueError(
                f"policy: expected either a policy or settings, got both; also given: {', '.join(settings)}"
            )
        policy = cls(**settings) if policy is None else policy
        refused = {
            "grouping='module', because FSDP2's modules cannot join": policy.grouping == "module",
            "zero, because steps of ranks without inputs are not modelled": policy.zero is not None,
            "cuda_graph, because a replayed iteration cannot join": policy.cuda_graph,
            "skip_all_reduce_unused_params, which the reducer refuses under Join": (
                policy.skip_all_reduce_unused_params
            ),
        }
        for why, is_set in refused.items():
            if joins and is_set:
                raise ValueError(f"inputs: expected None with {why}")
        return policy

    @property
    def overruled(self) -> dict[str, str]:
        """The axes of a sweep that have no effect under this policy, each with the field that overrides it."""
        if self.grouping == "module":
            return {"bucket_cap_mb": "grouping", "order": "grouping"}
        if self.plan is not None:
            return {"bucket_cap_mb": "plan", "order": "plan"}
        return {} if self.bucket_cap_mb_list is None else {"bucket_cap_mb": "bucket_cap_mb_list"}

    @property
    def unused_allowed(self) -> bool:
        """Whether some parameters may get no gradient."""
        return self.find_unused_parameters or self.static_graph

    @property
    def graph_may_change(self) -> bool:
        """Whether each iteration searches the graph for unused parameters, and buckets are never rebuilt."""
        return may_change(find_unused_parameters=self.find_unused_parameters, static_graph=self.static_graph)

    @property
    def rebuilds(self) -> bool:
        """Whether the reducer rebuilds its buckets after the first iteration."""
        return self.plan is None and self.order == "ready" and self.grouping != "module" and not self.graph_may_change

    @property
    def launches_at_the_end(self) -> bool:
        """Whether all buckets are launched after the backward pass, as in a static graph's first iteration."""
        return self.static_graph and self.phase == "first"

    def recorded_as(self, world_size: int) -> dict[str, Any]:
        """Return the arguments with which `recorded_model` reads a trace."""
        shards = self.shards_on(world_size)
        return {"unused_allowed": self.unused_allowed, "shards": shards, "cuda_graph": self.cuda_graph}

    def shards_on(self, world_size: int) -> int:
        """Return over how many ranks the optimiser and its states are divided."""
        return 1 if self.zero is None else world_size

    def two_stage_caps(self) -> tuple[list[int], list[int]]:
        """Bucket caps in bytes until the rebuild and after it."""
        return two_stage_caps(self.bucket_cap_mb, self.bucket_cap_mb_list, graph_may_change=self.graph_may_change)
