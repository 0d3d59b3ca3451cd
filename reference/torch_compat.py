"""Compatibility with torch's class: names that tools and scripts use, and its logging data.

Most of these names begin with an underscore in torch, or torch keeps them for old scripts. `self` is `Any` where a
mix-in uses attributes of the class that inherits it.
"""

import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType, Logger, Reducer
from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks
from torch.distributed.distributed_c10d import _rank_not_in_group
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _BufferCommHookLocation
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from .broadcast import PIECE_BYTES, BufferHook, broadcast_coalesced
from .bucketing import MIB, bucket_caps
from .checks.launch_order import CheckedLaunchOrder, new_series
from .comm_hooks.allreduce import allreduce
from .comm_hooks.compress import fp16_compress
from .device_clock import Clock, Reading, clock_of, nanoseconds
from .observer import Observer
from .parameters import size_bytes, sparse_parameters, synchronized_buffers


class ReducerNames:
    """Names of torch's reducer, `ddp.reducer`."""

    def _get_local_used_map(self: Any) -> Tensor:
        return self.tracker.used.tensor  # type: ignore[no-any-return]

    def _ddp_graph_static(self: Any) -> bool:
        return self.tracker.is_static  # type: ignore[no-any-return]

    def _run_allreduce_hook(self: Any, bucket: Any) -> "torch.futures.Future[Any]":
        work: Any = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        return work.get_future()  # type: ignore[no-any-return]

    def _set_optimizer_in_backward(self: Any) -> None:
        self.optimizers_in_backward = True


def _feature(name: str) -> Any:
    """A read-only attribute of the wrapper; only construction and `_set_static_graph` set it."""

    def refuse(_ddp: Any, _value: Any) -> None:
        raise AttributeError(
            f"{name} cannot be changed after construction: the buckets depend on it. Wrap the module again"
        )

    return property(lambda ddp: getattr(ddp.features, name), refuse)


class DataParallelNames:
    """Names of torch's module class."""

    buffer_hook: BufferHook | None
    process_group: Any

    @property
    def broadcast_buffers(self: Any) -> bool:
        """Deprecated name of `forward_sync_buffers`."""
        return self.forward_sync_buffers  # type: ignore[no-any-return]

    @broadcast_buffers.setter
    def broadcast_buffers(self: Any, value: bool) -> None:  # the signature of a setter
        self.forward_sync_buffers = value

    @property
    def find_unused_parameters(self: Any) -> bool:
        """Whether the graph is searched for unused parameters; may change between iterations, on all ranks alike."""
        return self.features.find_unused_parameters  # type: ignore[no-any-return]

    @find_unused_parameters.setter
    def find_unused_parameters(self: Any, value: bool) -> None:
        self.reducer.set_features(replace(self.features, find_unused_parameters=value))
        self.features = self.reducer.features

    gradient_as_bucket_view = _feature("gradient_as_bucket_view")
    batched_grad_copy = _feature("batched_grad_copy")
    skip_all_reduce_unused_params = _feature("skip_all_reduce_unused_params")
    static_graph = _feature("static_graph")

    @property
    def bucket_bytes_cap(self: Any) -> int:
        """Size in bytes at which a bucket closes; with a list of caps, the largest."""
        return max(bucket_caps(self.bucket_cap_mb, self.bucket_cap_mb_list))

    @property
    def bucket_bytes_cap_list(self: Any) -> list[int]:
        """The caps in `bucket_cap_mb_list`, in bytes."""
        return [int(cap * MIB) for cap in self.bucket_cap_mb_list or []]

    @property
    def _has_rebuilt_buckets(self: Any) -> bool:
        return self.reducer.buckets.rebuilt  # type: ignore[no-any-return]

    @property
    def broadcast_bucket_size(self) -> int:
        """Size in bytes of the pieces in which parameters and buffers are broadcast."""
        return PIECE_BYTES

    def will_sync_module_buffers(self: Any) -> bool:
        """Whether the next synchronised forward pass broadcasts buffers."""
        return bool(self.require_forward_param_sync and self.forward_sync_buffers and self._has_buffers)

    def scatter(self: Any, inputs: Any, kwargs: Any, device_ids: list[int]) -> Any:
        """Distribute inputs over GPUs along `dim`; the wrapper itself does not call this."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self: Any, outputs: Any, output_device: int) -> Any:
        """Collect outputs on one device along `dim`; the wrapper itself does not call this."""
        return gather(outputs, output_device, dim=self.dim)

    def to_kwargs(self: Any, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Move inputs to a GPU of the module's type; the wrapper itself does not call this."""
        device = torch.device(self.device.type, device_id)
        return _to_kwargs(inputs, kwargs, device, use_side_stream_for_tensor_copies=True)

    @property
    def device_type(self: Any) -> str:
        """Type of the module's device."""
        return self.device.type  # type: ignore[no-any-return]

    @property
    def is_multi_device_module(self: Any) -> bool:
        """Whether the module's parameters are on several devices."""
        return len({parameter.device for parameter in self._module_parameters}) > 1

    @property
    def modules_buffers(self: Any) -> list[Tensor]:
        """Buffers that are synchronised."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self: Any) -> dict[str, Tensor]:
        """Buffers that are synchronised, by name."""
        return synchronized_buffers(self.module)

    @property
    def _module_parameters(self: Any) -> list[nn.Parameter]:
        """All parameters but those that are ignored or whose all-reduce is delayed."""
        skipped = self.parameters_to_ignore | set(self.delayed_parameters)
        return [parameter for name, parameter in self.module.named_parameters() if name not in skipped]

    @property
    def _delay_all_reduce_params(self: Any) -> list[nn.Parameter]:
        return list(dict.fromkeys(self.delayed_parameters.values()))

    @property
    def _delay_all_reduce_all_params(self: Any) -> bool:
        return not self.bucketed_parameters()

    @property
    def _distributed_rank(self: Any) -> int:
        return dist.get_rank(self.process_group)

    @property
    def _ddp_sink_clone(self: Any) -> bool:
        return self.sink_clones  # type: ignore[no-any-return]

    def _pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._before_forward(inputs, kwargs)  # type: ignore[no-any-return]

    def _post_forward(self: Any, output: Any) -> Any:
        return self._after_forward(output)

    def _sync_buffers(self: Any) -> None:
        self.send_buffers()

    def _remove_autograd_hooks(self: Any) -> None:
        self.reducer.detach()

    def _check_reducer_finalized(self: Any) -> None:
        self.reducer.check_finished()

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return TorchDDP._active_ddp_module

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Make this module torch's active DDP module, so that torch.compile splits its graph at bucket boundaries."""
        before = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self  # type: ignore[assignment]  # torch.compile reads only its bucket size
        try:
            yield
        finally:
            TorchDDP._active_ddp_module = before

    # Logging

    @property
    def logger(self: Any) -> Any:
        """A logger of torch's own type, for torch functions that report errors to a logger."""
        if "torch_logger" not in self.__dict__:
            dummy = nn.Parameter(torch.empty(1))  # torch's logger needs torch's reducer, which needs a parameter
            self.__dict__["torch_reducer"] = Reducer([dummy], [[0]], [1], self.process_group)
            self.__dict__["torch_logger"] = Logger(self.__dict__["torch_reducer"])
        return self.__dict__["torch_logger"]

    def _get_ddp_logging_data(self: Any) -> dict[str, str | int]:
        data: dict[str, str | int] = self.log.data(self)
        if "torch_logger" in self.__dict__:
            torchs = self.__dict__["torch_logger"]._get_ddp_logging_data()
            if torchs.ints_map.get("has_error"):
                data |= {"has_error": 1, "error": torchs.strs_map["error"]}
        return data

    def _set_ddp_runtime_logging_sample_rate(self: Any, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self.log.sample_rate = sample_rate

    # Features that torch switches on after construction

    def _set_static_graph(self: Any) -> None:
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        self.reducer.set_features(replace(self.features, static_graph=True))
        self.features = self.reducer.features
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel; a static graph needs no search, "
                "because its first iteration shows which parameters are unused. Leave the argument out",
                stacklevel=2,
            )

    def _set_ddp_sink_clone(self: Any, val: bool) -> None:  # noqa: FBT001 - torch's signature
        self.sink_clones = val

    def _update_process_group(self: Any, new_process_group: dist.ProcessGroup | None) -> None:
        """Average over other ranks from the next forward pass on; states of comm hooks keep their own groups.

        All ranks of the new group call this between two iterations. Ranks outside of it, for which
        `dist.new_group` returned no group, keep the old one. Parameters are not sent again.
        """
        left_out = _rank_not_in_group(new_process_group)
        if not left_out:
            self.process_group = new_process_group or dist.group.WORLD
        self.reducer.set_group(self.process_group)
        if self.delayed is not None:
            self.delayed.set_group(self.process_group)
        if self.debug and not left_out:
            self.launch_series = new_series(self.process_group)
            self.reducer.launch_order = CheckedLaunchOrder(self.process_group, self.launch_series)
        for of_the_old_group in ("torch_logger", "torch_reducer"):
            self.__dict__.pop(of_the_old_group, None)

    def _register_builtin_comm_hook(self: Any, comm_hook_type: BuiltinCommHookType) -> None:
        hooks: dict[BuiltinCommHookType, Callable[..., Any]] = {
            BuiltinCommHookType.ALLREDUCE: allreduce,
            BuiltinCommHookType.FP16_COMPRESS: fp16_compress,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])
        self.log.comm_hook = str(comm_hook_type)

    def _register_buffer_comm_hook(
        self: Any,
        state: Any,
        hook: Callable[..., Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        if not callable(hook):
            raise TypeError(f"buffer hook: expected hook(state, buffers_by_name), got {hook!r}")
        after_forward = comm_hook_location == _BufferCommHookLocation.POST_FORWARD
        self.buffer_hook = BufferHook(hook, state, after_forward=after_forward)

    def _default_broadcast_coalesced(
        self: Any, bufs: list[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        broadcast_coalesced(
            list(self.module.buffers()) if bufs is None else bufs,
            self.process_group,
            source=authoritative_rank,
            piece_bytes=bucket_size or PIECE_BYTES,
        )

    def _register_fused_optim(
        self: Any, optim: type, *args: Any, optim_params: list[Tensor] | None = None, **kwargs: Any
    ) -> None:
        from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap  # imports all optimisers

        optimizer_overlap._as_overlapped_optim(optim, optim_params, *args, **kwargs).register_ddp(self)

    def _setup_in_backward_optimizers(self: Any) -> None:
        """Make optimisers that run in the backward pass step after averaging instead of after accumulation."""
        parameters = [p for p in self.bucketed_parameters().values() if hasattr(p, "_in_backward_optimizers")]
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
    def parameters_to_ignore(self: Any) -> set[str]:
        """Names of the parameters and buffers that are not synchronised."""
        return set(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: list[str] | set[str]
    ) -> None:
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:  # noqa: FBT001, FBT002
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    def _build_params_for_reducer(self: Any) -> tuple[list[nn.Parameter], list[bool]]:
        trainable = self.bucketed_parameters()
        sparse = sparse_parameters(self.module)
        return list(trainable.values()), [name in sparse for name in trainable]

    def _build_debug_param_to_name_mapping(self: Any, parameters: list[nn.Parameter]) -> dict[int, str]:
        names = {parameter: name for name, parameter in self.bucketed_parameters().items()}
        for parameter, name in names.items():
            if not any(parameter is given for given in parameters):
                raise ValueError(f"Param with name {name} found in module parameters, but not DDP parameters.")
        if len(parameters) != len(names):
            raise ValueError(
                "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
                f"{len(parameters)} vs {len(names)}"
            )
        return {index: names[parameter] for index, parameter in enumerate(parameters)}


# Logging data

SAMPLE_RATE = 100
ALWAYS_SAMPLED = 10  # iterations at the start, at any sample rate

Data = dict[str, str | int]

_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_GLOO_ENVIRONMENT = {
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
}
_NCCL_ENVIRONMENT = {
    "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
    "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
    "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "nccl_debug": "NCCL_DEBUG",
    "nccl_nthreads": "NCCL_NTHREADS",
    "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
}
GLOO_THREADS = 2  # torch's Gloo runs this many collectives at a time
_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
"""Names of dtypes in torch's logging data."""


class Moment(StrEnum):
    """A moment of an iteration that is timed."""

    FORWARD_STARTED = auto()
    BACKWARD_STARTED = auto()
    FIRST_LAUNCH = auto()
    BACKWARD_COMPUTED = auto()
    LAST_DONE = auto()


DURATIONS = {
    "forward_compute_time": (Moment.FORWARD_STARTED, Moment.BACKWARD_STARTED),
    "backward_compute_time": (Moment.BACKWARD_STARTED, Moment.BACKWARD_COMPUTED),
    "backward_comm_time": (Moment.FIRST_LAUNCH, Moment.LAST_DONE),
    "backward_compute_comm_overlap_time": (Moment.FIRST_LAUNCH, Moment.BACKWARD_COMPUTED),
}
"""Start and end of each duration, by torch's key."""
STARTS_AND_ENDS = {
    "forward_compute_time_start": Moment.FORWARD_STARTED,
    "backward_compute_time_start": Moment.BACKWARD_STARTED,
    "backward_compute_time_end": Moment.BACKWARD_COMPUTED,
    "backward_comm_time_start": Moment.FIRST_LAUNCH,
    "backward_comm_time_end": Moment.LAST_DONE,
}
"""The moment of each reading, by torch's key."""


@dataclass(frozen=True)
class SampledIteration:
    """The readings of an iteration that is to be timed, and its number."""

    number: int
    readings: dict[Moment, Reading]

    def moments_ns(self) -> dict[Moment, int] | None:
        """The times of the readings; None: the device has not reached all of them."""
        found = {moment: nanoseconds(reading) for moment, reading in self.readings.items()}
        settled = {moment: ns for moment, ns in found.items() if ns is not None}
        return settled if len(settled) == len(found) else None


class LoggingData(Observer):
    """Times sampled iterations and keeps the last error.

    A GPU is timed by events on its streams. Their times are read in a later iteration, once the GPU has reached them,
    so training never waits for them; only `runtime` does. (torch's class waits in `forward`.)

    Args:
        device: The module's device.
        clock: The clock to read. None: that of the device, since the epoch.

    Attributes:
        sample_rate: After the first ten iterations, one in `sample_rate` is timed.
        error: Message of the last error. None: no error.
        uneven_inputs: Whether the module has run under `join`.
        comm_hook: The comm hook's name. None: no comm hook.
        iteration: Number of the last timed iteration; 0 before the first.
    """

    def __init__(self, device: torch.device, clock: Clock | None = None) -> None:
        self.sample_rate = SAMPLE_RATE
        self.error: str | None = None
        self.uneven_inputs = False
        self.comm_hook: str | None = None
        self.iteration = 0
        self._clock = clock or clock_of(device, time.time_ns)
        self._finished = 0
        self._averaged = False  # whether the reducer has waited for a bucket since the last forward pass began
        self._samples = False  # whether the iteration is to be timed
        self._readings: dict[Moment, Reading] = {}
        self._sampled: deque[SampledIteration] = deque()  # the device has not reached all of their events
        self._moments_ns: dict[Moment, int] = {}  # of the last timed iteration, since the epoch
        self._timed = 0
        self._totals_ns = dict.fromkeys(DURATIONS, 0)

    def forward_started(self) -> None:
        """Keep the readings of the last iteration if it was sampled, and start a new one."""
        if self._averaged:
            self._finished += 1
            if self._samples:
                self._sampled.append(SampledIteration(self._finished, self._readings))
        self._settle()
        self._readings, self._averaged = {}, False
        self._samples = self._finished < ALWAYS_SAMPLED or (self._finished + 1) % self.sample_rate == 0
        self._read(Moment.FORWARD_STARTED)

    def _read(self, moment: Moment) -> None:
        if self._samples:
            self._readings[moment] = self._clock.now()

    def _settle(self, *, wait: bool = False) -> None:
        self._clock.settle(wait=wait)
        while self._sampled and (moments_ns := self._sampled[0].moments_ns()):
            self.iteration, self._moments_ns = self._sampled.popleft().number, moments_ns
            self._timed += 1
            for name, duration_ns in self._durations_ns().items():
                self._totals_ns[name] += duration_ns

    def _durations_ns(self) -> dict[str, int]:
        return {name: self._moments_ns[end] - self._moments_ns[start] for name, (start, end) in DURATIONS.items()}

    def backward_started(self) -> None:
        """See `Observer`."""
        self._read(Moment.BACKWARD_STARTED)

    def bucket_launching(self, bucket: int) -> None:
        """See `Observer`."""
        if Moment.FIRST_LAUNCH not in self._readings:
            self._read(Moment.FIRST_LAUNCH)

    def backward_computed(self) -> None:
        """See `Observer`."""
        self._read(Moment.BACKWARD_COMPUTED)

    def bucket_done(self, bucket: int) -> None:
        """See `Observer`."""
        self._averaged = True
        self._read(Moment.LAST_DONE)

    def failed(self, message: str) -> None:
        """See `Observer`."""
        self.error = message

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Keep the message of an error that is raised inside the context."""
        try:
            yield
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            raise

    def runtime(self) -> Data:
        """Times of the last sampled iteration, and averages over all sampled ones, in nanoseconds.

        Waits until a GPU has reached the end of that iteration.
        """
        self._settle(wait=bool(self._sampled))
        if not self.iteration:
            return {}
        averages = {f"avg_{name}": round(total / self._timed) for name, total in self._totals_ns.items()}
        moments = {name: self._moments_ns[moment] for name, moment in STARTS_AND_ENDS.items()}
        return {"iteration": self.iteration, **self._durations_ns(), **moments, **averages}

    def data(self, ddp: Any) -> Data:
        """All logging data by torch's keys: strings, and ints for counts, bytes, nanoseconds and flags."""
        data: Data = {**_construction(ddp), **_buckets(ddp.reducer), **self.runtime()}
        data["iteration"] = self.iteration
        if self.comm_hook is not None:
            data["comm_hook"] = self.comm_hook
        if self.uneven_inputs:
            data["join_uneven_inputs"] = 1
        if self.error is not None:
            data |= {"has_error": 1, "error": self.error}
        return data


def _construction(ddp: Any) -> Data:
    parameters = ddp.bucketed_parameters().values()
    backend = dist.get_backend(ddp.process_group)
    environment = {**_ENVIRONMENT, **({"gloo": _GLOO_ENVIRONMENT, "nccl": _NCCL_ENVIRONMENT}.get(backend, {}))}
    return {
        "module_name": type(ddp.module).__name__,
        "backend_name": backend,
        "world_size": dist.get_world_size(ddp.process_group),
        "rank": dist.get_rank(ddp.process_group),
        "device_ids": ", ".join(map(str, ddp.device_ids or [])),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "has_sync_bn": int(any(isinstance(layer, nn.SyncBatchNorm) for layer in ddp.module.modules())),
        "is_multi_device_module": int(len({parameter.device for parameter in parameters}) > 1),
        "dtypes": ", ".join(sorted({_DTYPES.get(p.dtype, str(p.dtype)) for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(map(size_bytes, parameters)),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        **({"gloo_num_threads": GLOO_THREADS} if backend == "gloo" else {}),
        **{key: os.environ.get(variable, "N/A") for key, variable in environment.items()},
    }


def _buckets(reducer: Any) -> Data:
    def listed(sizes: Any) -> str:
        return ", ".join(map(str, sizes))

    unused = sum(size_bytes(reducer._parameters[index]) for index in reducer.tracker.unused)
    data: Data = {
        "bucket_sizes": listed(reducer.buckets.initial_sizes_bytes),
        "num_buckets_reduced": reducer.reduced_buckets,
        "has_rebuilt_buckets": int(reducer.buckets.rebuilt),
        "can_set_static_graph": int(reducer.tracker.is_static),
        "unused_parameter_size": unused,
        "prev_iteration_grad_ready_order_indices": listed(reducer.ready_order),
    }
    if reducer.buckets.rebuilt:
        data["rebuilt_bucket_sizes"] = listed(bucket.size_bytes for bucket in reducer.buckets)
        data["rebuilt_per_bucket_param_indices"] = listed(
            " ".join(map(str, indices)) for indices in reducer.buckets.assignment
        )
    return data
