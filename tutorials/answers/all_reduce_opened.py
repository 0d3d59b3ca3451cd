"""Exercises of tutorial 0."""

from collections.abc import Callable
from typing import Any

import numpy as np

import ddplab

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


def ring_of_64() -> Exercise:
    """Compute an all-reduce of 25 MB on 64 ranks, and the part of its time that is latency, in ms."""
    fabric = ddplab.Fabric.from_alpha_beta(alpha_ns=10_000, bytes_per_s=12.5e9)
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
