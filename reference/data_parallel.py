"""A drop-in for torch's DistributedDataParallel: its arguments, construction and names, on top of `module_wrapper`.

Most of torch's names begin with an underscore, or torch keeps them for old scripts.
"""

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from inspect import getattr_static
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch._utils import classproperty
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _rank_not_in_group
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHook, _MixedPrecision
from torch.nn.parallel.distributed import _BufferCommHookLocation as HookLocation

from .between_iterations import finalize_backward, register_comm_hook, set_finalization, set_group, set_options
from .broadcast import are_due, send_buffers, send_state
from .bucketing import MIB, bucket_caps
from .buckets import Buckets
from .checks import construction
from .checks.launch_order import CheckedLaunchOrder, new_series
from .comm_hooks.allreduce import allreduce
from .comm_hooks.compress import fp16_compress
from .comm_hooks.interface import Hook
from .constructor_arguments import Options
from .features.delayed_all_reduce import DelayedAllReduce, resolve_delayed
from .features.mixed_precision import DTYPES, ReductionState, cast_buffers, casts, check_config, sum_in_low_precision
from .features.parameter_stand_ins import ForwardParameters, compose
from .features.tensor_parallel import is_slice, localize, put_back, stand_ins
from .features.unused_parameters import make_tracker
from .features.view_and_sparse_buckets import make_bucket
from .message_sizes import PIECE_BYTES
from .module_wrapper import DataParallel, sync_enabled
from .parameters import ModuleTensors, Registrations, ignored_names, synchronized_buffers
from .recording.logging_data import LoggingData
from .recording.reducer_observer import RecordingHook
from .reducer import Reducer
from .torch_names import TorchNames

PROCESS_LOCAL = (
    *("process_group", "reducer", "_reducer", "_ddp_log"),
    *("_trained_slots", "_frozen_slots", "_added_slots", "_ranks_averaging"),
)
"""Attributes of the wrapper that are neither pickled nor copied."""
TORCHS_OWN = (
    *("scatter", "gather", "to_kwargs", "_distributed_rank", "_get_active_ddp_module", "_get_data_parallel_params"),
    *("_check_sync_bufs_pre_fwd", "_check_sync_bufs_post_fwd", "_sync_module_buffers", "_log_and_throw"),
    *("_default_broadcast_coalesced", "_distributed_broadcast_coalesced", "_build_debug_param_to_name_mapping"),
    *("_register_fused_optim", "_set_ddp_sink_clone", "_set_params_and_buffers_to_ignore_for_model"),
)
"""torch's own methods, which need only the wrapper's attributes; the wrapper itself does not call them."""
_caps_mb = attrgetter("_reducer.options.bucket_cap_mb", "_reducer.options.bucket_cap_mb_list")


def _option(name: str, change: Callable[..., None] | None = None) -> Any:
    """An option as an attribute of the wrapper; without `change`, the script cannot set it."""

    def set_option(ddp: Any, value: Any) -> None:
        if change is None:
            raise AttributeError(
                f"{name} cannot be changed after construction: the buckets depend on it. Wrap the module again"
            )
        change(ddp._reducer, **{name: value})

    return property(lambda ddp: getattr(ddp._reducer.options, name), set_option)


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
        lazy_bucket_allocation: Whether buckets have memory in backward passes only; without effect on gradients that
            are views (torch: from 2.15).
        plan: Parameter indices or names by bucket, in launch order; such buckets are never rebuilt.
        debug: Whether each rank writes its launches to the process group's store, so that the error of a failed
            collective names the rank that left the launch order. With NCCL only its watchdog sees failures.

    Raises:
        RuntimeError: No process group, nothing to train, or parameters that differ between ranks.
        ValueError: Devices that make no sense, a plan that is not a partition of the parameters, or parameters
            that cannot be delayed.
        TypeError: `mixed_precision` is not a configuration of mixed precision.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
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
        lazy_bucket_allocation: bool = False,  # noqa: FBT001, FBT002
        *,
        plan: Sequence[Sequence[int | str]] | None = None,
        debug: bool = False,
    ) -> None:
        forward_sync, initial_sync = construction.resolve_deprecated(
            check_reduction=check_reduction,
            broadcast_buffers=broadcast_buffers,
            forward_sync_buffers=forward_sync_buffers,
        )
        super().__init__()
        self.process_group = construction.resolve_group(process_group, device_mesh)
        self.module = module
        self.mixed_precision, self.dim = mixed_precision, dim
        self.forward_sync_buffers = forward_sync
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        # Constants; torch's class has them in the instance's dictionary too.
        self.broadcast_bucket_size, self.use_side_stream_for_tensor_copies = PIECE_BYTES, True
        self._use_python_reducer, self._ddp_sink_clone = False, True
        self._comm_hooks: list[tuple[Hook, Any]] = []  # of the user, which copies and pickles of the module keep
        self._forward_parameters = None
        options = Options(
            find_unused_parameters=find_unused_parameters,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            batched_grad_copy=batched_grad_copy,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            plan=plan,
            debug=debug,
            device_ids=device_ids,
            output_device=output_device,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            lazy_bucket_allocation=lazy_bucket_allocation,
        )
        shards = localize(module) if is_slice(device_mesh) else {}
        try:
            self._make_reducer(options, exchange=init_sync, with_buffers=initial_sync)
            if init_sync:
                send_state(module, self.process_group, with_buffers=initial_sync)
        except BaseException:
            put_back(module, shards)  # a refused module stays as it was
            raise
        if device_mesh is not None:
            self.device_mesh = device_mesh
        replaced = stand_ins(shards)
        if mixed_precision is not None:
            cast_buffers(module, mixed_precision)
            replaced = compose(casts(module, mixed_precision), replaced)
        if replaced:
            self._forward_parameters = ForwardParameters(module, replaced, always=bool(shards))

    # Construction

    @torch.inference_mode(mode=False)  # gradients become views of the buckets, and must be trainable
    def _make_reducer(self, options: Options, *, exchange: bool, with_buffers: bool, launch_series: str = "") -> None:
        """Assign the buckets and make the reducer; with `exchange`, ranks check that they have the same module.

        `launch_series` is the name of the launches with `debug`. Empty: a new one.
        """
        make = partial(self._set_up, options, with_buffers=with_buffers)
        tensors, setup = construction.verify_setup(make, self.process_group, self.module, exchange=exchange)
        bucketed, this = tensors.bucketed, weakref.ref(self)
        buckets = Buckets(list(bucketed.values()), setup, partial(make_bucket, options=options, sparse=setup.sparse))
        self._reducer = reducer = Reducer(
            bucketed, buckets, options, self.process_group, make_tracker, partial(sync_enabled, this)
        )
        self.reducer = TorchNames(reducer)
        if options.debug:
            series = launch_series or new_series(self.process_group)
            reducer.launch_order = CheckedLaunchOrder(self.process_group, series)
        if (trigger := options.param_to_hook_all_reduce) is not None:
            delayed = [parameter for name, parameter in tensors.trainable.items() if name not in bucketed]
            reducer.delayed = DelayedAllReduce(delayed, trigger, self.process_group)
        self._trained_slots, self._frozen_slots, self._added_slots = tensors.slots, tensors.frozen, []
        self._registrations = Registrations.count
        self._has_buffers = bool(tensors.buffers)
        self.device = tensors.slots[0].parameter.device
        self.device_type = self.device.type
        self.is_multi_device_module = len({parameter.device for parameter in tensors.parameters.values()}) > 1
        self._ddp_log = LoggingData(self.device, reducer)
        self._lazy_init_ran = False
        if (config := self.mixed_precision) is not None and (dtype := config.reduce_dtype or config.param_dtype):
            register_comm_hook(reducer, ReductionState(dtype, this), sum_in_low_precision)

    def _set_up(self, options: Options, *, with_buffers: bool) -> tuple[ModuleTensors, construction.Setup]:
        """The module's tensors, and everything that must be the same on all ranks; checks the arguments."""
        check_config(self.mixed_precision)
        tensors = ModuleTensors(self.module, resolve_delayed(self.module, options))
        computing, reducing, buffers = (getattr(self.mixed_precision, name, None) for name in DTYPES)
        others = {
            "forward_sync_buffers": self.forward_sync_buffers,
            "mixed_precision (reduce, buffer)": (reducing or computing, buffers),
        }
        setup = construction.set_up(self.module, tensors, options, others, with_buffers=with_buffers)
        self.device_ids, self.output_device = construction.resolve_devices(tensors.trainable.values(), options)
        return tensors, setup

    def _lazy_init(self) -> None:
        """Before the first forward pass; the script has made optimisers that run in the backward pass by then."""
        self._lazy_init_ran = True
        self._setup_in_backward_optimizers()

    def register_comm_hook(self, state: object, hook: Hook) -> None:
        """Replace the all-reduce by `hook(state, bucket)`; call once, between two iterations.

        The hook gets `state` and a `GradBucket`, and returns a future of the flat tensor that becomes the gradients.
        Deep copies and pickles of the module keep the hook, with a copy of its state.

        Raises:
            TypeError: The hook is not callable.
            ValueError: The hook has no parameter `bucket`, or its annotations are not those of a comm hook.
            RuntimeError: A comm hook is registered already, or a backward pass has begun and not ended.
        """
        register_comm_hook(self._reducer, state, hook)
        self._comm_hooks.append((hook, state))

    # Names of torch's class

    broadcast_buffers = property(
        attrgetter("forward_sync_buffers"), lambda ddp, value: setattr(ddp, "forward_sync_buffers", value)
    )
    """Deprecated name of `forward_sync_buffers`."""
    find_unused_parameters = _option("find_unused_parameters", set_options)
    """Whether the graph is searched for unused parameters; may change between iterations, on all ranks alike."""
    gradient_as_bucket_view = _option("gradient_as_bucket_view")
    batched_grad_copy = _option("batched_grad_copy")
    skip_all_reduce_unused_params = _option("skip_all_reduce_unused_params")
    static_graph = _option("static_graph")
    lazy_bucket_allocation = _option("lazy_bucket_allocation")
    require_manual_backward_finalization = _option("require_manual_backward_finalization", set_finalization)
    """Whether backward passes leave averages in flight until `finalize_backward` is called; set it in between."""

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether the coming `finalize_backward` must be called after the backward pass, not in a hook of it."""
        reducer = self._reducer
        waits = not (reducer.buckets.rebuilt or reducer.options.graph_may_change) or self.mixed_precision is not None
        return bool(self.require_manual_backward_finalization and waits)

    def finalize_backward(self) -> None:
        """Wait for the averages of a backward pass; see `between_iterations.finalize_backward`."""
        finalize_backward(self._reducer)

    bucket_bytes_cap = property(lambda ddp: max(bucket_caps(*_caps_mb(ddp))))
    """Size in bytes at which a bucket closes; with a list of caps, the largest."""
    bucket_bytes_cap_default = property(lambda ddp: _caps_mb(ddp)[0] is None and not _caps_mb(ddp)[1])
    """Whether the user has given no cap, so that the first bucket is smaller."""
    bucket_bytes_cap_list = property(lambda ddp: [int(cap * MIB) for cap in _caps_mb(ddp)[1] or []])
    """The caps in `bucket_cap_mb_list`, in bytes."""
    _static_graph_delay_allreduce_enqueued = property(
        lambda ddp: ddp.static_graph and not ddp._reducer.tracker.needs_sink
    )
    _has_rebuilt_buckets = property(attrgetter("reducer.buckets.rebuilt"))
    will_sync_module_buffers = are_due
    _active_ddp_module = classproperty(lambda _class: TorchDDP._active_ddp_module)
    named_module_buffers = property(lambda ddp: synchronized_buffers(ddp.module))
    """Buffers that are synchronised, by name."""
    modules_buffers = property(lambda ddp: list(ddp.named_module_buffers.values()))
    parameters_to_ignore = property(lambda ddp: set(ignored_names(ddp.module)))
    """Names of the parameters and buffers that are not synchronised."""

    _delay_all_reduce_params = property(lambda ddp: ddp._reducer.delayed.parameters if ddp._reducer.delayed else [])

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        """All parameters but those that are ignored or whose all-reduce is delayed."""
        delayed = set(self._delay_all_reduce_params)
        named, ignored = self.module.named_parameters(), self.parameters_to_ignore
        return [parameter for name, parameter in named if name not in ignored and parameter not in delayed]

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        return self._reducer.parameters, self._reducer.buckets.sparse

    def _assign_modules_buffers(self) -> None:
        """Nothing to do: `modules_buffers` are read anew each time."""

    _sync_buffers = send_buffers
    _remove_autograd_hooks = property(attrgetter("_reducer.detach"))
    _check_reducer_finalized = property(attrgetter("_reducer.check_finished"))

    # Logging

    logger = property(lambda ddp: ddp._ddp_log.torchs_logger(ddp.process_group))
    """A logger of torch's own type, for torch functions that report errors to a logger."""

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        return self._ddp_log.data(self)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self._ddp_log.set_sample_rate(sample_rate)

    # Features that torch switches on after construction

    def _set_static_graph(self) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        set_options(self._reducer, static_graph=True)
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
        set_group(self._reducer, self.process_group)
        if self._reducer.launch_order is not None and not left_out:
            self._reducer.launch_order = CheckedLaunchOrder(self.process_group, new_series(self.process_group))
        self._ddp_log.forget_group()

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        hook = allreduce if comm_hook_type == BuiltinCommHookType.ALLREDUCE else fp16_compress
        self.register_comm_hook(self.process_group, hook)
        self._reducer.hook.name = str(comm_hook_type)  # type: ignore[union-attr]  # just registered

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[..., Any], comm_hook_location: HookLocation = HookLocation.POST_FORWARD
    ) -> None:
        if not callable(hook):
            raise TypeError(f"buffer hook: expected hook(state, buffers_by_name), got {hook!r}")
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)

    def _setup_in_backward_optimizers(self) -> None:
        """Make optimisers that run in the backward pass step after averaging instead of after accumulation."""
        parameters = [p for p in self._reducer.parameters if hasattr(p, "_in_backward_optimizers")]
        if not parameters:
            return
        # Imported here, because the import takes a second and warns; the user's script has done it already.
        from torch.distributed.optim.apply_optimizer_in_backward import param_to_optim_hook_handle_map

        for parameter in parameters:
            for handle in param_to_optim_hook_handle_map.get(parameter, []):
                handle.remove()
        hook = optimizer_overlap_hooks._apply_optim_in_backward_hook(self.gradient_as_bucket_view)
        register_comm_hook(self._reducer, weakref.ref(self), hook)
        self._reducer.optimizers_in_backward = True

    # Pickling

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group != dist.group.WORLD:
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group: this "
                "module has another, which cannot be pickled"
            )
        state = {name: value for name, value in self.__dict__.items() if name not in PROCESS_LOCAL}
        order = self._reducer.launch_order
        state["options"], state["launch_series"] = self._reducer.options, order.series if order is not None else ""
        # A process group cannot be pickled.
        state["_comm_hooks"] = [hook[: 1 if hook[1] is self.process_group else 2] for hook in self._comm_hooks]
        for hooks in ("_forward_pre_hooks", "_forward_hooks"):
            kept = ((key, hook) for key, hook in state[hooks].items() if not isinstance(hook, RecordingHook))
            state[hooks] = OrderedDict(kept)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "options" not in state:
            raise RuntimeError(
                "this data-parallel module was saved by torch's class: load it without ddplab.replace_ddp() and wrap "
                "its .module again, or save state_dict() instead"
            )
        options, series, comm_hooks = (state.pop(name) for name in ("options", "launch_series", "_comm_hooks"))
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.process_group, self._comm_hooks = construction.resolve_group(None), []
        self._make_reducer(options, exchange=False, with_buffers=False, launch_series=series)
        for hook, *hook_state in comm_hooks:
            self.register_comm_hook(hook_state[0] if hook_state else self.process_group, hook)


for _name in TORCHS_OWN:
    setattr(DistributedDataParallel, _name, getattr_static(TorchDDP, _name))
TorchDDP.register(DistributedDataParallel)  # for all that asks isinstance: trainers, checkpoints, torch.compile
