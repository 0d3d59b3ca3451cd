"""Contention: how much computation and collectives slow each other down, and for how long after."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch.distributed as dist

from reference.bucketing import MIB
from reference.launch import report_progress

from ..fabric import CONCURRENCY, Contention, slowdowns_of
from .collectives import affordable
from .rival import Rival
from .samples import Contest, band_of_median, clock_ns, lost_ns, slowdown

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
    passes: Contest


class Contended(NamedTuple):
    """What a rank measured.

    Attributes:
        streams: By case, times of its passes through the model and of collectives without pause.
        apart: By bytes of a message, times of passes with collectives on their own.
    """

    streams: dict[Case, tuple[Contest, Contest]]
    apart: dict[int, Apart]


def time_contention(rank: int, _world_size: int, model: str, rounds: int) -> Contended:
    """Times of this rank's passes through the model and of its collectives.

    A round has each case once, between passes alone: the machine's speed drifts.
    """
    rival = Rival(model, dist.new_group())
    sizes = [size for size in SIZES_BYTES if size <= rival.gradient_bytes] or [rival.gradient_bytes]
    most = CONCURRENCY[dist.get_backend()]
    cases = list(dict.fromkeys([*((size, most) for size in sizes), (sizes[-1], 1)]))
    streams = {case: (Contest([], []), Contest([], [])) for case in cases}
    places = {size: rival.places_apart(size, APART_NS) for size in sizes if size <= MOST_APART_BYTES}
    singles = {size: Apart(len(chosen), Contest([], [])) for size, chosen in places.items() if chosen}
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


def _contention(case: Case, by_rank: Sequence[tuple[Contest, Contest]]) -> Contention:
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
