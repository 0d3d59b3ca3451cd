"""Exercises of tutorial 9."""

from collections.abc import Callable, Sequence
from typing import Any

import simulator
from reference.trace import Trace
from simulator.fabric import Fabric
from simulator.workload.default_gpu_costs import assume_gpu

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


def upgrade(trace: Trace, same: Fabric, faster: Fabric) -> Exercise:
    """Choose between adapters twice as fast and half the bytes, at 128 GPUs."""

    def iteration_ms(network: Fabric, hook: str) -> float:
        offer = assume_gpu(trace, network, simulator.Variation())
        settings: dict[str, Any] = {"world_size": 128, "variation": offer.variation, "hook": hook}
        return simulator.predict(trace, offer.fabric, **settings).iteration_ns / 1e6

    def solution() -> str:
        adapters, half = iteration_ms(faster, "none"), iteration_ms(same, "fp16")
        return "draw" if abs(adapters / half - 1) < 0.02 else "adapters" if adapters < half else "fp16"

    return Exercise(
        judge=lambda answer: matches(answer, solution()),
        hints=(
            "predict both iterations and compare their times in percent",
            "both need `assume_gpu(trace, NETWORK, simulator.Variation())`, then `predict` with `world_size=128`",
        ),
        explanation=lambda _: (
            f"{iteration_ms(faster, 'none'):.1f} ms with faster adapters, "
            f"{iteration_ms(same, 'fp16'):.1f} ms with fp16, whose computation is counted as free here"
        ),
        solution=solution,
        wrong=lambda: [*({"draw", "adapters", "fp16"} - {solution()}), 1],
    )
