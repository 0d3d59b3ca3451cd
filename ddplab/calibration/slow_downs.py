"""Measures how much collectives slow computation down.

Passes through the model are timed while collectives run without a pause, and compared with passes without
collectives. A prediction gives each collective its time alone. If computation slows collectives down, they delay
computation for longer than that, and the factor is larger accordingly.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist

from .. import models
from ..reference.bucketing import MIB
from ..reference.launch import rank_device, report_progress
from . import repeated_timing as timing
from .collective_times import AllReduceQueue, GpuAllReduceQueue, adjacent_messages, within_budget
from .reducer_costs import pack_bucket, wrapped

SIZES_BYTES = [MIB, 8 * MIB]
"""Message sizes: that of the first bucket, and a large one; above 8 MiB little changes."""
GPU_SIZES_BYTES = [8 * MIB, 64 * MIB]
"""The same on GPUs, where smaller messages are over too soon to cover a backward pass."""
BUDGET_NS = 45_000_000_000
"""Time budget for all rounds; if they would take longer, there are fewer rounds."""


class ContinuousTimes(NamedTuple):
    """Times of passes through a model and of collectives without a pause, each alone and beside the other."""

    passes: timing.ContentionTimes
    collectives: timing.ContentionTimes


def time_contention(rank: int, world_size: int, model: str, rounds: int) -> dict[int, ContinuousTimes]:
    """Time this rank's passes through the model and its collectives, alone and under contention, by message size.

    Each round has every size once, between passes without collectives, because the machine's speed drifts. There are
    at most `rounds`; `BUDGET_NS` may allow fewer.
    """
    contending = ContendingModel(model, dist.new_group(backend="gloo"))
    usual = GPU_SIZES_BYTES if rank_device().type == "cuda" else SIZES_BYTES
    sizes = [size for size in usual if size <= contending.gradient_bytes] or [contending.gradient_bytes]
    times = {size: ContinuousTimes(timing.ContentionTimes([], []), timing.ContentionTimes([], [])) for size in sizes}
    for number in within_budget(rounds - 1, BUDGET_NS):
        timing.share_clock(rank, world_size)
        if rank == 0:
            report_progress("calibrating slow-downs", number, rounds)
        before = contending.time_pass()
        for size, (passes, collectives) in times.items():
            alone_ns, contended_ns, passes_ns = contending.time_with_collectives(size)
            after = contending.time_pass()
            passes.alone.append([before, after])
            passes.contended.append(passes_ns)
            collectives.alone.append([alone_ns])
            collectives.contended.append([contended_ns])
            before = after
    dist.destroy_process_group(contending.meeting_group)
    return times


MOST_DELAYED = 0.9
"""Limit, because noise must not stop computation altogether."""


def fit_slow_down(by_rank: Sequence[Mapping[int, ContinuousTimes]]) -> tuple[float, float]:
    """Compute the slow-down of computation and its relative error from the times of all ranks.

    While a collective that takes `C` alone runs, for `k C` because computation slows it down, computation that takes
    `s` times as long is delayed by `k (1 - 1 / s) C`. The result is the factor that delays computation as much while
    a collective takes `C`: the mean over the message sizes.
    """
    delayed, errors = [], []
    for size in by_rank[0]:
        of_ranks = zip(*(of_rank[size] for of_rank in by_rank), strict=True)
        (compute, error), (collective, _) = map(timing.slowdown_factor, of_ranks)
        delayed.append(collective * (1 - 1 / compute))
        errors.append(collective * error / compute)
    factor = 1 / (1 - min(MOST_DELAYED, fmean(min(1.0, part) for part in delayed)))
    return factor, factor * fmean(errors)


# Timed passes and collectives

PASSES = 2
"""Passes timed during a queue of collectives, which is long enough for twice the time of these passes alone."""
LEAST_COLLECTIVES, MOST_COLLECTIVES = 4, 400
MOST_ON_GPU = 200
"""Four times as many, as in the longest queue, are fewer than the 1,024 launches with which a GPU's queue is full."""


class ContendingModel:
    """A model on this rank whose passes are timed, with or without collectives.

    A pass is a backward pass, followed by copies of all gradients into buckets and out of them. The forward pass is
    not timed, because in training it rarely runs at the same time as a collective.

    In `meeting_group`, a separate group, all ranks meet without queueing behind collectives.
    """

    def __init__(self, model: str, meeting_group: dist.ProcessGroup) -> None:
        self.meeting_group = meeting_group
        self._module, self._loss_fn = models.build(model)
        self._buckets = wrapped(self._module).reducer.buckets
        self.gradient_bytes = sum(bucket.size_bytes for bucket in self._buckets) // 4 * 4
        self._memory = torch.ones(self.gradient_bytes // 4, device=rank_device())
        self.time_pass()  # the first one also allocates all gradients and does not count
        self._pass_ns = timing.time_ns(self.time_pass)

    def time_pass(self) -> int:
        """Return the nanoseconds of a pass without collectives, up to the end of the slowest rank."""
        timing.meet()
        return self._timed_pass()

    def time_with_collectives(self, size: int) -> tuple[int, int, list[int]]:
        """Return the nanoseconds of a collective alone, of one during passes, and of each of these passes."""
        about_ns, _ = self._time_queue(size, LEAST_COLLECTIVES)
        most = MOST_ON_GPU if rank_device().type == "cuda" else MOST_COLLECTIVES
        (per_pass,) = timing.of_slowest_rank([min(max(LEAST_COLLECTIVES, self._pass_ns // about_ns), most)])
        alone_ns, _ = self._time_queue(size, per_pass)
        contended_ns, passes_ns = self._time_queue(size, 2 * PASSES * per_pass, passes=PASSES)
        return alone_ns, contended_ns, passes_ns

    def _time_queue(self, size: int, count: int, *, passes: int = 0) -> tuple[int, list[int]]:
        """Return the mean nanoseconds of `count` collectives, and the nanoseconds of each pass during them."""
        timing.meet()
        messages, on_gpu = adjacent_messages(self._memory, size, count), rank_device().type == "cuda"
        queue = GpuAllReduceQueue(messages) if on_gpu else AllReduceQueue(messages)
        passes_ns = [self._timed_pass() for _ in range(passes)]
        until_ns = timing.clock_ns() if passes else float("inf")
        queue.wait()
        return queue.ns_per_all_reduce(until_ns), passes_ns

    def _timed_pass(self) -> int:
        """Return the nanoseconds of a pass from the start to the end of the slowest rank, equal on all ranks.

        Collectives rarely slow all ranks equally, because their threads use one core more than another for a while. A
        rank that finishes early waits for the others, as in training, and leaves its core to them.
        """
        self._module.zero_grad()
        loss = self._loss_fn(self._module)
        start = timing.read_clock()
        loss.backward()
        for bucket in self._buckets:
            bucket.reset()
            pack_bucket(bucket)
            bucket.copy_out()
        start_ns, end_ns = timing.in_ns(start, timing.read_clock())
        if rank_device().type == "cuda":  # as in `last_to_last_ns`
            return timing.of_slowest_rank([end_ns - start_ns], self.meeting_group)[0]
        last_start, last_end = timing.of_slowest_rank([start_ns, end_ns], self.meeting_group)
        return last_end - last_start
