"""Measures how much computation and collectives slow each other down, and for how long after a collective.

Two kinds of passes through the model are timed, each next to passes alone: passes while collectives run without a
pause, which give the slow-down factors, and passes in which single collectives are issued far apart, which give the
time that computation stays slowed after a collective.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from reference import models
from reference.bucketing import MIB
from reference.launch import report_progress
from reference.parameters import size_bytes, trainable_parameters

from ..fabric import CONCURRENCY, Contention, slowdowns_of
from .collectives import AllReduceQueue, MessageBuffer, affordable_repeats
from .reducer_costs import first_buckets, pack_bucket
from .timing import (
    ContentionTimes,
    added_ns_by_round,
    clock_ns,
    half_band_of_median,
    median_ns,
    slowdown_factor,
    time_ns,
)

SIZES_BYTES = [64 * 1024, MIB, 8 * MIB]
"""Small messages cost wake-ups of threads, large ones memory bandwidth; larger ones act like the largest of these."""
BUDGET_NS = 45_000_000_000
"""Time for all rounds; fewer rounds are made where all would take longer."""
ISOLATED_PASSES_PER_ROUND = 4
"""Several, because isolated collectives add little more to a pass than passes differ anyway."""
LARGEST_ISOLATED_BYTES = MIB
"""The time that a larger collective adds while in flight would hide the time that it adds afterwards."""
ISOLATION_NS = 6_000_000
"""Least time from the end of one isolated collective to the next; several times what computation stays slowed."""


class Case(NamedTuple):
    """One kind of continuous collectives: bytes of each message, and how many are in flight at a time."""

    size_bytes: int
    in_flight: int


class ContinuousTimes(NamedTuple):
    """Times of passes through the model and of collectives, while collectives run without a pause.

    Attributes:
        passes: Of passes; contended by collectives.
        collectives: Of collectives; contended by computation.
    """

    passes: ContentionTimes
    collectives: ContentionTimes


class IsolatedTimes(NamedTuple):
    """Times of passes in which collectives are issued far apart.

    Attributes:
        collectives_per_pass: How many are issued in each pass.
        passes: Of passes; contended by these collectives.
    """

    collectives_per_pass: int
    passes: ContentionTimes


class SlowdownTimes(NamedTuple):
    """All times that one rank measured.

    Attributes:
        continuous: By case.
        isolated: By bytes of a message.
    """

    continuous: dict[Case, ContinuousTimes]
    isolated: dict[int, IsolatedTimes]


def time_contention(rank: int, _world_size: int, model: str, rounds: int) -> SlowdownTimes:
    """Time this rank's passes through the model and its collectives, alone and under contention.

    Each round has every case once, between passes alone, because the machine's speed drifts.

    Args:
        rank: This rank.
        model: As for `--model`.
        rounds: Rounds, unless they would take longer than `BUDGET_NS`.
    """
    contending = ContendingModel(model, dist.new_group())
    sizes = [size for size in SIZES_BYTES if size <= contending.gradient_bytes] or [contending.gradient_bytes]
    most = CONCURRENCY[dist.get_backend()]
    cases = dict.fromkeys([*(Case(size, most) for size in sizes), Case(sizes[-1], 1)])
    continuous = {case: ContinuousTimes(ContentionTimes([], []), ContentionTimes([], [])) for case in cases}
    far_apart = {
        size: contending.gradients_far_apart(size, ISOLATION_NS) for size in sizes if size <= LARGEST_ISOLATED_BYTES
    }
    isolated = {
        size: IsolatedTimes(len(indices), ContentionTimes([], [])) for size, indices in far_apart.items() if indices
    }
    due, start_ns = rounds, clock_ns()
    for number in range(rounds):
        if number == 1:
            due = affordable_repeats(clock_ns() - start_ns, rounds, BUDGET_NS)
        if number == due:
            break
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
    dist.destroy_process_group(contending.barrier_group)
    return SlowdownTimes(continuous, isolated)


# From times to factors


def fit_contention(by_rank: Sequence[SlowdownTimes]) -> tuple[Contention, ...]:
    """The slow-down factors of each case, from the times of all ranks."""
    return tuple(
        _contention(case, [of_rank.continuous[case] for of_rank in by_rank]) for case in by_rank[0].continuous
    )


def _contention(case: Case, by_rank: Sequence[ContinuousTimes]) -> Contention:
    compute, compute_error = slowdown_factor([of_rank.passes for of_rank in by_rank])
    collective, collective_error = slowdown_factor([of_rank.collectives for of_rank in by_rank])
    return Contention(
        size_bytes=case.size_bytes,
        running=case.in_flight,
        compute=compute,
        compute_error=compute_error,
        collective=collective,
        collective_error=collective_error,
    )


def fit_lingering(
    by_rank: Sequence[SlowdownTimes], rows: Sequence[Contention], launch_ns: int, cost_ns: Callable[[int], int]
) -> tuple[int, int]:
    """How long computation stays slowed after a collective, and half of that time's 90 % band; nanoseconds.

    The time that isolated collectives add to a pass has three parts: issuing them, the slow-down while they are in
    flight, and the slow-down afterwards. The first two are known, and the third gives the time that is looked for,
    because computation is slowed by the same factor as before. Each round gives one value. The median counts, which
    is limited to 0 and `ISOLATION_NS`.

    Args:
        by_rank: The times of all ranks.
        rows: The slow-down factors from the same times; where computation is not slowed, nothing is found.
        launch_ns: Nanoseconds to issue a collective.
        cost_ns: Nanoseconds of a collective by its bytes, while no rank computes.
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


# What is timed

PASSES = 2
"""Passes timed next to a queue of collectives, which is long enough to last twice as long as these passes alone."""
LEAST_COLLECTIVES, MOST_COLLECTIVES = 4, 400
TRIALS = 5
"""Measurements of when gradients are ready and of a collective, to place isolated collectives."""


class ContendingModel:
    """A model on this rank whose passes are timed, alone or next to collectives.

    A pass is a backward pass, and copies of all gradients into buckets and out of them. The forward pass before it is
    not timed, because in training it rarely runs at the same time as a collective.

    Args:
        model: As for `--model`.
        barrier_group: A group of all ranks for barriers, which so do not queue behind collectives.
    """

    def __init__(self, model: str, barrier_group: dist.ProcessGroup) -> None:
        self.barrier_group = barrier_group
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
        """Nanoseconds of a pass, up to the slowest rank's end."""
        dist.barrier()
        return self._timed_pass()

    def time_with_continuous_collectives(self, case: Case) -> tuple[int, int, list[int]]:
        """Nanoseconds of a collective alone, of a collective next to passes, and of each pass next to collectives."""
        about_ns, _ = self._time_queue(case, LEAST_COLLECTIVES)
        per_pass = torch.tensor(min(max(LEAST_COLLECTIVES, self._pass_ns // about_ns), MOST_COLLECTIVES))
        dist.all_reduce(per_pass, op=dist.ReduceOp.MAX)
        alone_ns, _ = self._time_queue(case, int(per_pass))
        contended_ns, passes_ns = self._time_queue(case, 2 * PASSES * int(per_pass), passes=PASSES)
        return alone_ns, contended_ns, passes_ns

    def gradients_far_apart(self, size: int, least_ns: int) -> list[int]:
        """Indices of parameters whose gradients become ready far apart by rank 0's clock; unused ones never do.

        From one to the next there is time for a collective of `size` bytes, also if computation slows it down, and
        `least_ns` more.
        """
        alone, ready = [], []
        for _ in range(TRIALS):
            dist.barrier()
            alone.append(time_ns(dist.all_reduce, self._buffer.messages(size, 1)[0]))
            self.time_pass()
            ready.append(list(self._ready_ns))
        of_rank_0 = torch.tensor([median_ns(alone), *map(median_ns, zip(*ready, strict=True))])
        dist.broadcast(of_rank_0, 0)
        alone_ns, *ready_ns = of_rank_0.tolist()
        return choose_far_apart({index: ns for index, ns in enumerate(ready_ns) if ns}, least_ns + 2 * alone_ns)

    def time_pass_with_isolated_collectives(self, size: int, indices: Collection[int]) -> int:
        """Nanoseconds of a pass in which a collective is issued when each of these parameters' gradients is ready."""
        self._isolated_at, self._isolated_bytes = frozenset(indices), size
        pass_ns = self.time_pass()
        self._isolated_at = ()
        for work in self._works:
            work.wait()
        self._works.clear()
        return pass_ns

    def _time_queue(self, case: Case, count: int, *, passes: int = 0) -> tuple[int, list[int]]:
        """Nanoseconds of each of `count` collectives, and of each of the passes that run next to them."""
        dist.barrier()
        queue = AllReduceQueue(self._buffer.messages(case.size_bytes, count), all_at_once=case.in_flight > 1)
        passes_ns = [self._timed_pass() for _ in range(passes)]
        until_ns = clock_ns() if passes else float("inf")
        queue.wait()
        return queue.ns_per_all_reduce(until_ns), passes_ns

    def _timed_pass(self) -> int:
        """Nanoseconds of a pass up to the slowest rank's end, as in training.

        Collectives rarely slow all ranks equally: for a while their threads take more of one core than of another. A
        rank that finishes early waits for the others, as in training, and leaves its core to them.
        """
        self._module.zero_grad()
        loss = self._loss_fn(self._module)
        start = clock_ns()
        loss.backward()
        for bucket in self._buckets:
            bucket.reset()
            pack_bucket(bucket)
            bucket.copy_out()
        dist.barrier(self.barrier_group)
        return clock_ns() - start

    def _gradient_ready(self, index: int, _parameter: torch.Tensor) -> None:
        """Gradients become ready in the same order on all ranks, so all issue the same collectives."""
        self._ready_ns[index] = clock_ns()
        if index in self._isolated_at:
            work = dist.all_reduce(self._buffer.messages(self._isolated_bytes, 1)[0], async_op=True)
            assert work is not None
            self._works.append(work)


def choose_far_apart(moments: Mapping[int, int], least: int) -> list[int]:
    """The key of the earliest moment, and in order of time each that is `least` or more after the last one chosen."""
    chosen: list[int] = []
    for key in sorted(moments, key=moments.__getitem__):
        if not chosen or moments[key] >= moments[chosen[-1]] + least:
            chosen.append(key)
    return chosen
