"""Exact search: the best contiguous buckets under the recurrence of `partition_costs`, by dynamic programming.

A *label* at position j stands for one way to cut the first j gradients: the number of buckets k, the end of the last
collective D, the delay of computing W, and M, the largest D plus copies so far. A way is never better than another
one if all four are at least as large, because whatever follows, it stays behind. So only labels that no other one
dominates are kept. Labels that cannot become better than a known solution are dropped.

Two values are raised before labels are compared, which changes no result and makes many of them equal: D to the
earliest next launch, and M to the least end of computing.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.bucketing import BucketAssignment

from ..workload.compute_times import Floats
from .partition_costs import PartitionCosts, is_additive

MOST_LABELS = {True: 200, False: 12}
"""Labels kept at one position, where the recurrence is exact and where it is not. More of them would take long;
without them the result is no longer proven."""
FEW_LABELS = 6
"""Labels in a first, quick search, whose result lets the second one drop most labels."""
CANDIDATES = 16
"""Labels, as a multiple of those kept, among which the ones that no other dominates are searched."""
GRID = 1e-6
"""Part of the iteration by which labels must differ where the recurrence is not exact."""


class Cut(NamedTuple):
    """The best contiguous buckets that the search has found."""

    buckets: BucketAssignment
    recurrence_ns: float
    is_complete: bool  # no label was dropped that could have led to a better result


class Segments:
    """Costs of all contiguous buckets, by their first and last position.

    Attributes:
        tables: By last position: costs and delays of the buckets that start at each position from `runs` on.
        least: By position, the least cost of any cut of all gradients from there on.
        least_delay: The least delay likewise.
    """

    def __init__(self, costs: PartitionCosts) -> None:
        self._costs = costs
        order = np.array(costs.order)
        self._additive = is_additive(costs.times.policy.hook)
        self._sums = np.concatenate([np.zeros((2, 1)), costs.message_bytes[:, order].cumsum(axis=1)], axis=1)
        count = len(order)
        self.tables = [self._ending_at(costs.runs[end - 1], end) for end in range(1, count + 1)]
        self.least, self.least_delay = np.full((2, count + 1), np.inf)
        self.least[count] = self.least_delay[count] = 0.0
        for end in range(count, 0, -1):
            start = costs.runs[end - 1]
            for best, table in zip((self.least, self.least_delay), self.tables[end - 1], strict=True):
                best[start:end] = np.minimum(best[start:end], table + best[end])

    def _ending_at(self, start: int, end: int) -> tuple[Floats, Floats]:
        costs, last = self._costs, self._costs.order[end - 1]
        if not self._additive or costs.messages[last] is None or costs.parameters[last].sparse:
            return costs.bucket_costs_ns([costs.order[first:end] for first in range(start, end)])
        first, second = (self._sums[:, end, None] - self._sums[:, start:end]).astype(np.int64)
        link = costs.link_ns("all_reduce", first)
        lost = link * costs.lost_share(first)
        if second.any():
            other = np.where(second > 0, costs.link_ns("all_reduce", second), 0)
            link, lost = link + other, lost + other * costs.lost_share(second)
        return link, lost


def best_cut(
    costs: PartitionCosts,
    segments: Segments,
    known_ns: float,
    *,
    most_bytes: int | None = None,
    thorough: bool = True,
) -> Cut | None:
    """Return the contiguous buckets with the earliest end by the recurrence.

    Args:
        costs: Costs of one cycle.
        segments: Costs of all contiguous buckets.
        known_ns: End by the recurrence of the best known buckets; only cuts that are at least as good are found.
        most_bytes: Largest bytes of a bucket's gradients. None: no limit.
        thorough: Whether to search again with more labels, which takes a few times as long.

    Returns:
        None if no cut is as good as `known_ns`.
    """
    quick = _search(costs, segments, known_ns, most_bytes, FEW_LABELS)
    if not thorough:
        return quick
    if quick is None:
        return _search(costs, segments, known_ns, most_bytes, MOST_LABELS[costs.is_exact])
    return _search(costs, segments, quick.recurrence_ns, most_bytes, MOST_LABELS[costs.is_exact]) or quick


def _search(
    costs: PartitionCosts, segments: Segments, known_ns: float, most_bytes: int | None, most_labels: int
) -> Cut | None:
    """Search once, with arguments and results of `best_cut`, keeping the `most_labels` with the least bounds."""
    order = np.array(costs.order)
    count = len(order)
    sizes = np.array([costs.parameters[index].size_bytes for index in costs.order])
    ends = np.cumsum([0, *sizes])
    packed = np.cumsum([0.0, *costs.pack_ns[order]])
    base = np.concatenate([[0.0], np.maximum.accumulate(costs.ready_ns[0, order])]) + packed
    copies = np.cumsum([0.0, *costs.copy_ns[order]])
    still = copies[-1] - copies
    computed = costs.computed_ns[0] + packed[-1] + still[0]
    launch, step, unpack = costs.launch_ns, costs.step_ns[0], costs.unpack_ns

    fewest = np.minimum.accumulate(costs.copy_ns[order][::-1])[::-1]

    first = np.zeros(count + 2, np.int64)  # of the labels of each position
    first[1:] = 1
    buckets, done, delay, last = (np.zeros(1) for _ in range(4))
    places, parents = np.zeros(1, np.int64), np.zeros(1, np.int64)
    complete = True
    for end in range(1, count + 1):
        run = start = costs.runs[end - 1]
        if most_bytes is not None:
            start = max(start, int(np.searchsorted(ends, ends[end] - most_bytes)))
        begin = int(first[start])
        at = places[begin:]
        cost, loss = (table[at - run] for table in segments.tables[end - 1])
        k = buckets[begin:] + 1
        d = np.maximum(done[begin:], base[end] + k * launch + delay[begin:]) + cost
        w = delay[begin:] + loss
        m = np.maximum(last[begin:], d + still[at] + unpack)
        more = end < count
        if more:
            d = np.maximum(d, base[end + 1] + (k + 1) * launch + w)
        least = computed + (k + more) * (launch + unpack) + w - step
        m = np.maximum(m, least)
        bound = m + step
        if more:
            bound = np.maximum(bound, d + segments.least[end] + fewest[end] + unpack + step)
            bound = np.maximum(bound, least + step + segments.least_delay[end])
        kept = np.flatnonzero(bound <= known_ns)
        if not more and len(kept):
            known_ns = float(bound[kept].min())
        if len(kept) > CANDIDATES * most_labels:
            kept = kept[np.argpartition(bound[kept], CANDIDATES * most_labels)[: CANDIDATES * most_labels]]
            complete = False
        values = np.stack([k, d, w, m])[:, kept]
        if not costs.is_exact:
            values[1:] //= GRID * known_ns + 1
        kept = kept[_undominated(values)]
        if len(kept) > most_labels:
            kept = kept[np.argsort(bound[kept], kind="stable")[:most_labels]]
            complete = False
        first[end + 1] = first[end] + len(kept)
        buckets, done, delay, last = (
            np.concatenate([old, new[kept]]) for old, new in ((buckets, k), (done, d), (delay, w), (last, m))
        )
        places = np.concatenate([places, np.full(len(kept), end)])
        parents = np.concatenate([parents, kept + begin])
    finals = np.arange(first[count], len(places))
    if not len(finals):
        return None
    best = int(finals[np.argmin(last[finals])])
    cuts = [count]
    while best:
        best = int(parents[best])
        cuts.append(int(places[best]))
    edges = cuts[::-1]
    found = [list(costs.order[a:b]) for a, b in pairwise(edges)]
    return Cut(found, float(last[finals].min()) + step, complete)


BLOCK = 32
"""Labels that are compared with all others at a time."""


def _undominated(values: Floats) -> NDArray[np.int64]:
    """Return the columns that no other column is at most as large as in every row; of equal ones the first.

    A column can only be dominated by one whose sum is not larger, so columns are compared in order of their sums.
    """
    left = values.sum(axis=0).argsort(kind="stable")
    kept: list[int] = []
    while len(left):
        block, left = left[:BLOCK], left[BLOCK:]
        some = values[:, block]
        dominates = (some[:, :, None] <= some[:, None, :]).all(axis=0)
        block = block[~np.triu(dominates, 1).any(axis=0)]
        kept.extend(block.tolist())
        some = values[:, block]
        left = left[~(some[:, :, None] <= values[:, None, left]).all(axis=0).any(axis=0)]
    return np.array(kept, np.int64)
