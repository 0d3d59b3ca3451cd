"""Measures how much computation and collectives slow each other down, and for how long after a collective."""

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
from .collectives import AllReduceQueue, Messages, affordable
from .reducer_costs import first_buckets, pack
from .timing import AloneAndTogether, band_of_median, clock_ns, lost_ns, median_ns, slowdown, time_ns

SIZES_BYTES = [64 * 1024, MIB, 8 * MIB]
"""Small ones cost wake-ups, large ones memory's bandwidth; larger ones do as the largest."""
BUDGET_NS = 45_000_000_000
"""Fewer rounds are made where all would take longer than that."""
APART_A_ROUND = 4
"""Passes with collectives on their own, which lose little more than passes differ anyway."""
MOST_APART_BYTES = MIB
"""Of collectives on their own: what a larger one costs while it is in flight hides what follows."""
APART_NS = 6_000_000
"""From the end of one to the next, at least; several times what lingers."""

Case = tuple[int, int]
"""Bytes of a message, and how many are in flight."""


class Apart(NamedTuple):
    """Collectives on their own.

    Attributes:
        collectives: How many there are in a pass.
        passes: Times of passes through the model without them and with them.
    """

    collectives: int
    passes: AloneAndTogether


class Contended(NamedTuple):
    """What a rank measured.

    Attributes:
        streams: By case, times of its passes through the model and of collectives without pause.
        apart: By bytes of a message, times of passes with collectives on their own.
    """

    streams: dict[Case, tuple[AloneAndTogether, AloneAndTogether]]
    apart: dict[int, Apart]


def time_contention(rank: int, _world_size: int, model: str, rounds: int) -> Contended:
    """Times of this rank's passes through the model and of its collectives.

    A round has each case once, between passes alone: the machine's speed drifts.
    """
    rival = ContendingModel(model, dist.new_group())
    sizes = [size for size in SIZES_BYTES if size <= rival.gradient_bytes] or [rival.gradient_bytes]
    most = CONCURRENCY[dist.get_backend()]
    cases = list(dict.fromkeys([*((size, most) for size in sizes), (sizes[-1], 1)]))
    streams = {case: (AloneAndTogether([], []), AloneAndTogether([], [])) for case in cases}
    places = {size: rival.places_apart(size, APART_NS) for size in sizes if size <= MOST_APART_BYTES}
    singles = {size: Apart(len(chosen), AloneAndTogether([], [])) for size, chosen in places.items() if chosen}
    due, begun_ns = rounds, clock_ns()
    for number in range(rounds):
        if number == 1:
            due = affordable(clock_ns() - begun_ns, rounds, BUDGET_NS)
        if number == due:
            break
        if rank == 0:
            report_progress("calibrating slow-downs", number, due)
        before = rival.compute_alone()
        for case, (passes, collectives) in streams.items():
            reduced, reduced_together, computed_together = rival.contend(*case)
            after = rival.compute_alone()
            passes.alone.append([before, after])
            passes.together.append(computed_together)
            collectives.alone.append([reduced])
            collectives.together.append([reduced_together])
            before = after
        for _ in range(APART_A_ROUND):
            for size, single in singles.items():
                single.passes.together.append([rival.interrupt(size, places[size])])
                after = rival.compute_alone()
                single.passes.alone.append([before, after])
                before = after
    dist.destroy_process_group(rival.beside)
    return Contended(streams, singles)


def contention(by_rank: Sequence[Contended]) -> tuple[Contention, ...]:
    """Factors by case, from all ranks' times."""
    return tuple(_contention(case, [of_rank.streams[case] for of_rank in by_rank]) for case in by_rank[0].streams)


def _contention(case: Case, by_rank: Sequence[tuple[AloneAndTogether, AloneAndTogether]]) -> Contention:
    passes, collectives = zip(*by_rank, strict=True)
    (compute, compute_error), (collective, collective_error) = slowdown(passes), slowdown(collectives)
    size, running = case
    return Contention(
        size_bytes=size,
        running=running,
        compute=compute,
        compute_error=compute_error,
        collective=collective,
        collective_error=collective_error,
    )


def lingering(
    by_rank: Sequence[Contended], rows: Sequence[Contention], launch_ns: int, cost_ns: Callable[[int], int]
) -> tuple[int, int]:
    """How long computation stays slowed after a collective, and half of that time's 90 % band; nanoseconds.

    What a pass loses to collectives on their own is what issuing them takes, what it loses while they are in flight,
    and the rest, which computation at the same factor would lose in the time that is looked for. Each round tells a
    time; the median counts, at least 0 and no longer than the collectives were apart.

    Args:
        by_rank: All ranks' times; where computation is not slowed, nothing lingers.
        rows: The factors, from the same times.
        launch_ns: What issuing a collective takes.
        cost_ns: What one of a number of bytes takes while nobody computes.
    """
    found: list[float] = []
    for size, (collectives, _) in by_rank[0].apart.items():
        slowdowns = slowdowns_of(rows, [size], 1)
        if slowdowns is None or slowdowns.compute[0][0] == 1:
            continue
        part_lost = 1 - 1 / slowdowns.compute[0][0]
        in_flight_ns = cost_ns(size) * slowdowns.collective[0][0]
        of_pass_ns = lost_ns([of_rank.apart[size].passes for of_rank in by_rank])
        found += [(ns / collectives - launch_ns) / part_lost - in_flight_ns for ns in of_pass_ns]
    if not found:
        return 0, 0
    return round(min(max(0.0, median(found)), APART_NS)), round(min(band_of_median(found), APART_NS))


PASSES = 2
"""Beside a stream of collectives, which alone would last twice as long as those passes do alone."""
LEAST_COLLECTIVES, MOST_COLLECTIVES = 4, 400
TRIALS = 5
"""Of a pass and of a collective, to tell how far apart collectives are to be."""


class ContendingModel:
    """A model on this rank.

    What it computes is a backward pass, and copies into buckets and out of them. A forward pass, from which gradients
    come, goes before, but rarely meets a collective in training, so its time does not count.

    Args:
        model: As for `--model`.
        beside: Ranks that wait for each other through it wait for none of the collectives.
    """

    def __init__(self, model: str, beside: dist.ProcessGroup) -> None:
        self.beside = beside
        self._module, self._loss_fn = models.build(model)
        parameters = trainable_parameters(self._module)
        self._buckets = first_buckets(self._module, parameters)
        self.gradient_bytes = sum(map(size_bytes, parameters.values())) // 4 * 4
        self._messages = Messages(self.gradient_bytes)
        self._ready_ns = [0] * len(parameters)
        self._apart: Collection[int] = ()
        self._apart_bytes = 0
        self._works: list[dist.Work] = []
        for index, parameter in enumerate(parameters.values()):
            parameter.register_post_accumulate_grad_hook(partial(self._ready, index))
        self.compute_alone()  # the first touch of every gradient does not count
        self._whole_ns = time_ns(self.compute_alone)

    def compute_alone(self) -> int:
        """Nanoseconds of a pass, up to the slowest rank's end."""
        dist.barrier()
        return self._compute()

    def contend(self, size: int, running: int) -> tuple[int, int, list[int]]:
        """Nanoseconds of a collective alone, of one beside computation, and of passes beside collectives."""
        about_ns = self._stream(LEAST_COLLECTIVES, size, running)[0]
        of_a_pass = torch.tensor(min(max(LEAST_COLLECTIVES, self._whole_ns // about_ns), MOST_COLLECTIVES))
        dist.all_reduce(of_a_pass, op=dist.ReduceOp.MAX)
        alone_ns = self._stream(int(of_a_pass), size, running)[0]
        return alone_ns, *self._stream(2 * PASSES * int(of_a_pass), size, running, passes=PASSES)

    def places_apart(self, size: int, least_ns: int) -> list[int]:
        """Gradients that come so far apart from each other, by rank 0's clock; unused parameters have none.

        From one to the next there is time for a collective, also where computation slows it, and `least_ns` more.
        """
        alone, ready = [], []
        for _ in range(TRIALS):
            dist.barrier()
            alone.append(time_ns(dist.all_reduce, self._messages.of(size, 1)[0]))
            self.compute_alone()
            ready.append(list(self._ready_ns))
        agreed = torch.tensor([median_ns(alone), *map(median_ns, zip(*ready, strict=True))])
        dist.broadcast(agreed, 0)
        alone_ns, *moments = agreed.tolist()
        return apart({place: ns for place, ns in enumerate(moments) if ns}, least_ns + 2 * alone_ns)

    def interrupt(self, size: int, places: Collection[int]) -> int:
        """Nanoseconds of a pass in which a collective is issued whenever one of these gradients is ready."""
        self._apart, self._apart_bytes = frozenset(places), size
        taken_ns = self.compute_alone()
        self._apart = ()
        for work in self._works:
            work.wait()
        self._works.clear()
        return taken_ns

    def _stream(self, count: int, size: int, running: int, *, passes: int = 0) -> tuple[int, list[int]]:
        dist.barrier()
        stream = AllReduceQueue(self._messages.of(size, count), at_a_time=1 if running == 1 else None)
        computed_ns = [self._compute() for _ in range(passes)]
        until_ns = clock_ns() if passes else float("inf")
        stream.wait()
        return stream.pace_ns(until_ns), computed_ns

    def _compute(self) -> int:
        """Nanoseconds up to the slowest rank's end, as in training.

        Collectives rarely slow all ranks equally: their threads take more of one core than of another for a while.
        Whoever is done sooner waits in training too, and leaves its core to the others.
        """
        self._module.zero_grad()
        loss = self._loss_fn(self._module)
        start = clock_ns()
        loss.backward()
        for bucket in self._buckets:
            bucket.reset()
            pack(bucket)
            bucket.copy_out()
        dist.barrier(self.beside)
        return clock_ns() - start

    def _ready(self, index: int, _parameter: torch.Tensor) -> None:
        """All ranks' gradients become ready in one order, so all issue the same collectives."""
        self._ready_ns[index] = clock_ns()
        if index in self._apart:
            work = dist.all_reduce(self._messages.of(self._apart_bytes, 1)[0], async_op=True)
            assert work is not None
            self._works.append(work)


def apart(moments: Mapping[int, int], least: int) -> list[int]:
    """The places with the first moment, and with each that comes at least so long after the one chosen before."""
    chosen: list[int] = []
    for place in sorted(moments, key=moments.__getitem__):
        if not chosen or moments[place] >= moments[chosen[-1]] + least:
            chosen.append(place)
    return chosen
