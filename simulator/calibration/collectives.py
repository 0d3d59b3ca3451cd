"""Collectives: an all-reduce, two of them at a time, and a broadcast, by size."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from reference import models
from reference.launch import report_progress
from reference.parameters import size_bytes, trainable_parameters

from .samples import time_ns
from .stream import Messages, Stream

BUDGET_NS = 1_500_000_000
"""Time for the repetitions of one measurement, unless there would be too few."""
LEAST_REPEATS = 3
QUEUED = 4
"""Messages that wait for their turn when two are to run at a time: then no thread decides when the next begins."""

Samples = dict[str, dict[int, list[int]]]
"""Nanoseconds by what was done and by size."""


def time_collectives(rank: int, _world_size: int, sizes: list[int], repeats: int) -> Samples:
    """Times of an all-reduce, of two at a time (of a queue of them), of a broadcast; the first of each is left out.

    Repetitions are interleaved, so that a drift of the machine's speed hits every size alike. Sizes that take long,
    as on a slow link, are repeated less often: until `BUDGET_NS` is spent on one, but `LEAST_REPEATS` times.
    """
    memory = Messages(2 * max(sizes))
    ways: dict[str, Callable[[list[Tensor]], int]] = {
        "all_reduce": lambda messages: time_ns(dist.all_reduce, messages[0]),
        "two": _two_at_a_time_ns,
        "broadcast": lambda messages: time_ns(dist.broadcast, messages[0], 0),
    }
    times: Samples = {way: {size: [] for size in sizes} for way in ways}
    due = dict.fromkeys(sizes, repeats)
    for done in range(repeats + 1):
        if rank == 0:
            report_progress("calibrating collectives", done, repeats + 1)
        for size in (size for size in sizes if done <= due[size]):
            messages = memory.of(size, QUEUED)
            for way, take in ways.items():
                dist.barrier()
                times[way][size].append(take(messages))
            if done == 0:
                due[size] = affordable(sum(times[way][size][0] for way in ways), repeats)
    return {way: {size: taken[1:] for size, taken in by_size.items()} for way, by_size in times.items()}


def _two_at_a_time_ns(messages: list[Tensor]) -> int:
    stream = Stream(messages, at_a_time=None)
    stream.wait()
    return 2 * stream.pace_ns()


def affordable(once_ns: int, repeats: int, budget_ns: int = BUDGET_NS) -> int:
    """How often to repeat what took this rank so long; the ranks agree on the fewest."""
    affordable = torch.tensor(min(repeats, max(LEAST_REPEATS, budget_ns // once_ns)))
    dist.all_reduce(affordable, op=dist.ReduceOp.MIN)
    return int(affordable)


def gradient_bytes(_rank: int, _world_size: int, model: str) -> int:
    """Of all gradients of a model, as for `--model`."""
    return sum(map(size_bytes, trainable_parameters(models.build(model)[0]).values()))
