"""Exercises of tutorial 1."""

from typing import Any

import torch

from ddplab import RankPool

from .. import averaging
from ..exercises import Exercise


def weights(pool: RankPool) -> Exercise:
    """Weight the gradients of 6 and of 10 of the 16 inputs, on two ranks, so that the sum is the whole batch's."""

    def gives_whole_batch(answer: Any) -> bool:
        uneven = pool.run(averaging.weighted_gradients, (6, 10), tuple(float(weight) for weight in answer))[0]
        whole = averaging.gradients_of_whole_batch("integers")
        return all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(uneven, whole, strict=True))

    def solution() -> tuple[float, float]:
        return 6 / 16, 10 / 16

    return Exercise(
        judge=gives_whole_batch,
        hints=(
            "the sum is another gradient. Which part of the whole batch's mean comes from each rank?",
            "each rank's gradient is a mean over its own inputs: multiply by their number to get a sum",
            "divide the sum of both ranks by the number of all inputs, and write down both factors",
        ),
        explanation="each rank counts by its share of the inputs",
        solution=solution,
        wrong=lambda: [(0.5, 0.5), (10 / 16, 6 / 16), (6, 10), ("six", "ten"), 1],
    )


def clipping(pool: RankPool) -> Exercise:
    """Choose whether ranks clip before or after averaging."""

    def gives_clipped_gradient(answer: object) -> bool | str:
        word = str(answer).strip().lower()
        if word not in ("before", "after"):
            return "answer with one of the two words"
        of_rank_0 = pool.run(averaging.clipped_gradients, word)[0]
        clipped = averaging.clipped(averaging.gradients_of_whole_batch("floats"))
        return all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(of_rank_0, clipped, strict=True))

    def solution() -> str:
        return "after"

    return Exercise(
        judge=gives_clipped_gradient,
        hints=(
            "this order gives another gradient. Is the norm of a mean the mean of the norms?",
            "let one rank's gradient be (1, 0) and the other's (-1, 0), and clip to the norm 0.5 in both orders",
        ),
        explanation="the norm is not linear, so it must be the norm of the average",
        solution=solution,
        wrong=lambda: ["before", "never", 2],
    )
