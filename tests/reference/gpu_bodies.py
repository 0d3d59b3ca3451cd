"""Bodies of the tests on CUDA devices; `device` is only ever changed to try the bodies where there is none."""

import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu_traces import record_beside_profiler as record_of_profiled
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.recorder import record
from ddplab.reference.recording.device_clock import clock_of, nanoseconds
from ddplab.reference.trace import Trace

from ..scenarios import CLASSES, Wrap, mlp, on_both_classes, train
from ..torch_options import taken
from .device_reads_bodies import MODES, register_variant

WARM_UP = 14
"""Iterations until the buckets are rebuilt, PowerSGD compresses and the logging data samples no more."""
CLOSEST_OF = 20
"""Ranks that share a GPU take turns of two milliseconds, so the GPU reaches some readings that much later."""
WIDTHS = (1024, 2048, 2048, 256)


def use_own_gpu(rank: int, _world_size: int) -> None:
    """Give each rank a device, or let ranks share one where there are too few."""
    torch.cuda.set_device(rank % torch.cuda.device_count())


def layers(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(*widths), nn.ReLU()) for widths in pairwise(WIDTHS))).to(device)


def batch(device: str) -> Tensor:
    return torch.ones(256, WIDTHS[0], device=device)


def device_clock(_rank: int, _world_size: int) -> tuple[list[int], float, int]:
    """Distances of readings around a kernel, the kernel's milliseconds, and how far a reading is from the host's."""
    clock = clock_of(torch.device("cuda", torch.cuda.current_device()))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    stream = torch.cuda.current_stream()
    start.record(stream)
    readings = [clock.now()]
    torch.cuda._sleep(400_000_000)  # longer than `ANCHOR_MS`, so that the end becomes the anchor
    readings.append(clock.now())
    end.record(stream)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # recorded later, reached earlier
        readings.append(clock.now())
    clock.settle()
    clock.settle(wait=True)
    moments = [nanoseconds(reading) for reading in readings]
    distances = []
    for _ in range(CLOSEST_OF):
        torch.cuda.synchronize()
        last = clock.now()
        host_ns = time.perf_counter_ns()
        clock.settle(wait=True)
        distances.append(abs(nanoseconds(last) - host_ns))
    return [ns - moments[0] for ns in moments], start.elapsed_time(end), min(distances)


def record_beside_profiler(rank: int, _world_size: int, wrapper: str, folder: str, device: str = "cuda") -> Trace:
    """A recording of iterations that torch's profiler watches too; it writes into the folder."""
    model = layers(device)
    if wrapper in CLASSES:
        model = CLASSES[wrapper](model, bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = batch(device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    return record_of_profiled(model, step, 4, f"{folder}/rank{rank}.json")


@contextmanager
def no_host_waits():
    """Raise where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_without_host_waits(
    _rank: int,
    _world_size: int,
    mode: str,
    hook: str,
    *,
    recorded: bool = False,
    device: str = "cuda",
    checked: AbstractContextManager[Any] | None = None,
) -> int:
    """Train until the training is steady, then on without host waits; returns the synchronised iterations."""
    module = layers(device)
    module.register_buffer("seen", torch.zeros(3, device=device))
    ddp = DistributedDataParallel(module, bucket_cap_mb=4, **MODES[mode])
    register_variant(ddp, hook, dist.group.WORLD)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    x = batch(device)

    def step(number: int) -> None:
        accumulates = number % 3 == 1 and mode in ("plain", "views")
        with ddp.no_sync() if accumulates else nullcontext():
            ddp(x).sum().backward()
        if not accumulates:
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
        with torch.no_grad():
            ddp(x)

    for number in range(WARM_UP):
        step(number)
    with record(ddp) if recorded else nullcontext(), checked or no_host_waits():
        for number in range(6):
            step(number)
    return ddp.reducer.iterations


def logged_times(_rank: int, _world_size: int) -> tuple[dict[str, Any], float]:
    """Logging data of a module whose forward pass is one long kernel, and that kernel's nanoseconds."""

    class Slow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, device="cuda")

        def forward(self, x: Tensor) -> Tensor:
            torch.cuda._sleep(20_000_000)
            return self.linear(x)

    ddp = DistributedDataParallel(Slow())
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(5):
        start.record()
        torch.cuda._sleep(20_000_000)
        end.record()
        ddp(torch.ones(1, 8, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    return ddp._get_ddp_logging_data(), start.elapsed_time(end) * 1e6


def _wrapped(wrap: Wrap, module: nn.Module, **options: Any) -> nn.Module:
    """The module on this rank's GPU; torch's class gets the options that it takes in this version."""
    options = options if wrap is DistributedDataParallel else taken(options)
    return wrap(module.cuda(), device_ids=[torch.cuda.current_device()], **options)


def _on_gpu(wrap: Wrap, rank: int, options: dict) -> list:
    ddp = _wrapped(wrap, mlp((64, 64, 300, 64), torch.float32, 0), bucket_cap_mb=0.05, **options)
    return train(ddp, rank, shape=(8, 64))


def _to_cpu(value: object) -> object:
    if isinstance(value, list):
        return [_to_cpu(part) for part in value]
    return value.cpu() if isinstance(value, Tensor) else value


@on_both_classes
def train_on_gpu(wrap: Wrap, rank: int, options: dict) -> object:
    return _to_cpu(_on_gpu(wrap, rank, options))


@on_both_classes
def count_kernels(wrap: Wrap, _rank: int, options: dict) -> int:
    """Kernels and copies that one iteration launches on the device, after the rebuild."""
    ddp = _wrapped(wrap, mlp((64,) * 9, torch.float32, 0), **options)
    x = torch.ones(8, 64, device="cuda")
    for _ in range(3):
        ddp.zero_grad()
        ddp(x).sum().backward()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        ddp.zero_grad()
        ddp(x).sum().backward()
        torch.cuda.synchronize()
    count = len([event for event in profile.events() if event.device_type.name == "CUDA"])
    assert count > 0
    return count


@on_both_classes
def train_on_side_stream(wrap: Wrap, rank: int) -> object:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        seen = _on_gpu(wrap, rank, {})
    stream.synchronize()
    return _to_cpu(seen)


@on_both_classes
def train_sync_batch_norm(wrap: Wrap, rank: int) -> object:
    module = nn.Sequential(*mlp((4, 4), torch.float32, 0), nn.BatchNorm1d(4))
    ddp = _wrapped(wrap, nn.SyncBatchNorm.convert_sync_batchnorm(module))
    return _to_cpu([*train(ddp, rank), *ddp.buffers()])


def train_without_set_device(rank: int, _world_size: int) -> bool:
    """Whether a rank whose module is on its own GPU leaves GPU 0 to rank 0."""
    ddp = DistributedDataParallel(mlp((4, 4), torch.float32, 0).to(rank), device_ids=[rank])
    ddp(torch.ones(1, 4)).sum().backward()
    return rank == 0 or torch.cuda.memory_allocated(0) == 0


def inputs_on_cpu(rank: int, _world_size: int) -> bool:
    ddp = _wrapped(DistributedDataParallel, mlp((4, 4), torch.float32, 0))
    return ddp(torch.ones(1, 4)).device.type == "cuda"
