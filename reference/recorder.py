"""Record a training run as a `Trace`: under our DistributedDataParallel, under torch's, or of a plain module.

Example::

    with record(model) as recording:
        train(model)
    recording.trace.save("trace.json.gz")

While the context is open, hooks append clock readings to lists and do nothing else. When it closes, the hooks are
removed, the ranks exchange their readings, and each of them converts all readings to one trace.

On a CPU the readings are those of the host's clock. On CUDA each is an event on the current stream, whose time is
known once the device has reached it. The host never waits for the device inside an iteration (`device_clock`).

A prediction should start from a plain module, recorded without communication: with all-reduces every
rank waits for the slowest, and the trace does not show which rank was slow.
"""

import platform
import re
import time
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from .data_parallel import DistributedDataParallel
from .parameters import dtype_name, sparse_parameters, synchronized_buffers, trainable_parameters
from .recording import timing_hooks
from .recording.device_clock import clock_of
from .recording.reducer_observer import RecordingHook
from .recording.timing_hooks import Timestamps, TorchDDP, rank_trace
from .trace import BucketLayout, Buffer, Parameter, Trace, Workload

OFFSET_ROUNDS = 10
SPARE_EVENTS = 4096
"""Readings of a GPU that are settled after the recording, those of about 20 iterations. With readings settled in each
iteration, a recording made iterations whose host set the pace up to 11 % longer (ResNet-50, batch 64, on an H200)."""


class Recording:
    """Records the training of `module` for as long as the context is open; `record` is its name in scripts.

    Args:
        module: Our `DistributedDataParallel`, torch's, or any other module (then no communication is recorded).
        model: The model's name in the trace. None: the class name of the module or, if it is data-parallel, of the
            module inside.
        batch: Samples per rank and iteration; stored in the trace.
        process_group: For a plain module: the ranks whose recordings become one trace. They must enter and exit the
            context together. None: this rank alone. A data-parallel module is recorded over its own group.

    Attributes:
        trace: On each rank the recording of all ranks, available after the context has exited.

    Raises:
        ValueError: The module has no trainable parameters, delays all-reduces, or its parameters are not all on the
            CPU or one CUDA device.
        RuntimeError: On exit, if there was no complete iteration (forward and backward pass).

    Warns:
        UserWarning: The module runs inside a data-parallel module, so its times contain communication.
    """

    trace: Trace

    def __init__(
        self,
        module: nn.Module,
        *,
        model: str | None = None,
        batch: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        given = {"module": (module, nn.Module), "model": (model or "", str), "batch": (batch or 1, int)}
        for name, (value, kind) in given.items():
            if not isinstance(value, kind):
                raise ValueError(f"record: expected {name} of type {kind.__name__}, got {value!r}")
        self._module = module
        self._source: Literal["ddplab", "torch", "module"] = "module"
        self._inner, self._group = module, process_group
        if isinstance(module, DistributedDataParallel | TorchDDP):
            self._source = "ddplab" if isinstance(module, DistributedDataParallel) else "torch"
            self._inner, self._group = module.module, module.process_group
        if getattr(module, "_delay_all_reduce_params", None):
            raise ValueError(
                "record: expected every parameter in a bucket, got a module with delay_all_reduce_named_params: a "
                "trace cannot hold its delayed all-reduce. Record the module without it"
            )
        self._model = model or type(self._inner).__name__
        self._batch = batch
        self._input_shape: tuple[int, ...] | None = None
        self._tokens: int | None = None
        self._warned = False
        self._parameters = trainable_parameters(self._inner)
        self._device = _device_of(self._model, self._parameters)

    def __enter__(self) -> Self:
        with _current(self._device):
            self._offset = _clock_offset_ns(self._group)
        self._timestamps = Timestamps(len(self._parameters), clock_of(self._device, spare=SPARE_EVENTS))
        self._hooks = ExitStack()
        self._hooks.callback(self._module.register_forward_pre_hook(RecordingHook(self._note_input)).remove)
        parameters = list(self._parameters.values())
        timing_hooks.watch_passes(self._hooks, self._module, self._timestamps)
        timing_hooks.watch_optimizers(self._hooks, parameters, self._timestamps)
        if isinstance(self._module, DistributedDataParallel):
            timing_hooks.watch_our_buckets(self._hooks, self._module, self._timestamps)
        else:
            timing_hooks.watch_gradients(self._hooks, parameters, self._timestamps)
        if self._source == "torch":
            timing_hooks.watch_torch_buckets(self._hooks, parameters, self._timestamps)
        return self

    def _note_input(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._input_shape is None:
            self._input_shape, self._tokens = described_input(inputs)
        wrapper = TorchDDP._active_ddp_module
        if self._source == "module" and wrapper is not None and not self._warned:
            self._warned = True
            is_inside = any(module is self._module for module in wrapper.modules())
            if is_inside and dist.get_world_size(wrapper.process_group) > 1:
                warnings.warn(
                    f"recording: {self._model} runs inside a DistributedDataParallel, so its times contain "
                    "communication, and the trace does not say so; record the wrapped module, or train it alone",
                    stacklevel=2,
                )

    def end_iteration(self) -> None:
        """End the current iteration now, if it is complete, instead of at the next forward pass.

        Time until the next forward pass then belongs to no iteration: evaluation, a checkpoint, waiting for others.
        """
        self._timestamps.finish_iteration(self._timestamps.now())

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        self._timestamps.finish_iteration()
        self._hooks.close()
        if kind is not None:  # after an error the other ranks may never reach the gathering
            return
        mine = self._timestamps.in_ns(*self._offset)
        everyone = [mine]
        if self._group is not None:
            everyone = everyone * dist.get_world_size(self._group)
            with _current(self._device):
                dist.all_gather_object(everyone, mine, group=self._group)
        layouts: dict[BucketLayout, int] = {}
        zero = everyone[0].zero
        ranks = tuple(rank_trace(rank, theirs, zero=zero, layouts=layouts) for rank, theirs in enumerate(everyone))
        self.trace = Trace(workload=self._workload(len(ranks)), layouts=tuple(layouts), ranks=ranks)

    def _workload(self, world_size: int) -> Workload:
        gpu = None if self._device.type == "cpu" else torch.cuda.get_device_properties(self._device)
        return Workload(
            model=self._model,
            source=self._source,
            parameters=described_parameters(self._inner),
            buffers=described_buffers(self._inner),
            device=self._device.type,
            device_name=_processor_name() if gpu is None else gpu.name,
            backend=None if self._group is None else dist.get_backend(self._group),
            world_size=world_size,
            torch_version=torch.__version__,
            batch=self._batch,
            input_shape=self._input_shape,
            tokens=self._tokens,
            memory_bytes_per_s=_memory_bytes_per_s(gpu),
        )


record = Recording


def _memory_bytes_per_s(device: Any) -> float | None:
    """Return the peak bandwidth of a GPU's memory, with two transfers a cycle; None: torch or the driver has none."""
    return getattr(device, "memory_clock_rate", 0) * 1000 * 2 * getattr(device, "memory_bus_width", 0) / 8 or None


def described_input(inputs: Sequence[Any]) -> tuple[tuple[int, ...] | None, int | None]:
    """Return the shape of the first tensor among the inputs of a module, and the length of its sequences of tokens.

    None: there is no tensor, or it has not the numbers of tokens, which are integers by sample and place.
    """
    first = next((tensor for tensor in inputs if isinstance(tensor, torch.Tensor)), None)
    if first is None:
        return None, None
    has_tokens = first.dim() == 2 and first.dtype in (torch.int32, torch.int64)
    return tuple(first.shape), first.shape[1] if has_tokens else None


def _device_of(model: str, parameters: dict[str, nn.Parameter]) -> torch.device:
    """The one device of all parameters; raises ValueError if there is none that the recorder can time."""
    if not parameters:
        raise ValueError(f"recording: expected at least one trainable parameter, {model} has none")
    devices = {parameter.device: name for name, parameter in reversed(parameters.items())}
    for device, name in devices.items():
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"recording: expected all parameters on the CPU or on a CUDA device, {name} is on {device}; "
                "record the module there"
            )
    if len(devices) > 1:
        found = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(
            f"recording: expected all parameters on one device, got {found}; record each part of the module by itself"
        )
    return next(iter(devices))


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one: NCCL's barrier and gathering of objects use the current GPU, by default GPU 0."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and (model := re.search(r"^model name\s*:(.*)", cpuinfo.read_text(), re.MULTILINE)):
        return model[1].strip()
    return platform.processor() or platform.machine()


def _clock_offset_ns(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This rank's clock offset (add it to get rank 0's clock) and its uncertainty, in nanoseconds.

    All ranks leave a barrier at about the same moment and read their clocks. The offset is the median difference of
    several rounds; its uncertainty is the largest distance of a round's difference from the median.
    """
    if group is None:
        return 0, 0
    readings = []
    for _ in range(OFFSET_ROUNDS):
        dist.barrier(group)
        readings.append(time.perf_counter_ns())
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, readings, group=group)
    distances = sorted(zero - mine for zero, mine in zip(everyone[0], readings, strict=True))
    middle = distances[len(distances) // 2]
    return middle, max(distances[-1] - middle, middle - distances[0])


def described_parameters(module: nn.Module) -> tuple[Parameter, ...]:
    """Descriptions of the trainable parameters, for a trace."""
    sparse = sparse_parameters(module)
    return tuple(
        Parameter(name=name, shape=tuple(p.shape), dtype=dtype_name(p), size_bytes=p.nbytes, sparse=name in sparse)
        for name, p in trainable_parameters(module).items()
    )


def described_buffers(module: nn.Module) -> tuple[Buffer, ...]:
    """Descriptions of the buffers, except the ignored ones, for a trace."""
    return tuple(
        Buffer(name=name, dtype=dtype_name(buffer), size_bytes=buffer.nbytes)
        for name, buffer in synchronized_buffers(module).items()
    )
