"""Data parallelism in one file, from naive to overlapped: read this file first, from top to bottom.

There are four classes, each a small step from the one before. They send one all-reduce for each gradient, one for all
gradients, one for each bucket, and at last each bucket while the backward pass still runs: a complete DDP.

`reducer.py` adds buckets in ready order, unused parameters, `no_sync`, comm hooks, Join, sparse gradients, re-entrant
checkpoints, safe retries after exceptions, and errors that name the rank, parameter and bucket at fault.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .bucketing import bucket_caps, initial_buckets

Group = dist.ProcessGroup | None
"""The ranks that train together. None: all ranks."""
InFlight = tuple[list[nn.Parameter], Tensor, dist.Work]
"""Parameters, the flat tensor of their gradients, and its all-reduce."""


class NaiveDataParallel(nn.Module):
    """Averages each gradient with an all-reduce of its own; the ranks must have gradients of the same parameters.

    Call `average_gradients` between the backward pass and the optimiser step, on every rank.
    """

    def __init__(self, module: nn.Module, *, process_group: Group = None) -> None:
        super().__init__()
        self.module, self.process_group = module, process_group
        self.trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for tensor in (*module.parameters(), *module.buffers()):  # equal averages keep equal replicas equal
            dist.broadcast(tensor.detach(), group_src=0, group=process_group)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The output of the module."""
        return self.module(*inputs, **kwargs)

    def average_gradients(self) -> None:
        """Replace every gradient by its average over the ranks."""
        for parameter in self.trainable:
            if parameter.grad is not None:
                parameter.grad = parameter.grad / dist.get_world_size(self.process_group)  # before sums overflow
                dist.all_reduce(parameter.grad, group=self.process_group)


class FlatDataParallel(NaiveDataParallel):
    """Averages all gradients with one all-reduce, which pays the latency of the network only once.

    A flat tensor has one dtype, so gradients of another dtype need another all-reduce.
    """

    def average_gradients(self) -> None:
        """Replace every gradient by its average over the ranks."""
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.trainable):  # in the same order on all ranks
            self.finish(*self.launch([parameter for parameter in self.trainable if parameter.dtype == dtype]))

    def launch(self, parameters: list[nn.Parameter]) -> InFlight:
        """Copy the gradients into one flat tensor and start its all-reduce."""
        flat = torch.cat([self.gradient(parameter).flatten() for parameter in parameters])
        flat /= dist.get_world_size(self.process_group)
        return parameters, flat, dist.all_reduce(flat, group=self.process_group, async_op=True)

    def finish(self, parameters: list[nn.Parameter], flat: Tensor, work: dist.Work) -> None:
        """Wait for an all-reduce and copy the averages back into the gradients."""
        work.wait()
        averages = flat.split([parameter.numel() for parameter in parameters])
        for parameter, average in zip(parameters, averages, strict=True):
            self.gradient(parameter).copy_(average.view_as(parameter))

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The gradient; zeros if the backward pass made none, because the ranks must send equally large tensors."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


class BucketedDataParallel(FlatDataParallel):
    """Averages buckets of gradients with one all-reduce each, still after the backward pass.

    The backward pass visits the layers in reverse, so the last layers are in bucket 0, which is complete first.
    """

    def __init__(self, module: nn.Module, *, bucket_cap_mb: float | None = None, process_group: Group = None) -> None:
        super().__init__(module, process_group=process_group)
        sizes_bytes = [parameter.nbytes for parameter in self.trainable]
        dtypes = [parameter.dtype for parameter in self.trainable]
        assignment = initial_buckets(sizes_bytes, bucket_caps(bucket_cap_mb), keys=dtypes)
        self.buckets = [[self.trainable[index] for index in bucket] for bucket in assignment]

    def average_gradients(self) -> None:
        """Replace every gradient by its average over the ranks."""
        for in_flight in [self.launch(bucket) for bucket in self.buckets]:
            self.finish(*in_flight)


class OverlappedDataParallel(BucketedDataParallel):
    """Averages each bucket during the backward pass; the script calls nothing between the pass and the step.

    All-reduces have no names: the first of one rank is matched with the first of every other rank. Ready orders may
    differ between ranks, so a bucket that is complete waits until all buckets before it are launched.
    """

    def __init__(self, module: nn.Module, *, bucket_cap_mb: float | None = None, process_group: Group = None) -> None:
        super().__init__(module, bucket_cap_mb=bucket_cap_mb, process_group=process_group)
        self.backward_pass = -1  # autograd's number of the pass
        self.missing: set[Tensor] = set()
        self.waiting: list[list[nn.Parameter]] = []
        self.in_flight: list[InFlight] = []
        for parameter in self.trainable:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: Tensor) -> None:
        """Launch the buckets whose turn has come; autograd calls this when it has accumulated a gradient."""
        if (this_pass := torch._C._current_graph_task_id()) != self.backward_pass:  # the first gradient of a pass
            self.backward_pass = this_pass
            self.missing, self.waiting, self.in_flight = set(self.trainable), self.buckets.copy(), []
            torch.autograd.Variable._execution_engine.queue_callback(self.average_gradients)
        self.missing.remove(parameter)
        while self.waiting and self.missing.isdisjoint(self.waiting[0]):
            self.in_flight.append(self.launch(self.waiting.pop(0)))

    def average_gradients(self) -> None:
        """Launch the buckets that lack a gradient, and finish all; autograd calls this when the pass ends."""
        self.in_flight += map(self.launch, self.waiting)
        for in_flight in self.in_flight:
            self.finish(*in_flight)
        self.waiting, self.in_flight = [], []
