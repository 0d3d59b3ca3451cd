"""Exercises of tutorial 4."""

from torch import nn

from ddplab import DistributedDataParallel

from .. import inside
from ..exercises import Exercise, matches


def launches() -> Exercise:
    """Name the launches of three buckets that become ready in the order 2, 0, 1."""

    def solution() -> list[tuple[int, int]]:
        return [(0, 0), (1, 1), (2, 1)]

    return Exercise(
        judge=lambda pairs: matches(pairs, inside.launches_after((2, 0, 1))),
        hints=(
            "go through the ready events one by one. Which buckets can be launched at each event, in bucket order?",
            "bucket 2 is ready first. Is any bucket launched at this moment?",
            "when bucket 1 becomes ready, it is not the only bucket whose turn has come",
        ),
        explanation="a full bucket waits for all buckets before it, and one event can launch several buckets",
        solution=solution,
        wrong=lambda: [[(2, 2), (0, 0), (1, 1)], [(0, 0), (1, 1), (2, 2)], [0, 1, 2], 0],
    )


def bucket_bytes() -> Exercise:
    """Count the bytes of the buckets of the notebook's model; needs a process group."""

    def of_reducer() -> int:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        return sum(bucket.size_bytes for bucket in DistributedDataParallel(model).reducer.buckets)

    def solution() -> int:
        return 4 * (64 * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8)

    return Exercise(
        judge=lambda answer: matches(answer, of_reducer()),
        hints=(
            "count all weights and biases, then the bytes of each number",
            "a layer of n inputs and m outputs has n x m weights and m biases",
            "a float32 has four bytes; add up the three layers",
        ),
        explanation="the buckets take as much memory as the gradients",
        solution=solution,
        wrong=lambda: [solution() // 4, 4 * (64 * 64 + 64 * 64 + 64 * 8), "many"],
    )
