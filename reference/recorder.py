"""Record a training run as a `Trace`: from our data parallelism, from torch's, or from a plain module.

Such as::

    with record(model) as recording:
        train(model)
    recording.trace.save("trace.json.gz")

While it runs, hooks append clock readings to lists and nothing else; the trace is made from them at the end.
A plain module is recorded without communication, which is what a prediction wants: an all-reduce makes every
rank's backward pass equally long and so hides which rank was slow.
"""

import platform
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from . import instrumentation
from .data_parallel import DistributedDataParallel
from .instrumentation import Timestamps, now_ns, rank_trace
from .parameters import described_buffers, described_parameters, trainable_parameters
from .trace import BucketLayout, Trace, Workload

OFFSET_ROUNDS = 10


def record(
    module: nn.Module,
    *,
    model: str | None = None,
    batch: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> "Recording":
    """Watch `module` for as long as the returned context is open.

    Args:
        module: Our `DistributedDataParallel`, torch's, or any other module (no communication is recorded).
        model: What the trace calls it. None: the class name of the innermost module.
        batch: Samples per rank and iteration, for whoever reads the trace.
        process_group: Ranks whose recordings become one trace; they must enter and leave the context
            together. None: the group of a data-parallel module, and this rank alone for a plain one.

    Returns:
        A context manager; after it has been left, its `trace` holds the recording of all ranks, on each.

    Raises:
        ValueError: A module without trainable parameters, or one that is not on the CPU: GPU work is timed
            by events on its streams, which this recorder does not read yet.
        RuntimeError: On leaving, where no complete iteration (forward and backward) took place.
    """
    return Recording(module, model=model, batch=batch, process_group=process_group)


class Recording:
    """An open or finished recording; see `record`."""

    trace: Trace
    """The recording of all ranks, once the context has been left."""

    def __init__(
        self,
        module: nn.Module,
        *,
        model: str | None,
        batch: int | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        self._module = module
        self._source: Literal["ddplab", "torch", "module"]
        self._inner: nn.Module
        self._group: dist.ProcessGroup | None
        if isinstance(module, DistributedDataParallel):
            self._source, self._inner, self._group = "ddplab", module.module, module.process_group
        elif isinstance(module, instrumentation.TorchDDP):
            self._source, self._inner, self._group = "torch", module.module, module.process_group
        else:
            self._source, self._inner, self._group = "module", module, process_group
        self._model = model or type(self._inner).__name__
        self._batch = batch
        self._parameters = trainable_parameters(self._inner)
        _check(self._model, self._parameters)

    def __enter__(self) -> Self:
        parameters = list(self._parameters.values())
        self._offset = _clock_offset_ns(self._group)
        self._timestamps = Timestamps(len(parameters))
        with ExitStack() as stack:
            stack.enter_context(instrumentation.watch_passes(self._module, self._timestamps))
            stack.enter_context(instrumentation.watch_optimizers(parameters, self._timestamps))
            if isinstance(self._module, DistributedDataParallel):
                stack.enter_context(instrumentation.watch_our_buckets(self._module, self._timestamps))
            else:
                stack.enter_context(instrumentation.watch_gradients(parameters, self._timestamps))
            if self._source == "torch":
                stack.enter_context(instrumentation.watch_torch_buckets(parameters, self._timestamps))
            self._hooks = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timestamps.finish_iteration()
        self._hooks.close()
        if kind is None:  # after an error the other ranks may never come to the gathering
            self.trace = self._gather()

    def _gather(self) -> Trace:
        everyone: list[Any] = [(0, *self._offset, self._timestamps)]
        if self._group is not None:
            mine = (dist.get_rank(self._group), *self._offset, self._timestamps)
            everyone = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(everyone, mine, group=self._group)
        layouts: dict[BucketLayout, int] = {}
        zero = everyone[0][-1].zero
        ranks = tuple(rank_trace(*one_rank, zero=zero, layouts=layouts) for one_rank in everyone)
        return Trace(workload=self._workload(len(ranks)), layouts=tuple(layouts), ranks=ranks)

    def _workload(self, world_size: int) -> Workload:
        device = next(iter(self._parameters.values())).device
        return Workload(
            model=self._model,
            source=self._source,
            parameters=described_parameters(self._inner),
            buffers=described_buffers(self._inner),
            device=device.type,
            device_name=_processor_name(),
            backend=None if self._group is None else dist.get_backend(self._group),
            world_size=world_size,
            torch_version=torch.__version__,
            batch=self._batch,
        )


def _check(model: str, parameters: dict[str, nn.Parameter]) -> None:
    if not parameters:
        raise ValueError(f"{model} has no trainable parameter, so no gradient will ever be ready")
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu":
            raise ValueError(
                f"recording: expected all parameters on the CPU, {name} is on {parameter.device}; "
                "record the module on the CPU, as GPU timing is not supported yet"
            )


def _processor_name() -> str:
    """The processor's model as the system tells it, else the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _clock_offset_ns(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """What to add to this rank's clock to get rank 0's, and how far that may be off, in nanoseconds.

    All ranks leave a barrier at about the same moment and read their clocks: the median distance of several
    rounds, and how far the others are from it.
    """
    if group is None:
        return 0, 0
    readings = []
    for _ in range(OFFSET_ROUNDS):
        dist.barrier(group)
        readings.append(now_ns())
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, readings, group=group)
    distances = sorted(zero - mine for zero, mine in zip(everyone[0], readings, strict=True))
    middle = distances[len(distances) // 2]
    return middle, max(distances[-1] - middle, middle - distances[0])
