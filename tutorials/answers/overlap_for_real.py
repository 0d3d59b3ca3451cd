"""Exercises of tutorial 3."""

from collections.abc import Callable

import numpy as np

from .. import ordering
from ..exercises import Exercise, matches


def last_done() -> Exercise:
    """Find when the last of two buckets is done, in reverse order and in forward order, in ms."""

    def solution() -> tuple[int, int]:
        return 55, 70

    return Exercise(
        judge=lambda answer: matches(answer, ordering.done_ms((40, 30, 20, 10), per_bucket=2, all_reduce_ms=15)),
        hints=(
            "draw both buckets on a time line. Which gradient does each wait for, and when is the network free?",
            "the first bucket has the gradients of 10 and 20 ms in reverse order, and the others in forward order",
            "a bucket starts at its later gradient, or when the bucket before it is done, if that is later still",
        ),
        explanation="reverse order hides the first all-reduce, forward order hides none",
        solution=solution,
        wrong=lambda: [(70, 55), (55, 55), (40, 40), ("early", "late")],
    )


def best_rate(compute_ms: float, backward_ms: float, communication_ms: Callable[[float], float]) -> Exercise:
    """Find the rate in Gbit/s at which overlap saves the largest part of an iteration without overlap.

    Args:
        compute_ms: Forward and backward pass.
        backward_ms: Backward pass.
        communication_ms: All all-reduces at a rate in Gbit/s.
    """
    rates = np.geomspace(1, 100, 300)

    def saved_part(gbit_per_s: float) -> float:
        return min(backward_ms, communication_ms(gbit_per_s)) / (compute_ms + communication_ms(gbit_per_s))

    def judge(rate: float) -> bool | str:
        return abs(float(rate) / max(rates, key=saved_part) - 1) < 0.05 or f"there it saves {saved_part(rate):.0%}"

    def solution() -> float:
        return float(rates[np.argmin([abs(communication_ms(rate) - backward_ms) for rate in rates])])

    return Exercise(
        judge=judge,
        hints=(
            "answer with a number of Gbit/s",
            "divide `limit_ms(rate)` by the iteration without overlap, for several rates",
            "the part is largest at the kink of `limit_ms`: which two times are equal there?",
        ),
        explanation=lambda rate: f"where backward pass and communication are equal, it saves {saved_part(rate):.0%}",
        solution=solution,
        wrong=lambda: [1, 100, solution() / 2, "fast"],
    )
