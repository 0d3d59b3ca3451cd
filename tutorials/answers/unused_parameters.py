"""Exercises of tutorial 5."""

from typing import Any

import torch

from reference.launch import RankPool

from .. import unused
from ..exercises import Exercise, matches


def bitmap(pool: RankPool) -> Exercise:
    """Write the bitmap of four layers on two ranks, and the layers whose gradients stay as they were."""

    def is_bitmap(answer: Any) -> bool | str:
        counts = pool.run(unused.used_map, ((0, 1), (0, 2)), 4)[0]
        if not matches(answer[0], counts):
            return "the bitmap is another one. How many ranks used each layer?"
        return matches(answer[1], {number for number, count in enumerate(counts) if count == 0})

    def solution() -> tuple[list[int], list[int]]:
        return [2, 1, 1, 0], [3]

    return Exercise(
        judge=is_bitmap,
        hints=(
            "the bitmap is right; look for the layers that no rank used, and count the layers from 0",
            "each rank contributes a one for each layer that it used, and the all-reduce adds up the ones",
            "a gradient changes if at least one rank used its layer",
        ),
        explanation="the unused layer keeps its gradient; the second and third layers get averages with zeros",
        solution=solution,
        wrong=lambda: [([1, 1, 1, 0], [3]), ([2, 1, 1, 0], [4]), ([2, 1, 1, 0], []), (2, 3)],
    )


def divisor(pool: RankPool) -> Exercise:
    """Choose the divisor of each part's loss, for a batch in 8 parts on two ranks."""

    def gives_whole_batch(answer: Any) -> bool:
        accumulated, _ = pool.run(unused.accumulate, 8, float(answer), True)[0]  # noqa: FBT003
        return torch.allclose(accumulated, pool.run(unused.one_large_batch)[0], atol=1e-5)

    def solution() -> int:
        return 8

    return Exercise(
        judge=gives_whole_batch,
        hints=(
            "the sum is not the whole batch's gradient. The reducer already divides by the number of ranks",
            "a mean over the batch is the mean of the parts' means: how many parts does it divide by?",
        ),
        explanation="divide by the number of parts; the reducer divides by the number of ranks",
        solution=solution,
        wrong=lambda: [16, 2, 1, "all"],
    )
