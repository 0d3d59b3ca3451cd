"""Exercises of tutorial 7."""

from collections.abc import Callable, Sequence
from typing import Any

from ddplab import Fabric, Prediction, Trace, emulate, simulator

from ..exercises import Exercise, matches

RANKS = 8


def replay(launched: Sequence[int], costs: Sequence[int]) -> list[int]:
    """Moments at which buckets are done: one all-reduce after the other, each after its launch."""
    done, end = [], 0
    for launch, cost in zip(launched, costs, strict=True):
        end = max(launch, end) + cost
        done.append(end)
    return done


def naive_replay(trace: Trace, links: Fabric) -> Exercise:
    """Write the naive replay; the check replays the buckets of 1 MiB on eight ranks."""

    def simulated() -> tuple[list[int], list[int], list[int]]:
        one = simulator.predict(
            trace, links, world_size=RANKS, bucket_cap_mb=1, broadcast_buffers=False, assume=False
        )
        sizes = [sum(trace.sizes_bytes[index] for index in bucket) for bucket in one.buckets]
        costs = [links.all_reduce_ns(size, RANKS) for size in sizes]
        return one.timeline.launched_ns.max(0).tolist(), costs, one.timeline.done_ns.tolist()

    def judge(function: Callable[[list[int], list[int]], Any]) -> bool:
        launched, costs, done = simulated()
        return matches(function(launched, costs), done)

    def wrong() -> list[object]:
        return [
            lambda launched, costs: launched[: len(costs)],
            lambda launched, costs: [launch + cost for launch, cost in zip(launched, costs, strict=True)],
            3,
        ]

    return Exercise(
        judge=judge,
        hints=(
            "the simulator's times are others. What must an all-reduce wait for before it starts?",
            "go through the buckets in order, and keep the moment at which the network is free",
            "an all-reduce starts at the later of two moments: its launch, and the end of the one before",
        ),
        explanation="for all buckets, the times of the simulator to the nanosecond",
        solution=lambda: replay,
        code=replay,
        wrong=wrong,
    )


def straggler(trace: Trace, links: Fabric, equal_ns: int) -> Exercise:
    """Find the factor by which a straggler of 1.3 lengthens the iteration; `equal_ns` is the one without it."""
    slow = [simulator.Straggler(rank=1, factor=1.3)]
    eight: dict[str, Any] = {"world_size": RANKS, "bucket_cap_mb": 25, "assume": False}

    def emulated_ns() -> int:
        emulated: Prediction = emulate(trace, links, **eight, stragglers=slow)
        return emulated.iteration_ns

    def solution() -> float:
        slowed = simulator.predict(trace, links, **eight, stragglers=slow)
        return slowed.iteration_ns / simulator.predict(trace, links, **eight).iteration_ns

    return Exercise(
        judge=lambda factor: abs(float(factor) - emulated_ns() / equal_ns) < 0.005,
        hints=(
            "divide the iteration with the slow rank by the iteration without it, both predicted at the same cap",
            "call `predict` twice with `world_size=8, bucket_cap_mb=25, assume=False`, once with `stragglers`",
        ),
        explanation=lambda _: (
            "the network limits this iteration, so the slow rank only delays the first bucket of the "
            f"queue, by {(emulated_ns() - equal_ns) / 1e6:.0f} ms"
        ),
        solution=solution,
        wrong=lambda: [1, 1.3, solution() + 0.1, 1 / solution(), "more"],
    )
