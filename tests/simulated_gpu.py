"""A GPU in simulated time, with the events that `DeviceClock` records, and a model whose kernels run on it."""

import threading
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from ddplab.reference.recording.device_clock import DeviceClock

CALL_NS = 1_000
"""Host time of a launch, a record or a query."""


class Stream:
    """Runs what the host enqueues, in order; `free_ns` is when it has done all of it."""

    def __init__(self) -> None:
        self.free_ns = 0


class SimulatedGpu:
    """The host's clock, and streams that run behind it.

    Attributes:
        host_ns: The host's clock.
        events: Number of events made.
        reached_ns: When the GPU reaches each recorded event, in the order in which they were recorded.
        synchronizations: How often the host has waited.
        aside: Within it, a stream that waits for collectives is the current one.
    """

    def __init__(self, tick_ns: int = 1) -> None:
        self.tick_ns = tick_ns
        self.host_ns = 10**12
        self.events = 0
        self.reached_ns: list[int] = []
        self.synchronizations = 0
        self.stream = Stream()
        self.aside = Aside(self)
        self._main = threading.get_ident()

    def spend(self, ns: int) -> None:
        """The host computes."""
        self.host_ns += ns

    def launch(self, ns: int) -> None:
        """Enqueue a kernel on the current stream."""
        self.spend(CALL_NS)
        self.stream.free_ns = max(self.stream.free_ns, self.host_ns) + ns

    def current_stream(self) -> Stream:
        """The current stream; on another thread one that has waited for the main thread's, as in a NCCL callback."""
        if threading.get_ident() == self._main:
            return self.stream
        side = Stream()
        side.free_ns = self.stream.free_ns
        return side

    def clock(self, spare: int = 0) -> DeviceClock:
        """A clock of this GPU, on the axis of its host."""
        new_event = partial(SimulatedEvent, self)
        return DeviceClock(new_event, self.current_stream, lambda: self.host_ns, spare, self.aside)


class Aside:
    """Within it, a stream of its own is the current one, and has waited for the one before."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu, self.stream, self._before = gpu, Stream(), gpu.stream

    def __enter__(self) -> None:
        self._before, self._gpu.stream = self._gpu.stream, self.stream
        self.stream.free_ns = max(self.stream.free_ns, self._before.free_ns)

    def __exit__(self, *_: object) -> None:
        self._gpu.stream = self._before


class SimulatedEvent:
    """As a CUDA event: it may be recorded again, and its time is known once the stream has reached it."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu
        self._reached_ns: int | None = None
        gpu.events += 1

    def record(self, stream: Stream) -> None:
        self._gpu.spend(CALL_NS)
        stream.free_ns = self._reached_ns = max(stream.free_ns, self._gpu.host_ns)
        self._gpu.reached_ns.append(self._reached_ns)

    def query(self) -> bool:
        self._gpu.spend(CALL_NS)
        return self._reached_ns is None or self._reached_ns <= self._gpu.host_ns

    def synchronize(self) -> None:
        assert self._reached_ns is not None
        self._gpu.synchronizations += 1
        self._gpu.host_ns = max(self._gpu.host_ns, self._reached_ns) + CALL_NS

    def elapsed_time(self, end_event: "SimulatedEvent") -> float:
        """Milliseconds, a 32-bit float, from whole ticks of the GPU's clock."""
        moments = [self._reached_ns, end_event._reached_ns]
        if any(moment is None or moment > self._gpu.host_ns for moment in moments):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        start, end = (moment // self._gpu.tick_ns * self._gpu.tick_ns for moment in moments)
        return float(np.float32((end - start) / 1e6))


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(context, x: Tensor, gpu: SimulatedGpu, forward_ns: int, backward_ns: int) -> Tensor:
        gpu.launch(forward_ns)
        context.gpu, context.backward_ns = gpu, backward_ns
        return x.clone()

    @staticmethod
    def backward(context, gradient: Tensor):
        context.gpu.launch(context.backward_ns)
        return gradient, None, None, None


class SimulatedLayer(nn.Module):
    """Two parameters, and kernels of set durations on a simulated GPU, which its input's gradient waits for."""

    def __init__(self, gpu: SimulatedGpu, forward_ns: int, backward_ns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self._kernels = (gpu, forward_ns, backward_ns)

    def forward(self, x: Tensor) -> Tensor:
        return _Kernels.apply(self.linear(x), *self._kernels)
