"""Measures how much computation and collectives slow each other down, and for how long after a collective.

Two kinds of passes through the model are timed and compared with passes without collectives. Passes while collectives
run without a pause give the slow-down factors. Passes in which single collectives are issued far apart give the time
for which computation stays slowed after a collective.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from reference.bucketing import MIB
from reference.launch import rank_device, report_progress
from reference.parameters import size_bytes, trainable_parameters
from simulator.fabric import CONCURRENCY, Contention, slowdowns_of

from .. import models
from .collective_times import AllReduceQueue, GpuAllReduceQueue, MessageBuffer, affordable_repeats
from .reducer_costs import first_buckets, pack_bucket
from .repeated_timing import (
    ContentionTimes,
    added_ns_by_round,
    clock_ns,
    half_band_of_median,
    in_ns,
    median_ns,
    meet,
    of_slowest_rank,
    read_clock,
    share_clock,
    slowdown_factor,
    time_ns,
)

SIZES_BYTES = [64 * 1024, MIB, 8 * MIB]
"""Message sizes: small messages cost thread wake-ups, large ones memory bandwidth; above 8 MiB little changes."""
GPU_SIZES_BYTES = [8 * MIB, 64 * MIB]
"""The same on GPUs, where smaller messages are over too soon to cover a backward pass."""
BUDGET_NS = 45_000_000_000
"""Time budget for all rounds; if they would take longer, there are fewer rounds."""
ISOLATED_PASSES_PER_ROUND = 4
"""More than one, because isolated collectives add little compared with the variation between passes."""
LARGEST_ISOLATED_BYTES = MIB
"""Limit: the time that larger collectives add while in flight would hide the time that they add afterwards."""
ISOLATION_NS = 6_000_000
"""Least time from the end of one isolated collective to the next; several times the expected `lingers_ns`."""


class Case(NamedTuple):
    """One kind of continuous collectives: bytes per message, and number of collectives in flight."""

    size_bytes: int
    in_flight: int


class ContinuousTimes(NamedTuple):
    """Times of passes through a model and of collectives without a pause, each alone and beside the other."""

    passes: ContentionTimes
    collectives: ContentionTimes


class IsolatedTimes(NamedTuple):
    """Times of passes without collectives, and of passes in which this number of them is issued far apart."""

    collectives_per_pass: int
    passes: ContentionTimes


class SlowdownTimes(NamedTuple):
    """All times that one rank measured; those with isolated collectives by bytes per message."""

    continuous: dict[Case, ContinuousTimes]
    isolated: dict[int, IsolatedTimes]


def time_contention(rank: int, world_size: int, model: str, rounds: int) -> SlowdownTimes:
    """Time this rank's passes through the model and its collectives, alone and under contention.

    Each round has every case once, between passes without collectives, because the machine's speed drifts. There are
    at most `rounds`; `BUDGET_NS` may allow fewer.
    """
    contending = ContendingModel(model, dist.new_group(backend="gloo"))
    on_gpu = rank_device().type == "cuda"
    usual = GPU_SIZES_BYTES if on_gpu else SIZES_BYTES
    sizes = [size for size in usual if size <= contending.gradient_bytes] or [contending.gradient_bytes]
    most = CONCURRENCY[dist.get_backend()]
    cases = dict.fromkeys(Case(size, in_flight) for size in sizes for in_flight in (most, 1))
    continuous = {case: ContinuousTimes(ContentionTimes([], []), ContentionTimes([], [])) for case in cases}
    far_apart = {
        size: contending.gradients_far_apart(size, ISOLATION_NS)
        for size in sizes
        if size <= LARGEST_ISOLATED_BYTES and not on_gpu
    }  # a GPU has no threads of the network, whose work lingers
    isolated = {
        size: IsolatedTimes(len(indices), ContentionTimes([], [])) for size, indices in far_apart.items() if indices
    }
    due, start_ns = rounds, clock_ns()
    for number in range(rounds):
        if number == 1:
            due = affordable_repeats(clock_ns() - start_ns, rounds, BUDGET_NS)
        if number == due:
            break
        share_clock(rank, world_size)
        if rank == 0:
            report_progress("calibrating slow-downs", number, due)
        before = contending.time_pass()
        for case, (passes, collectives) in continuous.items():
            alone_ns, contended_ns, passes_ns = contending.time_with_continuous_collectives(case)
            after = contending.time_pass()
            passes.alone.append([before, after])
            passes.contended.append(passes_ns)
            collectives.alone.append([alone_ns])
            collectives.contended.append([contended_ns])
            before = after
        for _ in range(ISOLATED_PASSES_PER_ROUND):
            for size, (_count, passes) in isolated.items():
                passes.contended.append([contending.time_pass_with_isolated_collectives(size, far_apart[size])])
                after = contending.time_pass()
                passes.alone.append([before, after])
                before = after
    dist.destroy_process_group(contending.meeting_group)
    return SlowdownTimes(continuous, isolated)


# From times to factors


def fit_contention(by_rank: Sequence[SlowdownTimes]) -> tuple[Contention, ...]:
    """Compute the slow-down factors of each case from the times of all ranks."""
    rows = []
    for size, in_flight in by_rank[0].continuous:
        times = zip(*(of_rank.continuous[Case(size, in_flight)] for of_rank in by_rank), strict=True)
        factors: dict[str, float] = {}
        for name, of_ranks in zip(("compute", "collective"), times, strict=True):
            factors[name], factors[f"{name}_error"] = slowdown_factor(of_ranks)
        rows.append(Contention(size_bytes=size, running=in_flight, **factors))
    return tuple(rows)


def fit_lingering(
    by_rank: Sequence[SlowdownTimes], rows: Sequence[Contention], launch_ns: int, cost_ns: Callable[[int], int]
) -> tuple[int, int]:
    """Compute how long computation stays slowed after a collective, and half of its 90 % band, in nanoseconds.

    The time that isolated collectives add to a pass has three parts: issuing them, the slow-down while they are in
    flight, and the slow-down afterwards. The first two are known, from `launch_ns`, the factors in `rows` and the
    cost of a collective while no rank computes. The third gives the result, on the assumption that the factor stays
    the same afterwards; sizes that do not slow computation are left out. Each round gives one value; the result is
    their median, limited to the range from 0 to `ISOLATION_NS`.
    """
    found: list[float] = []
    for size, (collectives_per_pass, _) in by_rank[0].isolated.items():
        slowdowns = slowdowns_of(rows, [size], 1)
        if slowdowns is None or slowdowns.compute[0][0] == 1:
            continue
        lost_fraction = 1 - 1 / slowdowns.compute[0][0]
        in_flight_ns = cost_ns(size) * slowdowns.collective[0][0]
        added_ns = added_ns_by_round([of_rank.isolated[size].passes for of_rank in by_rank])
        found += [(ns / collectives_per_pass - launch_ns) / lost_fraction - in_flight_ns for ns in added_ns]
    if not found:
        return 0, 0
    lingering_ns, error_ns = max(0.0, median(found)), half_band_of_median(found)
    return round(min(lingering_ns, ISOLATION_NS)), round(min(error_ns, ISOLATION_NS))


# Timed passes and collectives

PASSES = 2
"""Passes timed during a queue of collectives, which is long enough for twice the time of these passes alone."""
LEAST_COLLECTIVES, MOST_COLLECTIVES = 4, 400
MOST_ON_GPU = 200
"""Four times as many, as in the longest queue, are fewer than the 1,024 launches with which a GPU's queue is full."""
TRIALS = 5
"""Trial passes and collectives, from which the positions of isolated collectives are chosen."""


class ContendingModel:
    """A model on this rank whose passes are timed, with or without collectives.

    A pass is a backward pass, followed by copies of all gradients into buckets and out of them. The forward pass is
    not timed, because in training it rarely runs at the same time as a collective.

    In `meeting_group`, a separate group, all ranks meet without queueing behind collectives.
    """

    def __init__(self, model: str, meeting_group: dist.ProcessGroup) -> None:
        self.meeting_group = meeting_group
        self._module, self._loss_fn = models.build(model)
        parameters = trainable_parameters(self._module)
        self._buckets = first_buckets(self._module, parameters)
        self.gradient_bytes = sum(map(size_bytes, parameters.values())) // 4 * 4
        self._buffer = MessageBuffer(self.gradient_bytes)
        self._ready_ns = [0] * len(parameters)
        self._isolated_at: Collection[int] = ()
        self._isolated_bytes = 0
        self._works: list[dist.Work] = []
        for index, parameter in enumerate(parameters.values()):
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, index))
        self.time_pass()  # the first one also allocates all gradients and does not count
        self._pass_ns = time_ns(self.time_pass)

    def time_pass(self) -> int:
        """Return the nanoseconds of a pass without collectives, up to the end of the slowest rank."""
        meet()
        return self._timed_pass()

    def time_with_continuous_collectives(self, case: Case) -> tuple[int, int, list[int]]:
        """Return the nanoseconds of a collective alone, of one during passes, and of each of these passes."""
        about_ns, _ = self._time_queue(case, LEAST_COLLECTIVES)
        most = MOST_ON_GPU if rank_device().type == "cuda" else MOST_COLLECTIVES
        (per_pass,) = of_slowest_rank([min(max(LEAST_COLLECTIVES, self._pass_ns // about_ns), most)])
        alone_ns, _ = self._time_queue(case, per_pass)
        contended_ns, passes_ns = self._time_queue(case, 2 * PASSES * per_pass, passes=PASSES)
        return alone_ns, contended_ns, passes_ns

    def gradients_far_apart(self, size: int, least_ns: int) -> list[int]:
        """Return indices of parameters whose gradients become ready far apart on rank 0, without unused parameters.

        The time from one to the next is at least `least_ns` plus twice the time of a collective of `size` bytes,
        because computation may slow the collective down.
        """
        alone, ready = [], []
        for _ in range(TRIALS):
            meet()
            alone.append(time_ns(dist.all_reduce, self._buffer.messages(size, 1)[0]))
            self.time_pass()
            ready.append(list(self._ready_ns))
        of_rank_0 = torch.tensor([median_ns(alone), *map(median_ns, zip(*ready, strict=True))])
        dist.broadcast(of_rank_0, 0)
        alone_ns, *ready_ns = of_rank_0.tolist()
        return choose_far_apart({index: ns for index, ns in enumerate(ready_ns) if ns}, least_ns + 2 * alone_ns)

    def time_pass_with_isolated_collectives(self, size: int, indices: Collection[int]) -> int:
        """Return the nanoseconds of a pass that issues a collective when the gradient of each of these is ready."""
        self._isolated_at, self._isolated_bytes = frozenset(indices), size
        pass_ns = self.time_pass()
        self._isolated_at = ()
        while self._works:
            self._works.pop().wait()
        return pass_ns

    def _time_queue(self, case: Case, count: int, *, passes: int = 0) -> tuple[int, list[int]]:
        """Return the mean nanoseconds of `count` collectives, and the nanoseconds of each pass during them."""
        meet()
        messages, on_gpu = self._buffer.messages(case.size_bytes, count), rank_device().type == "cuda"
        queue = GpuAllReduceQueue(messages) if on_gpu else AllReduceQueue(messages, all_at_once=case.in_flight > 1)
        passes_ns = [self._timed_pass() for _ in range(passes)]
        until_ns = clock_ns() if passes else float("inf")
        queue.wait()
        return queue.ns_per_all_reduce(until_ns), passes_ns

    def _timed_pass(self) -> int:
        """Return the nanoseconds of a pass from the start to the end of the slowest rank, equal on all ranks.

        Collectives rarely slow all ranks equally, because their threads use one core more than another for a while. A
        rank that finishes early waits for the others, as in training, and leaves its core to them.
        """
        self._module.zero_grad()
        loss = self._loss_fn(self._module)
        start = read_clock()
        loss.backward()
        for bucket in self._buckets:
            bucket.reset()
            pack_bucket(bucket)
            bucket.copy_out()
        start_ns, end_ns = in_ns(start, read_clock())
        if rank_device().type == "cuda":  # as in `last_to_last_ns`
            return of_slowest_rank([end_ns - start_ns], self.meeting_group)[0]
        last_start, last_end = of_slowest_rank([start_ns, end_ns], self.meeting_group)
        return last_end - last_start

    def _gradient_ready(self, index: int, _parameter: torch.Tensor) -> None:
        """Issue an isolated collective if due; equal on all ranks, because their ready order is equal."""
        self._ready_ns[index] = clock_ns()
        if index in self._isolated_at:
            work = dist.all_reduce(self._buffer.messages(self._isolated_bytes, 1)[0], async_op=True)
            assert work is not None
            self._works.append(work)


def choose_far_apart(moments: Mapping[int, int], least: int) -> list[int]:
    """Choose the key of the earliest moment, then each next one at least `least` after the previous choice."""
    chosen: list[int] = []
    for key in sorted(moments, key=moments.__getitem__):
        if not chosen or moments[key] >= moments[chosen[-1]] + least:
            chosen.append(key)
    return chosen
