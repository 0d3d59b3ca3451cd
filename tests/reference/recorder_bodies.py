"""Rank bodies of test_recorder.py: training that is recorded."""

import warnings
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.recorder import record
from ddplab.reference.recording.reducer_observer import Observer
from ddplab.reference.trace import Trace

from ..scenarios import CLASSES, Branches, mlp, mlp_batch
from ..simulated_gpu import SimulatedGpu, SimulatedLayer

BATCH = 4  # per rank
Gradients = list[list[Tensor]]
"""By iteration, by parameter."""


def record_oddly(rank: int, _world_size: int, oddity: str) -> Trace:
    """Recordings of unusual but legitimate training scripts."""
    torch.manual_seed(0)
    module = mlp((4, 4, 4), torch.float32, 0)
    group = dist.group.WORLD
    if oddity == "a backward pass beside the output":
        with record(module, process_group=group) as recording:
            module(torch.ones(1, 4)).sum().backward()
            sum(parameter.square().sum() for parameter in module.parameters()).backward()
    elif oddity == "a comm hook that sends something else":
        ddp = CLASSES["torch"](module)
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        with record(ddp) as recording:
            for _ in range(4):
                ddp(torch.ones(1, 4)).sum().backward()
    elif oddity == "a forward pass without backward, then no_sync":
        ddp = DistributedDataParallel(module)
        with record(ddp) as recording:
            ddp(torch.ones(1, 4))
            with ddp.no_sync():
                ddp(torch.ones(1, 4)).sum().backward()
    elif oddity == "a bucket that is skipped":
        ddp = DistributedDataParallel(
            Branches(), bucket_cap_mb=0, find_unused_parameters=True, skip_all_reduce_unused_params=True
        )
        with record(ddp) as recording:
            for which in ("ab", "a", "b"):  # the buckets of b come first
                ddp(torch.ones(1, 4), which).sum().backward()
    elif oddity.endswith("that ignores a parameter"):
        module._ddp_params_and_buffers_to_ignore = ["0.weight"]
        ddp = CLASSES[oddity.split()[0]](module)
        with record(ddp) as recording:
            for _ in range(3):
                ddp(torch.ones(1, 4)).sum().backward()
    return recording.trace


def record_training(
    rank: int, world_size: int, wrapper: str, iterations: int, accumulate: int = 1
) -> tuple[Trace, Gradients, Gradients]:
    """A recording, the gradients with recording, and those without."""
    together = []
    for watched in (True, False):
        model = mlp((8, 16, 16, 4), torch.float32, 0)
        if wrapper != "module":
            model = CLASSES[wrapper](model, bucket_cap_mb=1e-3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = mlp_batch((8,), torch.float32, rank, BATCH)
        gradients = []
        group = dist.group.WORLD
        with record(model, model="mlp", batch=BATCH, process_group=group) if watched else nullcontext() as recording:
            for number in range(iterations):
                last = (number + 1) % accumulate == 0
                with nullcontext() if last else model.no_sync():
                    model(batch).square().mean().backward()
                gradients.append([parameter.grad.clone() for parameter in model.parameters()])
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    model(batch)  # an evaluation in between is not part of an iteration
        if watched:
            trace = recording.trace
        together.append(gradients)
    return trace, *together


def record_inside(rank: int, world_size: int, wrapper: str) -> list[str]:
    """Record the module inside a data-parallel one, by mistake; returns the warnings."""
    model = mlp((8, 16, 4), torch.float32, 0)
    wrapped = CLASSES[wrapper](model)
    with warnings.catch_warnings(record=True) as caught, record(model):
        warnings.simplefilter("always")
        for _ in range(2):
            wrapped(mlp_batch((8,), torch.float32, rank, BATCH)).square().mean().backward()
    return [str(one.message) for one in caught]


class CopiesOut(Observer):
    """Runs the copies out of the buckets on a simulated GPU."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def bucket_done(self, bucket: int) -> None:
        self._gpu.launch(20_000)


def record_on_simulated_gpu(rank: int, world_size: int, wrapper: str, layers_ns: list) -> tuple[Trace, int, int]:
    """A recording of layers on a simulated GPU, how often the host waited in training, and the number of events."""
    gpu = SimulatedGpu()
    model = torch.nn.Sequential(*(SimulatedLayer(gpu, *ns) for ns in layers_ns))
    model = CLASSES[wrapper](model, bucket_cap_mb=1e-5)
    with mock.patch("ddplab.reference.recorder.clock_of", return_value=gpu.clock()), record(model) as recording:
        waits = gpu.synchronizations
        if wrapper == "ours":
            model.reducer.observers.append(CopiesOut(gpu))
        for _ in range(6):
            model(torch.ones(1, 2)).sum().backward()
            gpu.spend(10**7)
        waits = gpu.synchronizations - waits
    return recording.trace, waits, gpu.events
