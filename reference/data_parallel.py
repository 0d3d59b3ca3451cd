"""A drop-in for torch's DistributedDataParallel: its arguments and names, on top of `module_wrapper.DataParallel`.

Most of torch's names begin with an underscore, or torch keeps them for old scripts.
"""

import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType, Logger
from torch._C._distributed_c10d import Reducer as TorchReducer
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _rank_not_in_group
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation, _MixedPrecision

from .backward_exceptions import ExceptionSafeReducer
from .backward_pass import Expecting, Idle
from .broadcast import are_due, send_buffers
from .bucketing import MIB, bucket_caps
from .checks import construction
from .checks.launch_order import CheckedLaunchOrder, new_series
from .comm_hooks.allreduce import allreduce
from .comm_hooks.compress import fp16_compress
from .comm_hooks.interface import Hook
from .features.delayed_all_reduce import DelayedAllReduce, resolve_delayed
from .features.join import UnevenInputsHook, ranks_present
from .features.mixed_precision import (
    ReductionState,
    cast_buffers,
    cast_inputs,
    casts,
    check_config,
    sum_in_low_precision,
)
from .features.parameter_stand_ins import ForwardParameters, compose
from .features.tensor_parallel import is_slice, localize, put_back, stand_ins
from .message_sizes import PIECE_BYTES
from .module_wrapper import DataParallel
from .parameters import ModuleTensors, ignored_names, sparse_parameters, synchronized_buffers, trainable_parameters
from .recording.logging_data import LoggingData
from .recording.reducer_observer import Future, Observer, RecordingHook
from .reducer_options import Features, WrapperState


class TorchNamedReducer(ExceptionSafeReducer):
    """A reducer whose features and ranks may change between iterations; with the names of torch's, `ddp.reducer`."""

    def set_features(self, features: Features) -> None:
        """Change how unused parameters are found.

        Raises:
            RuntimeError: `static_graph` is set after the first iteration.
        """
        if features.static_graph and not self.features.static_graph and self.iterations > 0:
            self.fail("static_graph should be called before training loop starts, on the wrapped module")
        self.features = self.buckets.features = features
        self.tracker = self.make_tracker(features, self._parameters, self._accumulators, self._group)

    def set_group(self, group: dist.ProcessGroup) -> None:
        """Average over other ranks from now on, as if the reducer had just been constructed.

        The buckets are those of construction again, because ranks that come from different groups may have rebuilt
        theirs at different times. A backward pass that is under way is forgotten. Its collectives may never end, so
        nothing waits for them; they keep the old buckets' memory.
        """
        self._group = group
        if self._hook is not None:
            self._hook.group = group
        self._messages.rank = group.rank()
        self._state = Idle()
        self.iterations = 0
        self.ready_order = []
        self.after_backward.clear()
        self.inbox.reset()
        self.buckets.reset()
        self.tracker = self.make_tracker(self.features, self._parameters, self._accumulators, group)
        self._thorough = True

    count_ranks: Callable[[], int] | None = None  # of the next backward pass
    _clock: "_ReadyTimes | None" = None

    def prepare_for_backward(self, outputs: Sequence[Tensor], count_ranks: Callable[[], int] | None = None) -> None:
        """See `Reducer.prepare_for_backward`; after `_set_forward_pass_work_handle`, its divisor is the default."""
        counted, self.count_ranks = self.count_ranks, None
        super().prepare_for_backward(outputs, count_ranks or counted)

    def _set_forward_pass_work_handle(self, work: dist.Work, use_static_world_size: bool) -> None:  # noqa: FBT001
        self.count_ranks = None if use_static_world_size else partial(ranks_present, work)

    def _rebuild_buckets(self) -> bool:
        before = self.buckets.rebuilt
        self.rebuild_if_due()
        return self.buckets.rebuilt and not before

    def _push_all_rebuilt_params(self) -> None:
        self.ready_order = self.ready_order or list(range(len(self._parameters)))

    def _delay_all_reduce(self) -> None:
        """Average now what has arrived of a pass that waits for more; what has not counts as unused."""
        if isinstance(self._state, Expecting) and self._state.reduction.begun:
            reduction = self._state.reduction
            self._mark_ready(reduction, self._missing())
            self._finish(reduction)
            self._state = Idle()

    def _install_post_backward_futures(self, futures: Sequence[Future]) -> None:
        self.after_backward += futures

    def get_backward_stats(self) -> list[int]:
        """When each gradient arrived in the last backward pass, in ns from its start; after the first call."""
        if self._clock is None:
            self._clock = _ReadyTimes(len(self._parameters))
            self.observers.append(self._clock)
        return list(self._clock.ready_ns)

    def _get_local_used_map(self) -> Tensor:
        used: Tensor = self.tracker.used.tensor  # type: ignore[attr-defined]  # of the trackers that have a map
        return used

    def _ddp_graph_static(self) -> bool:
        return self.tracker.is_static

    def _run_allreduce_hook(self, bucket: Any) -> "torch.futures.Future[Any]":
        work: Any = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        return future

    def _set_optimizer_in_backward(self) -> None:
        self.optimizers_in_backward = True


class _ReadyTimes(Observer):
    """Takes the time of each gradient since the backward pass began, for torch's `get_backward_stats`."""

    watches_parameters = True

    def __init__(self, count: int) -> None:
        self.ready_ns = [0] * count
        self._start_ns = time.perf_counter_ns()

    def backward_started(self) -> None:
        """See `Observer`."""
        self._start_ns = time.perf_counter_ns()

    def parameter_ready(self, index: int) -> None:
        """See `Observer`."""
        self.ready_ns[index] = time.perf_counter_ns() - self._start_ns


def _feature(name: str) -> Any:
    """A read-only attribute of the wrapper; only construction and `_set_static_graph` set it."""

    def refuse(_ddp: Any, _value: Any) -> None:
        raise AttributeError(
            f"{name} cannot be changed after construction: the buckets depend on it. Wrap the module again"
        )

    return property(lambda ddp: getattr(ddp._own.features, name), refuse)


class _ActiveModule:
    """The wrapper that is in its forward pass, which the wrapper's class has as an attribute, like torch's."""

    def __get__(self, _ddp: Any, _class: type) -> "TorchDDP | None":
        return TorchDDP._active_ddp_module


class DistributedDataParallel(DataParallel):
    """Wraps a module so that its gradients are averaged over all ranks while the backward pass runs.

    A drop-in for torch 2.13's class of this name; see `DataParallel` for what it does. The state dict is that of
    torch's class, and so are all public names. It inherits nothing from that class, but counts as a subclass of it.

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
        ValueError: Devices that make no sense, a plan that is not a partition of the parameters, or parameters
            that cannot be delayed.
        TypeError: `mixed_precision` is not a configuration of mixed precision.
    """

    _reducer_class = TorchNamedReducer
    reducer: TorchNamedReducer

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
        forward_sync, initial_sync = construction.resolve_deprecated(
            check_reduction=check_reduction,
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
        )
        group = construction.resolve_group(process_group, device_mesh)
        self.mixed_precision, self.dim = mixed_precision, dim
        own = WrapperState(
            features=Features(
                find_unused_parameters=find_unused_parameters,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                static_graph=static_graph,
                gradient_as_bucket_view=gradient_as_bucket_view,
                batched_grad_copy=batched_grad_copy,
            ),
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            plan=plan,
            debug=debug,
            given_devices=(device_ids, output_device),
            delay=(delay_all_reduce_named_params, param_to_hook_all_reduce),
        )
        shards = localize(module) if is_slice(device_mesh) else {}
        try:
            super().__init__(
                module,
                own=own,
                process_group=group,
                forward_sync_buffers=forward_sync,
                init_sync=init_sync,
                init_sync_buffers=initial_sync,
            )
        except BaseException:
            put_back(module, shards)  # a refused module stays as it was
            raise
        if device_mesh is not None:
            self.device_mesh = device_mesh
        if shards or mixed_precision is not None:
            self._replace_in_forward(stand_ins(shards))

    # Construction

    def _set_up(self, *, with_buffers: bool) -> tuple[ModuleTensors, construction.Setup]:
        """See `DataParallel._set_up`; also checks the other arguments."""
        check_config(self.mixed_precision)
        self._own.delayed_parameters = resolve_delayed(self.module, *self._own.delay)
        tensors, setup = super()._set_up(with_buffers=with_buffers)
        trainable = tensors.trainable.values()
        self.device_ids, self.output_device = construction.resolve_devices(trainable, *self._own.given_devices)
        return tensors, setup

    def _make_reducer(self, *, exchange: bool, with_buffers: bool) -> None:
        """See `DataParallel._make_reducer`."""
        super()._make_reducer(exchange=exchange, with_buffers=with_buffers)
        own = self._own
        own.log = LoggingData(self.device)
        own.log.attach(self.reducer)
        own.input_steps.append(partial(_first_forward, weakref.ref(self)))
        if self.device_ids:
            own.input_steps.append(partial(_move, torch.device(self.device.type, self.device_ids[0])))
        if self.mixed_precision is not None:
            own.input_steps.append(partial(cast_inputs, self.mixed_precision))
            if (dtype := self.mixed_precision.reduce_dtype or self.mixed_precision.param_dtype) is not None:
                self._use_comm_hook(ReductionState(dtype, weakref.ref(self)), sum_in_low_precision)
        if (trigger := own.delay[1]) is not None:
            own.delayed = DelayedAllReduce(self._delay_all_reduce_params, trigger, self.process_group)

    def _replace_in_forward(self, sharded: dict[nn.Parameter, Callable[[Tensor], Tensor]]) -> None:
        """Have forward compute with low-precision copies, sharded tensors or both instead of the parameters."""
        replaced = sharded
        if self.mixed_precision is not None:
            cast_buffers(self.module, self.mixed_precision)
            replaced = compose(casts(self.module, self.mixed_precision), sharded)
        if replaced:
            self._own.forward_parameters = parameters = ForwardParameters(self.module, replaced)
            self._own.input_steps.append(partial(_restore, parameters))
            if not sharded:  # a sharded module cannot do without
                weakref.finalize(self, parameters.detach)

    def _use_comm_hook(self, state: object, hook: Hook) -> None:
        """See `DataParallel._use_comm_hook`; keeps an error, or the hook's name, in the logging data."""
        log = self._own.log
        try:
            super()._use_comm_hook(state, hook)
        except Exception as error:
            log.error = f"{type(error).__name__}: {error}"
            raise
        log.comm_hook = getattr(hook, "__qualname__", repr(hook))

    def join_hook(self, **kwargs: Any) -> UnevenInputsHook:
        """See `JoinableModule.join_hook`."""
        self._own.log.uneven_inputs = True
        return super().join_hook(**kwargs)

    # Names of torch's class

    @property
    def broadcast_buffers(self) -> bool:
        """Deprecated name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def find_unused_parameters(self) -> bool:
        """Whether the graph is searched for unused parameters; may change between iterations, on all ranks alike."""
        return self._own.features.find_unused_parameters

    @find_unused_parameters.setter
    def find_unused_parameters(self, value: bool) -> None:
        self._set_features(find_unused_parameters=value)

    gradient_as_bucket_view = _feature("gradient_as_bucket_view")
    batched_grad_copy = _feature("batched_grad_copy")
    skip_all_reduce_unused_params = _feature("skip_all_reduce_unused_params")
    static_graph = _feature("static_graph")

    @property
    def bucket_bytes_cap(self) -> int:
        """Size in bytes at which a bucket closes; with a list of caps, the largest."""
        return max(bucket_caps(self._own.bucket_cap_mb, self._own.bucket_cap_mb_list))

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether the user has given no cap, so that the first bucket is smaller."""
        return self._own.bucket_cap_mb is None and not self._own.bucket_cap_mb_list

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The caps in `bucket_cap_mb_list`, in bytes."""
        return [int(cap * MIB) for cap in self._own.bucket_cap_mb_list or []]

    device_type = property(attrgetter("device.type"), doc="Type of the module's device.")
    broadcast_bucket_size = PIECE_BYTES
    """Size in bytes of the pieces in which parameters and buffers are broadcast."""
    use_side_stream_for_tensor_copies = True
    _has_rebuilt_buckets = property(attrgetter("reducer.buckets.rebuilt"))
    will_sync_module_buffers = are_due

    # torch's own methods, which need only the attributes above; the wrapper itself does not call them
    scatter = TorchDDP.scatter
    gather = TorchDDP.gather
    to_kwargs = TorchDDP.to_kwargs
    _build_debug_param_to_name_mapping = TorchDDP._build_debug_param_to_name_mapping
    _default_broadcast_coalesced = TorchDDP._default_broadcast_coalesced
    _distributed_broadcast_coalesced = TorchDDP._distributed_broadcast_coalesced
    _distributed_rank = TorchDDP._distributed_rank
    _active_ddp_module = _ActiveModule()
    _get_active_ddp_module = TorchDDP._get_active_ddp_module
    _get_data_parallel_params = staticmethod(TorchDDP._get_data_parallel_params)
    _log_and_throw = TorchDDP._log_and_throw
    _register_fused_optim = TorchDDP._register_fused_optim
    _set_ddp_sink_clone = TorchDDP._set_ddp_sink_clone
    _set_params_and_buffers_to_ignore_for_model = staticmethod(TorchDDP._set_params_and_buffers_to_ignore_for_model)

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the module's parameters are on several devices."""
        return len({parameter.device for parameter in self._module_parameters}) > 1

    @property
    def modules_buffers(self) -> list[Tensor]:
        """Buffers that are synchronised."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """Buffers that are synchronised, by name."""
        return synchronized_buffers(self.module)

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        """All parameters but those that are ignored or whose all-reduce is delayed."""
        skipped = self.parameters_to_ignore | set(self._own.delayed_parameters)
        return [parameter for name, parameter in self.module.named_parameters() if name not in skipped]

    @property
    def _delay_all_reduce_params(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(self._own.delayed_parameters.values()))

    @property
    def _delay_all_reduce_all_params(self) -> bool:
        return not self._own.bucketed(trainable_parameters(self.module))

    _sync_buffers = send_buffers

    def _remove_autograd_hooks(self) -> None:
        self.reducer.detach()

    def _check_reducer_finalized(self) -> None:
        self.reducer.check_finished()

    # Logging

    @property
    def logger(self) -> Any:
        """A logger of torch's own type, for torch functions that report errors to a logger."""
        if not self._own.torch_logger:
            dummy = nn.Parameter(torch.empty(1))  # torch's logger needs torch's reducer, which needs a parameter
            reducer = TorchReducer([dummy], [[0]], [1], self.process_group)
            self._own.torch_logger = Logger(reducer), reducer
        return self._own.torch_logger[0]

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        data: dict[str, str | int] = self._own.log.data(self)
        if self._own.torch_logger:
            torchs = self.logger._get_ddp_logging_data()
            if torchs.ints_map.get("has_error"):
                data |= {"has_error": 1, "error": torchs.strs_map["error"]}
        return data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self._own.log.set_sample_rate(sample_rate)

    # Features that torch switches on after construction

    def _set_features(self, **changed: bool) -> None:
        self.reducer.set_features(replace(self._own.features, **changed))
        self._own.features = self.reducer.features

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        self._set_features(static_graph=True)
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel; a static graph needs no search, "
                "because its first iteration shows which parameters are unused. Leave the argument out",
                stacklevel=2,
            )

    def _update_process_group(self, new_process_group: dist.ProcessGroup | None) -> None:
        """Average over other ranks from the next forward pass on; states of comm hooks keep their own groups.

        All ranks of the new group call this between two iterations. Ranks outside of it, for which
        `dist.new_group` returned no group, keep the old one. Parameters are not sent again.
        """
        left_out = _rank_not_in_group(new_process_group)
        if not left_out:
            self.process_group = construction.resolve_group(new_process_group)
        self.reducer.set_group(self.process_group)
        own = self._own
        if own.delayed is not None:
            own.delayed.set_group(self.process_group)
        if own.debug and not left_out:
            own.launch_series = new_series(self.process_group)
            self.reducer.launch_order = CheckedLaunchOrder(self.process_group, own.launch_series)
        own.torch_logger = ()

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        hooks: dict[BuiltinCommHookType, Callable[..., Any]] = {
            BuiltinCommHookType.ALLREDUCE: allreduce,
            BuiltinCommHookType.FP16_COMPRESS: fp16_compress,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])
        self._own.log.comm_hook = str(comm_hook_type)

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        if not callable(hook):
            raise TypeError(f"buffer hook: expected hook(state, buffers_by_name), got {hook!r}")
        self._own.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)

    def _setup_in_backward_optimizers(self) -> None:
        """Make optimisers that run in the backward pass step after averaging instead of after accumulation."""
        parameters = [
            p
            for p in self._own.bucketed(trainable_parameters(self.module)).values()
            if hasattr(p, "_in_backward_optimizers")
        ]
        if not parameters:
            return
        # Imported here, because the import takes a second and warns; the user's script has done it already.
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for parameter in parameters:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()
        hook = optimizer_overlap_hooks._apply_optim_in_backward_hook(
            gradient_is_bucket_view=self.gradient_as_bucket_view
        )
        self._use_comm_hook(weakref.ref(self), hook)
        self.reducer._set_optimizer_in_backward()

    # Parameters

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of the parameters and buffers that are not synchronised."""
        return set(ignored_names(self.module))

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        trainable = self._own.bucketed(trainable_parameters(self.module))
        sparse = sparse_parameters(self.module)
        return list(trainable.values()), [name in sparse for name in trainable]

    # Pickling

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: this "
                "module has another, which cannot be pickled"
            )
        state = {name: value for name, value in self.__dict__.items() if name not in ("process_group", "reducer")}
        if self._own.comm_hook[1:] == (self.process_group,):
            state["_own"] = replace(self._own, comm_hook=self._own.comm_hook[:1])
        for hooks in ("_forward_pre_hooks", "_forward_hooks"):
            kept = ((key, hook) for key, hook in state[hooks].items() if not isinstance(hook, RecordingHook))
            state[hooks] = OrderedDict(kept)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group = construction.resolve_group(None)
        self._make_reducer(exchange=False, with_buffers=False)
        if self._own.forward_parameters is not None:
            self._own.input_steps.append(partial(_restore, self._own.forward_parameters))
        if self._own.comm_hook:
            hook, hook_state = (*self._own.comm_hook, self.process_group)[:2]
            self.register_comm_hook(hook_state, hook)


TorchDDP.register(DistributedDataParallel)  # for all that asks isinstance: trainers, checkpoints, torch.compile


def _first_forward(this: "weakref.ref[DistributedDataParallel]", inputs: Any, kwargs: Any) -> tuple[Any, Any]:
    """Set up optimisers that run in the backward pass: the script has made them by the first forward pass."""
    if (ddp := this()) is not None:
        del ddp._own.input_steps[0]
        ddp._setup_in_backward_optimizers()
    return inputs, kwargs


def _move(device: torch.device, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
    (moved,), (moved_kwargs,) = _to_kwargs(inputs, kwargs, device, use_side_stream_for_tensor_copies=True)
    return moved, moved_kwargs


def _restore(parameters: ForwardParameters, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
    """Put all parameters back if the last forward pass was interrupted; the inputs stay as they are."""
    parameters.restore()
    return inputs, kwargs
