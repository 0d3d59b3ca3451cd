"""Data parallelism as a module wrapper; `minimal` has the simplest forms of it.

The sections follow an iteration: construction, forward pass, backward pass. The optimiser step needs no code here,
because it sees the same averaged gradients on every rank.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import _MixedPrecision

from .broadcast import BufferHook, broadcast_coalesced
from .bucketing import bucket_caps, first_iteration_caps
from .buckets import Features
from .checks import construction
from .checks.construction import Setup, set_up, verify_setup
from .checks.launch_order import CheckedLaunchOrder, new_series
from .comm_hooks.interface import Hook, check_hook
from .delayed_all_reduce import DelayedAllReduce, resolve_delayed
from .forward_parameters import ForwardParameters, compose, is_replaced, slots
from .join import JoinableModule
from .mixed_precision import (
    ReductionState,
    cast_buffers,
    cast_inputs,
    casts,
    check_config,
    reduction_dtype,
    sum_in_low_precision,
)
from .observer import fail
from .parameters import sparse_parameters, synchronized_buffers, synchronized_tensors, trainable_parameters
from .reducer import Reducer
from .tensor_parallel import is_slice, localize, put_back, stand_ins
from .torch_compat import DataParallelNames, LoggingData
from .unused_parameters import call_at_backward, tensors_in, through_sink

PROCESS_LOCAL = ("process_group", "reducer", "log", "delayed", "_presence", "_slots")
"""Attributes that are not pickled."""

_Method = TypeVar("_Method", bound=Callable[..., Any])
_not_compiled = cast("Callable[[_Method], _Method]", torch.compiler.disable)


class DistributedDataParallel(DataParallelNames, JoinableModule, nn.Module):
    """Wraps a module so that its gradients are averaged over all ranks while the backward pass runs.

    A drop-in for torch 2.13's class of this name. Every rank constructs it at the same time with the same
    arguments. Ranks start from rank 0's parameters and buffers; forward returns what the module returns; after
    each backward pass every rank holds the same averaged gradients. The state dict is that of torch's class: the
    module's, behind the prefix `module.`. Parameters and buffers named in the module's
    `_ddp_params_and_buffers_to_ignore` are not synchronised.

    Args:
        module: The module to train; do not add, remove or freeze parameters afterwards.
        device_ids: A list with the one GPU that inputs are moved to. None: inputs stay where they are.
        output_device: Accepted as in torch; appears in the logging data only. None: `device_ids[0]`.
        dim: Accepted as in torch; only `scatter` and `gather` use it, which forward does not call.
        broadcast_buffers: Deprecated alias of `forward_sync_buffers`; False also skips the buffers at construction.
        init_sync: Whether ranks compare their modules and start from rank 0's. False: construction
            communicates nothing.
        process_group: The ranks that train together. None: the default group.
        bucket_cap_mb: Size in MiB at which a bucket closes. None: 25, and 1 for the first bucket.
        find_unused_parameters: Whether to search forward's outputs for parameters that get no gradient.
        check_reduction: Deprecated, without effect.
        gradient_as_bucket_view: Whether gradients are views of the buckets: saves memory and the copy out.
        static_graph: Whether every iteration uses the same parameters, each equally often: permits re-entrant and
            repeated activation checkpoints, and makes the search for unused parameters unnecessary.
        delay_all_reduce_named_params: Pairs of name and parameter that leave the buckets; see `delayed_all_reduce`.
        param_to_hook_all_reduce: The parameter whose gradient launches the all-reduce of those.
        mixed_precision: torch's `_MixedPrecision`: dtypes of computation, all-reduces and buffers; see
            `mixed_precision`. None: everything in the parameters' dtype.
        device_mesh: The ranks as a one-dimensional mesh, instead of `process_group`. If it is a slice of a larger
            mesh, the module may be tensor-parallel over the others; see `tensor_parallel`.
        skip_all_reduce_unused_params: Whether to skip the all-reduce of buckets in which every parameter is unused;
            the same parameters must be unused on all ranks.
        bucket_cap_mb_list: Size in MiB of each bucket, the last for all further ones; overrides `bucket_cap_mb`.
        batched_grad_copy: Whether large gradients are packed by one fused copy too; small ones always are.
        forward_sync_buffers: Whether to broadcast rank 0's buffers in each synchronised forward pass. None: True.
        plan: Parameter indices or names by bucket, in launch order; such buckets are never rebuilt.
        debug: Whether each rank writes its launches to the process group's store, so that the error of a failed
            collective names the rank that left the launch order. With NCCL only its watchdog sees failures.

    Raises:
        RuntimeError: No process group, nothing to train, or parameters that differ between ranks.
        ValueError: Devices that make no sense, a plan that is not a partition of the parameters, or parameters that
            cannot be delayed.
        TypeError: `mixed_precision` is not a configuration of mixed precision.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: construction.Devices | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,  # noqa: FBT001 - this order and these names are torch's
        init_sync: bool = True,  # noqa: FBT001, FBT002
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,  # noqa: FBT001, FBT002
        check_reduction: bool = False,  # noqa: FBT001, FBT002
        gradient_as_bucket_view: bool = False,  # noqa: FBT001, FBT002
        static_graph: bool = False,  # noqa: FBT001, FBT002
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: _MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,  # noqa: FBT001, FBT002
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,  # noqa: FBT001, FBT002
        forward_sync_buffers: bool | None = None,  # noqa: FBT001
        *,
        plan: Sequence[Sequence[int | str]] | None = None,
        debug: bool = False,
    ) -> None:
        super().__init__()
        JoinableModule.__init__(self)
        construction.warn_of_check_reduction(check_reduction=check_reduction)
        self.forward_sync_buffers, sync_buffers_now = construction.resolve_buffer_sync(
            broadcast_buffers=broadcast_buffers, forward_sync_buffers=forward_sync_buffers
        )
        self.process_group = construction.resolve_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module = module
        self.mixed_precision = mixed_precision
        self._delay = delay_all_reduce_named_params, param_to_hook_all_reduce
        self.dim = dim
        self.bucket_cap_mb, self.bucket_cap_mb_list, self.plan = bucket_cap_mb, bucket_cap_mb_list, plan
        self.features = Features(
            find_unused_parameters=find_unused_parameters,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            batched_grad_copy=batched_grad_copy,
        )
        self.debug = debug
        self.launch_series = new_series(self.process_group) if debug else ""
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self.buffer_hook: BufferHook | None = None
        self._comm_hook: tuple[Any, ...] = ()  # hook and state; in pickles without the state if that is the group
        self.sink_clones = True
        self._given_devices = device_ids, output_device
        shards = localize(module) if is_slice(device_mesh) else {}
        self._sharded = stand_ins(shards)
        try:
            self._make_reducer(exchange=init_sync, with_buffers=sync_buffers_now)
        except BaseException:
            put_back(module, shards)  # a refused module stays as it was
            raise
        if init_sync:
            self.send_state(source=0, with_buffers=sync_buffers_now)
        self._replace_in_forward()

    # Construction

    def _make_reducer(self, *, exchange: bool, with_buffers: bool) -> None:
        setup = verify_setup(
            lambda: self._set_up(with_buffers=with_buffers), self.process_group, self.module, exchange=exchange
        )
        trainable = self.bucketed_parameters()
        self.device = next(iter(trainable_parameters(self.module).values())).device
        sparse = sparse_parameters(self.module)
        this = weakref.ref(self)
        self.reducer = Reducer(
            trainable,
            setup.buckets,
            rebuild_caps_bytes=setup.rebuild_caps_bytes,
            group=self.process_group,
            sparse=frozenset(index for index, name in enumerate(trainable) if name in sparse),
            features=self.features,
            sync_enabled=lambda: (alive := this()) is not None and alive.require_backward_grad_sync,
        )
        if self.debug:
            self.reducer.launch_order = CheckedLaunchOrder(self.process_group, self.launch_series)
        self._has_buffers = bool(synchronized_buffers(self.module))
        self._forward_ran = False
        self.log = LoggingData(self.device)
        self.reducer.observers.append(self.log)
        if self.mixed_precision is not None and (dtype := reduction_dtype(self.mixed_precision)) is not None:
            self._use_comm_hook(ReductionState(dtype, this), sum_in_low_precision)
        self.delayed: DelayedAllReduce | None = None
        _, trigger = self._delay
        if trigger is not None:
            parameters = list(dict.fromkeys(self.delayed_parameters.values()))
            self.delayed = DelayedAllReduce(parameters, trigger, self.process_group)
        self._slots = slots(self.module, trainable_parameters(self.module).values())

    def bucketed_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters in the buckets by name, in the order of the parameter index: all but the delayed ones."""
        return trainable_parameters(self.module, without=self.delayed_parameters)

    def _replace_in_forward(self) -> None:
        """Have forward compute with low-precision copies, sharded tensors or both instead of the parameters."""
        stand_ins = self._sharded
        if self.mixed_precision is not None:
            cast_buffers(self.module, self.mixed_precision)
            stand_ins = compose(casts(self.module, self.mixed_precision), self._sharded)
        self.forward_parameters = ForwardParameters(self.module, stand_ins) if stand_ins else None
        if self.forward_parameters is not None and not self._sharded:  # a sharded module cannot do without
            weakref.finalize(self, self.forward_parameters.detach)

    def _set_up(self, *, with_buffers: bool) -> Setup:
        check_config(self.mixed_precision)
        self.delayed_parameters = resolve_delayed(self.module, *self._delay)
        caps = bucket_caps(self.bucket_cap_mb, self.bucket_cap_mb_list)
        first_caps = first_iteration_caps(
            caps, listed=bool(self.bucket_cap_mb_list), graph_may_change=self.features.graph_may_change
        )
        setup = set_up(
            self.module, self.plan, first_caps, caps, with_buffers=with_buffers, delayed=self.delayed_parameters
        )
        trainable = list(trainable_parameters(self.module).values())
        self.device_ids, self.output_device = construction.resolve_devices(trainable, *self._given_devices)
        return setup

    def send_state(self, *, source: int, with_buffers: bool) -> None:
        """Overwrite every rank's parameters and buffers with those of `source`."""
        tensors = synchronized_tensors(self.module)
        if not with_buffers:
            for name in synchronized_buffers(self.module):
                del tensors[name]
        broadcast_coalesced(list(tensors.values()), self.process_group, source=source)

    # Forward pass

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs and return its output."""
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._before_forward(inputs, kwargs)
            with self._inside_ddp_forward():
                output = self.module(*inputs, **kwargs)
            return self._after_forward(output)

    @_not_compiled
    def _before_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not self._forward_ran:
            self._forward_ran = True
            self._setup_in_backward_optimizers()
        if torch.is_grad_enabled():
            self._check_parameters()
            self.reducer.prepare_for_forward(synchronized=self.require_backward_grad_sync)
        self._presence = Join.notify_join_context(self)
        # Under Join, a rank without inputs cannot know whether the other ranks have gradients enabled.
        if torch.is_grad_enabled() or self._join_config.enable:
            self.reducer.rebuild_if_due()
        if self.sends_buffers(after_forward=False):
            self.send_buffers()
        if self._join_config.enable:
            self.announce_averaging(wanted=torch.is_grad_enabled() and self.require_backward_grad_sync)
        if self.device_ids:
            device = torch.device(self.device.type, self.device_ids[0])
            (inputs,), (kwargs,) = _to_kwargs(inputs, kwargs, device, use_side_stream_for_tensor_copies=True)
        if self.mixed_precision is not None:
            inputs, kwargs = cast_inputs(self.mixed_precision, inputs, kwargs)
        if self.forward_parameters is not None:
            self.forward_parameters.restore()
        return inputs, kwargs

    def _check_parameters(self) -> None:
        """Raise RuntimeError if a parameter has been replaced by another since the module was wrapped.

        If all are replaced, looking at any of them finds out. If only some are, the others' gradients arrive, so an
        unfinished backward pass is reported, unless unused parameters are searched for: then all are looked at.
        """
        turn = self.reducer.iterations % len(self._slots)
        looked_at = self._slots if self.features.graph_may_change else self._slots[turn : turn + 1]
        if all(slot.module._parameters.get(slot.name) is slot.parameter for slot in looked_at):
            return
        if replaced := [slot for slot in self._slots if is_replaced(slot)]:
            names = {parameter: name for name, parameter in self.module.named_parameters()}
            listed = ", ".join({names[slot.module._parameters[slot.name]]: None for slot in replaced})  # type: ignore[index]
            fail(
                self.reducer.observers,
                f"rank {dist.get_rank(self.process_group)}: {listed}: other parameters than those that were wrapped. "
                "load_state_dict(assign=True) or an assignment has replaced them, and their gradients would not be "
                "averaged. Load without assign=True, or wrap the module after loading",
            )

    @_not_compiled
    def _after_forward(self, output: Any) -> Any:
        if self.sends_buffers(after_forward=True):
            self.send_buffers()
        averaging = torch.is_grad_enabled() and self.require_backward_grad_sync
        # As in torch: buffers are sent again only after a forward pass whose gradients are averaged.
        self.require_forward_param_sync = averaging
        if self.delayed is not None and averaging:
            self.delayed.forward_done()
        if averaging:
            outputs = list(tensors_in(output))
            self.reducer.prepare_for_backward(outputs, self.rank_counter(self._presence))
            if self.reducer.tracker.needs_sink:
                return through_sink(output, self.reducer.backward_starts, clone=self.sink_clones)
            call_at_backward(outputs, self.reducer.backward_starts)
        elif torch.is_grad_enabled():
            self.reducer.prepare_without_averaging()
        return output

    def sends_buffers(self, *, after_forward: bool) -> bool:
        """Whether this iteration sends buffers after the forward pass or, with `after_forward=False`, before it."""
        wanted = self.require_forward_param_sync and self.forward_sync_buffers
        hooked_after = self.buffer_hook is not None and self.buffer_hook.after_forward
        return wanted and self._has_buffers and after_forward == hooked_after

    def send_buffers(self, *, candidate: bool = True) -> None:
        """Broadcast rank 0's buffers (under Join: those of the highest rank with inputs), or call the buffer hook.

        Args:
            candidate: Whether this rank may be the source under Join: it still has inputs.
        """
        source = self.agree_on_rank(candidate=candidate) if self._join_config.enable else 0
        named = synchronized_buffers(self.module)
        # The graph of an earlier forward pass may have saved a buffer; its backward pass must still be allowed.
        with torch.no_grad(), _unsafe_preserve_version_counter(tuple(named.values())):
            if self.buffer_hook is None:
                broadcast_coalesced(list(named.values()), self.process_group, source=source)
            else:
                self.reducer.after_backward += self.buffer_hook(named)

    # Backward pass

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: passes inside the context average nothing.

        The first synchronised backward pass afterwards averages the accumulated gradients.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Replace the all-reduce by `hook(state, bucket)`; call once, between two iterations.

        Deep copies and pickles of the module keep the hook, with a copy of its state.

        Args:
            state: Passed to every call of the hook.
            hook: Gets a `GradBucket` and returns a future of the flat tensor that becomes the gradients.

        Raises:
            TypeError: The hook is not callable.
            ValueError: The hook has no parameter `bucket`, or its annotations are not those of a comm hook.
            RuntimeError: A comm hook is registered already, or a backward pass has begun and not ended.
        """
        self._use_comm_hook(state, hook)
        self._comm_hook = hook, state

    def _use_comm_hook(self, state: object, hook: Hook) -> None:
        with self.log.errors():
            check_hook(hook)
            self.reducer.register_comm_hook(state, hook)
        self.log.comm_hook = getattr(hook, "__qualname__", repr(hook))

    # Pickling

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: this "
                "module has another, which cannot be pickled"
            )
        state = self.__dict__.copy()
        for process_local in (*PROCESS_LOCAL, "torch_logger", "torch_reducer"):
            state.pop(process_local, None)
        if self._comm_hook and self._comm_hook[1] is self.process_group:
            state["_comm_hook"] = self._comm_hook[:1]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = construction.resolve_group(None)
        self._make_reducer(exchange=False, with_buffers=False)
        if self._comm_hook:
            hook, hook_state = (*self._comm_hook, self.process_group)[:2]
            self.register_comm_hook(hook_state, hook)
