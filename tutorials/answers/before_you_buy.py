"""Exercises of tutorial 9."""

from collections.abc import Callable, Sequence

from ..buying import Offer
from ..exercises import Exercise, matches

LIMIT_MINUTES = 1.1


def smallest(hours: Callable[[int], tuple[float, float, float]], sizes: Sequence[int]) -> Exercise:
    """Find the smallest number of GPUs whose epoch ends in time; `hours` returns the median and both ends."""

    def solution() -> int:
        return next((gpus for gpus in sizes if 60 * hours(gpus)[2] <= LIMIT_MINUTES), 0)

    return Exercise(
        judge=lambda answer: matches(answer, solution()),
        hints=(
            "compute the slow end of the interval in minutes for each number of GPUs, from few to many",
            "the slow end is the third number that `epoch_hours` returns, in hours",
        ),
        explanation="the median would promise the target a little earlier than it can be relied on",
        solution=solution,
        wrong=lambda: [solution() + 1, 2 * solution() + 8, "all"],
    )


def upgrade(same: Offer, faster: Offer) -> Exercise:
    """Choose between adapters twice as fast and half the bytes, at 128 GPUs."""

    def iteration_ms(offer: Offer, hook: str) -> float:
        return offer.predict(128, hook=hook).iteration_ns / 1e6

    def solution() -> str:
        adapters, half = iteration_ms(faster, "none"), iteration_ms(same, "fp16")
        return "draw" if abs(adapters / half - 1) < 0.02 else "adapters" if adapters < half else "fp16"

    return Exercise(
        judge=lambda answer: matches(answer, solution()),
        hints=(
            "predict both iterations and compare their times in percent",
            "`offers[SLOW].predict(128)` is the iteration without a change; `predict` takes `hook` too",
        ),
        explanation=lambda _: (
            f"{iteration_ms(faster, 'none'):.1f} ms with faster adapters, "
            f"{iteration_ms(same, 'fp16'):.1f} ms with fp16, whose computation is counted as free here"
        ),
        solution=solution,
        wrong=lambda: [*({"draw", "adapters", "fp16"} - {solution()}), 1],
    )
