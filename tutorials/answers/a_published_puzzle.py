"""Exercises of tutorial 8."""

from collections.abc import Callable, Mapping

from ddplab import assign_buckets
from ddplab.reference.bucketing import MIB, bucket_caps
from validation.part_e_bucket_caps import at_most

from ..exercises import Exercise, matches

LINKS = (20, 24, 28, 32, 36)
READY_MIB = (4, 4, 4, 20, 1)


def slowest_link(over_link: Callable[[float], Mapping[float, float]]) -> Exercise:
    """Find the slowest link of `LINKS` over which 10 MB are faster than 100 MB; `over_link` returns ms by cap."""

    def solution() -> int:
        return next(rate for rate in LINKS if (times := over_link(rate))[10] < times[100])

    return Exercise(
        judge=lambda answer: matches(answer, solution()),
        hints=(
            "predict the times over each of the five links, and compare the two caps",
            "`pcie.over_link(24)[10]` is the time of 10 MB over 24 GB/s",
        ),
        explanation="the communication then nearly fits behind the backward pass, and copies decide",
        solution=solution,
        wrong=lambda: [20, 36, 100, "PCIe"],
    )


def two_rules() -> Exercise:
    """Write the sizes of the buckets of five gradients by two rules, with a cap of 10 MiB."""

    def by_rules() -> tuple[list[int], list[int]]:
        sizes = [size * MIB for size in READY_MIB]
        rules = at_most(sizes, range(5), 10 * MIB), assign_buckets(sizes, bucket_caps(10.0))
        first, second = ([sum(READY_MIB[index] for index in bucket) for bucket in rule] for rule in rules)
        return first, second

    def solution() -> tuple[list[int], list[int]]:
        return [8, 4, 20, 1], [12, 20, 1]

    return Exercise(
        judge=lambda answer: matches(answer, by_rules()),
        hints=(
            "put one gradient after the other into the open bucket. Does the rule look before it adds, or after?",
            "by the first rule no bucket of several gradients exceeds the cap; by torch's rule the last one may",
        ),
        explanation="the first rule's buckets of 4, 20 and 1 MiB hold one gradient each: nothing in them is copied",
        solution=solution,
        wrong=lambda: [([12, 20, 1], [8, 4, 20, 1]), ([8, 4, 20, 1], [8, 4, 20, 1]), ([33], [33]), 4],
    )
