"""Logging data of a data-parallel module, by torch's keys: sampled times, the buckets, and the last error."""

import os
import time
import weakref
from collections import deque
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import Logger
from torch._C._distributed_c10d import Reducer as TorchReducer

from ..message_sizes import GLOO_THREADS
from ..reducer import Reducer
from .device_clock import Clock, Reading, clock_of, nanoseconds
from .reducer_observer import Observer

SAMPLE_RATE = 100
ALWAYS_SAMPLED = 10  # iterations at the start, at any sample rate
Data = dict[str, str | int]
_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_BACKEND_ENVIRONMENT = {
    "gloo": ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT"),
    "nccl": (
        *("NCCL_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT"),
    ),
}
"""Environment variables in the logging data; their keys are in lower case, without `TORCH_` before `NCCL_`."""
_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
"""Names of dtypes in torch's logging data."""
DURATIONS = {
    "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
    "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
    "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
    "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
}
"""Start and end of each duration; the names of durations and moments are torch's keys."""


class LoggingData(Observer):
    """Times sampled iterations of a reducer; in the others, nothing here runs.

    A GPU is timed by events on its streams. Their times are read in a later iteration, once the GPU has reached them,
    so training never waits for them; only `runtime` does. (torch's class waits in `forward`.)
    """

    def __init__(self, device: torch.device, reducer: Reducer, clock: Clock | None = None) -> None:
        self.sample_rate = SAMPLE_RATE  #: after the first ten iterations, one in `sample_rate` is timed
        self.iteration = 0  #: number of the last timed iteration; 0 before the first
        self._torchs: tuple[Any, ...] = ()  # a logger of torch's, and the reducer of torch's that it refers to
        epoch_ns = time.time_ns() - time.perf_counter_ns()  # durations must not see that the time is set
        self._clock = clock or clock_of(device, lambda: time.perf_counter_ns() + epoch_ns)
        self._number = 0  # of the iteration that is being timed
        self._averaged = False  # whether the reducer has waited for one of its buckets
        self._readings: dict[str, Reading] = {}
        # Numbers and readings of sampled iterations. The device has not reached all of their events.
        self._sampled: deque[tuple[int, dict[str, Reading]]] = deque()
        self._moments_ns: dict[str, int] = {}  # of the last timed iteration, since the epoch
        self._timed = 0
        self._totals_ns = dict.fromkeys(DURATIONS, 0)
        self._reducer = weakref.ref(reducer)
        reducer.observers.append(self)

    def set_sample_rate(self, sample_rate: int) -> None:
        """Time one in `sample_rate` iterations from now on."""
        self.sample_rate = sample_rate
        if (reducer := self._reducer()) is not None and self not in reducer.observers:
            self._sleep(reducer)

    def _sleep(self, reducer: Reducer) -> None:
        reducer.alarm_at = (reducer.iterations // self.sample_rate + 1) * self.sample_rate
        reducer.alarm = partial(reducer.observers.insert, 0, self)

    def forward_started(self) -> None:
        """Keep the readings of the last iteration, and time the one that begins if it is to be sampled."""
        reducer = self._reducer()
        assert reducer is not None
        if self._averaged:
            self._sampled.append((self._number, self._readings))
        self._settle()
        self._readings, self._averaged, self._number = {}, False, reducer.iterations
        if self._number <= ALWAYS_SAMPLED or self._number % self.sample_rate == 0:
            self._read("forward_compute_time_start")
        else:
            reducer.observers.remove(self)
            self._sleep(reducer)

    def _read(self, moment: str) -> None:
        self._readings[moment] = self._clock.now()

    def _settle(self, *, wait: bool = False) -> None:
        self._clock.settle(wait=wait)
        while self._sampled:
            number, readings = self._sampled[0]
            moments_ns = {moment: ns for moment, one in readings.items() if (ns := nanoseconds(one)) is not None}
            if len(moments_ns) < len(readings):
                return
            self._sampled.popleft()
            self.iteration, self._moments_ns = number, moments_ns
            self._timed += 1
            for name, duration_ns in self._durations_ns().items():
                self._totals_ns[name] += duration_ns

    def _durations_ns(self) -> dict[str, int]:
        return {name: self._moments_ns[end] - self._moments_ns[start] for name, (start, end) in DURATIONS.items()}

    def backward_started(self) -> None:
        """See `Observer`."""
        self._read("backward_compute_time_start")

    def bucket_launching(self, bucket: int) -> None:
        """See `Observer`."""
        if "backward_comm_time_start" not in self._readings:
            self._read("backward_comm_time_start")

    def backward_computed(self) -> None:
        """See `Observer`."""
        self._read("backward_compute_time_end")

    def bucket_done(self, bucket: int) -> None:
        """See `Observer`."""
        self._averaged = True
        self._read("backward_comm_time_end")

    def runtime(self) -> Data:
        """Times of the last sampled iteration, whose end this waits for, and averages over all, in nanoseconds."""
        self._settle(wait=bool(self._sampled))
        if not self.iteration:
            return {}
        averages = {f"avg_{name}": round(total / self._timed) for name, total in self._totals_ns.items()}
        return {"iteration": self.iteration, **self._durations_ns(), **self._moments_ns, **averages}

    def data(self, ddp: Any) -> Data:
        """All logging data by torch's keys: strings, and ints for counts, bytes, nanoseconds and flags."""
        reducer: Reducer = ddp._reducer
        data: Data = {**_construction(ddp), **_buckets(reducer), **self.runtime()}
        data["iteration"] = self.iteration
        if (caller := reducer.hook) is not None:
            data["comm_hook"] = caller.name or getattr(caller.hook, "__qualname__", repr(caller.hook))
        if "_divide_by_initial_world_size" in vars(ddp):  # `join` sets it for good
            data["join_uneven_inputs"] = 1
        error = reducer.last_error
        if self._torchs and (torchs := self._torchs[0]._get_ddp_logging_data()).ints_map.get("has_error"):
            error = torchs.strs_map["error"]
        if error is not None:
            data |= {"has_error": 1, "error": error}
        return data

    def torchs_logger(self, group: dist.ProcessGroup) -> Any:
        """A logger of torch's own type, for torch functions that report errors to a logger."""
        if not self._torchs:
            dummy = nn.Parameter(torch.empty(1))  # torch's logger needs torch's reducer, which needs a parameter
            torchs_reducer = TorchReducer([dummy], [[0]], [1], group)
            self._torchs = Logger(torchs_reducer), torchs_reducer
        return self._torchs[0]

    def forget_group(self) -> None:
        """Have the next call of `torchs_logger` make another logger."""
        self._torchs = ()


def _construction(ddp: Any) -> Data:
    parameters = ddp._reducer.parameters
    backend = ddp.process_group.name()
    environment = (*_ENVIRONMENT, *_BACKEND_ENVIRONMENT.get(backend, ()))
    return {
        "module_name": type(ddp.module).__name__,
        "backend_name": backend,
        "world_size": ddp.process_group.size(),
        "rank": ddp.process_group.rank(),
        "device_ids": ", ".join(map(str, ddp.device_ids or [])),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        **({"static_graph": 1} if ddp.static_graph else {}),
        "has_sync_bn": int(any(isinstance(layer, nn.SyncBatchNorm) for layer in ddp.module.modules())),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "dtypes": ", ".join(sorted({_DTYPES.get(p.dtype, str(p.dtype)) for p in parameters})),
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(parameter.nbytes for parameter in parameters),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        **({"gloo_num_threads": GLOO_THREADS} if backend == "gloo" else {}),
        **{name.replace("TORCH_NCCL", "NCCL").lower(): os.environ.get(name, "N/A") for name in environment},
    }


def _buckets(reducer: Any) -> Data:
    def listed(sizes: Any) -> str:
        return ", ".join(map(str, sizes))

    data: Data = {
        "bucket_sizes": listed(reducer.buckets.initial_sizes_bytes),
        "num_buckets_reduced": reducer.reduced_buckets,
        "has_rebuilt_buckets": int(reducer.buckets.rebuilt),
        "can_set_static_graph": int(reducer.tracker.is_static),
        "unused_parameter_size": sum(reducer.parameters[index].nbytes for index in reducer.tracker.unused),
        "prev_iteration_grad_ready_order_indices": listed(reducer.ready_order),
    }
    if reducer.buckets.rebuilt:
        data["rebuilt_bucket_sizes"] = listed(bucket.size_bytes for bucket in reducer.buckets)
        data["rebuilt_per_bucket_param_indices"] = listed(
            " ".join(map(str, indices)) for indices in reducer.buckets.assignment
        )
    return data


def buckets_of(wrapped: Any) -> tuple[tuple[int, ...], ...] | None:
    """Return the buckets in force as parameter indices in launch order; None if the class does not report them."""
    reducer = getattr(wrapped, "reducer", None)
    if (assignment := getattr(getattr(reducer, "buckets", None), "assignment", None)) is not None:
        return tuple(map(tuple, assignment))
    if not hasattr(wrapped, "_get_ddp_logging_data"):
        return None
    data = wrapped._get_ddp_logging_data()
    listed = data.get("rebuilt_per_bucket_param_indices") or data.get("initial_per_bucket_param_indices") or ""
    return tuple(tuple(map(int, bucket.split())) for bucket in listed.split(",") if bucket.strip()) or None
