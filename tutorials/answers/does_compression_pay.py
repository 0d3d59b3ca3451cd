"""Exercises of tutorial 10."""

from collections.abc import Mapping
from math import sqrt

from reference.trace import Trace
from simulator.schedule.comm_hook_messages import CommHook

from ..bandwidths import POWER_SGD, crossover, dearer, iteration_ms
from ..exercises import Exercise, matches

GBIT_PER_S = 25


def against_half_precision(trace: Trace, hooks: Mapping[str, CommHook]) -> Exercise:
    """Find the bandwidth in Gbit/s up to which PowerSGD of rank 4 is faster than float16, of hooks by name."""

    def solution() -> float | None:
        return crossover(trace, hooks[POWER_SGD], hooks["fp16"])

    return Exercise(
        judge=lambda answer: matches(answer, solution(), tolerance=0.05),
        hints=(
            "compare PowerSGD with float16 instead of no hook; the curves cross at another bandwidth",
            "`crossover` takes a trace, the hook that you ask about, and the hook that it competes with",
        ),
        explanation="against a hook that already halves the bytes, PowerSGD has less left to save",
        solution=solution,
        wrong=lambda: [1000, crossover(trace, hooks[POWER_SGD], hooks["none"]), "10"],
    )


def break_even(trace: Trace, hooks: Mapping[str, CommHook]) -> Exercise:
    """Find how many times as long PowerSGD may compute before it is slower than no hook, over `GBIT_PER_S`."""

    def saves(factor: float) -> bool:
        with_hook = iteration_ms(trace, dearer(hooks[POWER_SGD], factor), GBIT_PER_S)
        return with_hook < iteration_ms(trace, hooks["none"], GBIT_PER_S)

    def solution() -> float:
        low, high = 1.0, 100.0
        while high / low > 1.01:
            middle = sqrt(low * high)
            low, high = (middle, high) if saves(middle) else (low, middle)
        return sqrt(low * high)

    return Exercise(
        judge=lambda answer: matches(answer, solution(), tolerance=0.05),
        hints=(
            "predict the iteration with the dearer hook and without a hook. Which factor makes them equal?",
            "try factors from 1 to 10, and halve the range in which the longer iteration changes",
        ),
        explanation="what fewer bytes save falls as the bandwidth grows, in proportion: the crossover divided by 25",
        solution=solution,
        wrong=lambda: [1, 100, 1.2 * solution(), "twice"],
    )
