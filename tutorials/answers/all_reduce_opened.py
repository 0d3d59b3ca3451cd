"""Exercises of tutorial 0."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import simulator

from .. import ring
from ..exercises import Exercise, matches


def second_half() -> Exercise:
    """Write the all-gather half of the ring, as a function of the chunks that reduce-scatter leaves."""

    def gathers(half: Callable[[ring.Chunks], Any]) -> bool | str:
        for n in (2, 3, 4, 7):
            arrays = [np.arange(3 * n + 1) * 10**rank for rank in range(n)]
            chunks = ring.cut(arrays)
            list(ring.reduce_scatter(chunks))
            list(half(chunks) or ())  # ours yields after each step
            sums = np.array_split(np.sum(arrays, axis=0), n)
            for rank, of_rank in enumerate(chunks):
                wrong = [number for number in range(n) if not np.array_equal(of_rank[number], sums[number])]
                if wrong:
                    return f"with {n} ranks, rank {rank} does not have the sums of the chunks {wrong}"
        return True

    return Exercise(
        judge=gathers,
        hints=(
            "the loops are those of reduce-scatter; two things differ",
            "which chunk is complete on rank r after reduce-scatter? The rank sends this chunk first",
            "in the next step a rank sends the chunk that has just arrived, and = stands where += stood",
        ),
        explanation="every rank has every sum after n - 1 more steps, in which nothing is added",
        solution=lambda: ring.all_gather,
        code=ring.all_gather,
        wrong=lambda: [lambda _chunks: None, ring.reduce_scatter, 3],
    )


def line(measured_ms: Mapping[int, float]) -> Exercise:
    """Find the latency in ms and the rate in MB/s that predict the measured times by size in bytes."""

    def mean_error(latency_ms: float, mb_per_s: float) -> float:
        return statistics.mean(abs((latency_ms + size / mb_per_s / 1e3) / ms - 1) for size, ms in measured_ms.items())

    def best_error() -> float:
        latencies = np.geomspace(min(measured_ms.values()) / 10, max(measured_ms.values()), 60)
        return min(mean_error(latency, rate) for latency in latencies for rate in np.geomspace(1, 1e5, 120))

    def predicts_well(answer: Any) -> bool | str:
        error, best = mean_error(*answer), best_error()
        return error < 1.5 * best + 0.1 or f"your line is off by {error:.0%} on average; {best:.0%} is possible"

    def solution() -> tuple[float, float]:
        sizes, milliseconds = np.array(list(measured_ms)), np.array(list(measured_ms.values()))
        per_byte, constant = np.polyfit(sizes, milliseconds, 1, w=1 / milliseconds)  # equal relative weights
        return max(constant, min(milliseconds) / 2), 1 / per_byte / 1e3

    def wrong() -> list[object]:
        latency_ms, mb_per_s = solution()
        return [(latency_ms, mb_per_s / 100), (100 * latency_ms, mb_per_s), (0, 0), "fast"]

    return Exercise(
        judge=predicts_well,
        hints=(
            "a small message shows the latency, and the difference of two large ones the rate",
            "in the largest message the latency hardly counts: divide its bytes by its time",
            "np.polyfit(sizes, times, 1, w=1 / times) returns the time of a byte and the latency",
        ),
        explanation=lambda answer: f"your line is off by {mean_error(*answer):.0%} on average",
        solution=solution,
        wrong=wrong,
    )


def ring_of_64() -> Exercise:
    """Compute an all-reduce of 25 MB on 64 ranks, and the part of its time that is latency, in ms."""
    fabric = simulator.Fabric.from_alpha_beta(alpha_ns=10_000, bytes_per_s=12.5e9)
    truth = fabric.all_reduce_ns(25_000_000, 64) / 1e6, fabric.all_reduce_ns(0, 64) / 1e6

    def solution() -> tuple[float, float]:
        steps = 2 * (64 - 1)
        return steps * 0.01 + steps / 64 * 25e6 / 12.5e9 * 1e3, steps * 0.01

    return Exercise(
        judge=lambda answer: matches(answer, truth, tolerance=0.01),
        hints=(
            "count the steps of the ring. How many bytes does each rank send in one step?",
            "every step pays one latency and sends a chunk, which is one part in 64 of the array",
            "multiply the number of steps by the latency; then by the time of a chunk, and add both",
        ),
        explanation="the simulator gives the same; with smaller messages the latency is a larger part",
        solution=solution,
        wrong=lambda: [(2, 0.01), (truth[1], truth[0]), (25e6 / 12.5e9 * 1e3, 0), "long"],
    )
