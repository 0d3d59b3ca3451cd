"""Rank bodies of test_trace_of_profile.py: training that torch's profiler watches."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from ddplab.reference.recorder import record
from ddplab.reference.trace import Trace

from ..scenarios import mlp, mlp_batch

TorchDDP = nn.parallel.DistributedDataParallel
RECORD = ProfilerAction.RECORD


def profile_and_record(rank: int, world_size: int, wrapper: str, folder: str) -> Trace:
    """A recording of some iterations, which torch's profiler watches too and writes into the folder."""
    model = mlp((512, 1024, 1024, 64), torch.float32, 0)
    if wrapper == "torch":
        model = TorchDDP(model, bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = mlp_batch((512,), torch.float32, rank, 64)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # torch's class rebuilds its buckets
        step()
    with (
        record(model, process_group=dist.group.WORLD) as recording,
        profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=lambda _: RECORD) as profiler,
    ):
        for _ in range(4):
            step()
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
    return recording.trace


def profile_variant(rank: int, world_size: int, change: dict[str, int], folder: str) -> None:
    """Profile torch's class with an argument, with accumulation under no_sync, or with several passes in a step."""
    change = dict(change)
    accumulated, passes = change.pop("no_sync", 1), change.pop("passes", 1)
    model = TorchDDP(mlp((512, 1024, 64), torch.float32, 0), bucket_cap_mb=0.2, **change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = mlp_batch((512,), torch.float32, rank, 64)

    def step(number: int) -> None:
        last = (number + 1) % accumulated == 0
        for _ in range(passes):
            with nullcontext() if last else model.no_sync():
                model(batch).square().mean().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()

    for number in range(3 * accumulated):  # torch's class rebuilds its buckets
        step(number)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=lambda _: RECORD) as profiler:
        for number in range(4 * accumulated):
            step(number)
            profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
