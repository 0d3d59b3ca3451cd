"""Rank functions of tutorial 2: the same bytes in few and in many messages."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from reference import models
from reference.data_parallel import DistributedDataParallel, NaiveDataParallel

from .counting import all_reduces


def time_in_pieces(_rank: int, _world_size: int, total_bytes: int, piece_bytes: int, repeats: int) -> list[int]:
    """Nanoseconds of each repetition to all-reduce `total_bytes` in messages of `piece_bytes`, all issued at once."""
    pieces = torch.ones(total_bytes // 4).split(piece_bytes // 4)
    times_ns = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter_ns()
        handles = [dist.all_reduce(piece, async_op=True) for piece in pieces]
        for handle in handles:
            handle.wait()
        times_ns.append(time.perf_counter_ns() - start)
    return times_ns[1:]  # the first repetition touches the memory for the first time


def iterate_naively(_rank: int, _world_size: int, model: str, iterations: int) -> tuple[int, list[int]]:
    """Train with one all-reduce for each parameter.

    Returns:
        Number of all-reduces in an iteration; nanoseconds of each iteration.
    """
    module, loss_fn = models.build(model)
    naive = NaiveDataParallel(module)
    return _iterate(naive, loss_fn, iterations, naive.average_gradients)


def iterate(_rank: int, _world_size: int, model: str, iterations: int, cap_mb: float) -> tuple[int, list[int]]:
    """Train with buckets of `cap_mb`; returns as `iterate_naively`. The rebuild precedes the timed iterations."""
    module, loss_fn = models.build(model)
    return _iterate(DistributedDataParallel(module, bucket_cap_mb=cap_mb), loss_fn, iterations, lambda: None)


def _iterate(
    module: nn.Module, loss_fn: models.Loss, count: int, finish: Callable[[], None]
) -> tuple[int, list[int]]:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    times_ns = []
    for _ in range(count + 2):
        dist.barrier()
        start = time.perf_counter_ns()
        with all_reduces() as sent:
            optimizer.zero_grad()
            loss_fn(module).backward()
            finish()
            optimizer.step()
        times_ns.append(time.perf_counter_ns() - start)
    return len(sent), times_ns[2:]
