"""What a data-parallel module tells of itself: set-up, timings and errors, under the keys of torch's logging data."""

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .observer import Observer
from .parameters import size_bytes, trainable_parameters

SAMPLE_RATE = 100
ALWAYS_SAMPLED = 10  # iterations at the start, whatever the rate

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
"""What torch's logging data calls them."""


@dataclass
class Moments:
    """Clock readings of one iteration, in nanoseconds since the epoch; 0: has not happened."""

    forward_started: int = 0
    backward_started: int = 0
    first_launch: int = 0
    backward_computed: int = 0
    last_done: int = 0

    def durations(self) -> dict[str, int]:
        """Nanoseconds; communication counts from the first launch to the last bucket's end."""
        return {
            "forward_compute_time": self.backward_started - self.forward_started,
            "backward_compute_time": self.backward_computed - self.backward_started,
            "backward_comm_time": self.last_done - self.first_launch,
            "backward_compute_comm_overlap_time": self.backward_computed - self.first_launch,
        }

    def starts_and_ends(self) -> dict[str, int]:
        """Under torch's keys."""
        return {
            "forward_compute_time_start": self.forward_started,
            "backward_compute_time_start": self.backward_started,
            "backward_compute_time_end": self.backward_computed,
            "backward_comm_time_start": self.first_launch,
            "backward_comm_time_end": self.last_done,
        }


class Log(Observer):
    """Times sampled iterations and keeps the last error.

    Attributes:
        sample_rate: After the first ten iterations, one in so many is kept.
        error: The last error's message. None: there was none.
        uneven_inputs: Whether the module has run under `join`.
        comm_hook: The comm hook's name. None: there is none.
    """

    def __init__(self) -> None:
        self.sample_rate = SAMPLE_RATE
        self.error: str | None = None
        self.uneven_inputs = False
        self.comm_hook: str | None = None
        self.iteration = 0
        self._finished = 0
        self._now = Moments()
        self._kept = Moments()
        self._sums: dict[str, list[int]] = {}

    def forward_started(self) -> None:
        """Keep the last iteration, if it is among the sampled ones; begin a new one."""
        if self._now.last_done:
            self._finished += 1
            if self._finished <= ALWAYS_SAMPLED or self._finished % self.sample_rate == 0:
                self.iteration, self._kept = self._finished, self._now
                for name, duration in self._kept.durations().items():
                    self._sums.setdefault(name, []).append(duration)
        self._now = Moments(forward_started=time.time_ns())

    def backward_started(self) -> None:
        """See `Observer`."""
        self._now.backward_started = time.time_ns()

    def bucket_launching(self, bucket: int) -> None:
        """See `Observer`."""
        self._now.first_launch = self._now.first_launch or time.time_ns()

    def backward_computed(self) -> None:
        """See `Observer`."""
        self._now.backward_computed = time.time_ns()

    def bucket_done(self, bucket: int) -> None:
        """See `Observer`."""
        self._now.last_done = time.time_ns()

    def failed(self, message: str) -> None:
        """See `Observer`."""
        self.error = message

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Keep the message of an error that is raised inside, and let it go on."""
        try:
            yield
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            raise

    def runtime(self) -> Data:
        """What was measured of the iterations."""
        if not self.iteration:
            return {}
        averages = {f"avg_{name}": round(statistics.fmean(values)) for name, values in self._sums.items()}
        return {"iteration": self.iteration, **self._kept.durations(), **self._kept.starts_and_ends(), **averages}

    def data(self, ddp: Any) -> Data:
        """Everything, under torch's keys: strings, and ints for numbers, sizes in bytes, nanoseconds and flags."""
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
    parameters = trainable_parameters(ddp.module).values()
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

    unused = sum(size_bytes(reducer._parameters[index]) for index in reducer.usage.unused)
    data: Data = {
        "bucket_sizes": listed(reducer.layout.initial_sizes_bytes),
        "num_buckets_reduced": reducer.reduced_buckets,
        "has_rebuilt_buckets": int(reducer.layout.rebuilt),
        "can_set_static_graph": int(reducer.usage.is_static),
        "unused_parameter_size": unused,
        "prev_iteration_grad_ready_order_indices": listed(reducer.ready_order),
    }
    if reducer.layout.rebuilt:
        data["rebuilt_bucket_sizes"] = listed(bucket.size_bytes for bucket in reducer.layout.buckets)
        data["rebuilt_per_bucket_param_indices"] = listed(
            " ".join(map(str, indices)) for indices in reducer.layout.indices
        )
    return data
