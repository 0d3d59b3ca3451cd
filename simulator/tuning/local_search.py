"""Local search: improves buckets by small changes."""

from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise

from ...reference.bucketing import BucketAssignment
from ...reference.trace import BucketLayout
from .partition_costs import PartitionCosts

STEPS = (1, 2, 4, 8, 16, 32)
"""By how many gradients a border between two buckets moves."""


def improve(
    plan: BucketLayout,
    costs: PartitionCosts,
    value_ns: Callable[[BucketLayout], float],
    evaluations: int,
) -> BucketLayout:
    """Return the plan after changes that make `value_ns`, or at equal value the number of buckets, smaller.

    Stops when no change does, or all evaluations are used.

    Args:
        plan: Parameter indices by bucket, in launch order.
        costs: Which parameters may share a bucket.
        value_ns: What should become small.
        evaluations: How often `value_ns` may be called.
    """
    best, tried = (value_ns(plan), len(plan)), {plan}
    improved = True
    while improved:
        improved = False
        for changed in _neighbours(plan, costs):
            if changed in tried:
                continue
            if evaluations <= 0:
                return plan
            evaluations -= 1
            tried.add(changed)
            value = value_ns(changed), len(changed)
            if value < best:
                plan, best, improved = changed, value, True
                break
    return plan


def _neighbours(plan: BucketLayout, costs: PartitionCosts) -> Iterator[BucketLayout]:
    """Return plans in which two successive buckets are merged, one is split, or a border has moved."""
    kinds = costs.kinds
    pairs = [(n, a, b) for n, (a, b) in enumerate(pairwise(plan)) if kinds[a[0]] == kinds[b[0]]]
    for number, one, other in pairs:
        yield (*plan[:number], one + other, *plan[number + 2 :])
    for number, bucket in enumerate(plan):
        if len(bucket) > 1:
            sizes = list(accumulate(costs.parameters[index].size_bytes for index in bucket))
            half = next(place for place, size in enumerate(sizes, start=1) if 2 * size >= sizes[-1])
            for edge in {1, min(half, len(bucket) - 1), len(bucket) - 1}:
                yield (*plan[:number], bucket[:edge], bucket[edge:], *plan[number + 1 :])
    for number, one, other in pairs:
        both = one + other
        for step in STEPS:
            for edge in (len(one) - step, len(one) + step):
                if 0 < edge < len(both):
                    yield (*plan[:number], both[:edge], both[edge:], *plan[number + 2 :])


def as_layout(buckets: BucketAssignment) -> BucketLayout:
    """Return buckets as tuples, which are hashable."""
    return tuple(map(tuple, buckets))
