"""Exercises of tutorial 7, which run the training loop of the notebook."""

from collections.abc import Callable, Sequence

from ..exercises import Exercise, matches
from ..lanes import Lane

Run = Callable[[tuple[int, int]], tuple[Sequence[Lane], Sequence[Sequence[float]], str]]
"""Trains under Join with these batches of each rank; returns lanes and averages by rank, and rank 0's error."""


def shadows(run: Run) -> Exercise:
    """Count the iterations of two ranks with 5 and 2 batches, and those in which rank 1 is a shadow."""

    def counted() -> tuple[int, int]:
        (first, second), _, _ = run((5, 2))
        taken = [len(lane.of("batch")) + len(lane.of("shadow")) for lane in (first, second)]
        assert taken[0] == taken[1]
        return taken[1], len(second.of("shadow"))

    def solution() -> tuple[int, int]:
        return 5, 3

    return Exercise(
        judge=lambda answer: matches(answer, counted()),
        hints=(
            "every rank takes part until the last rank has no batch left; a rank without a batch is a shadow",
            "draw both lanes, as in the picture under *With Join*",
        ),
        explanation="rank 1 shadows each batch that rank 0 has more",
        solution=solution,
        wrong=lambda: [(5, 2), (7, 5), (2, 0), ("five", "three")],
    )


def averages(run: Run) -> Exercise:
    """Compute rank 1's averages with 2 and 3 batches, divided by the number of all ranks."""

    def solution() -> list[float]:
        return [3.0, 3.0, 2.0]

    return Exercise(
        judge=lambda answer: matches(answer, run((2, 3))[1][1]),
        hints=(
            "for each iteration, add what both ranks contribute, then divide. What does rank 0 add to the last?",
            "a shadow contributes zeros, and the number of all ranks does not change",
        ),
        explanation="a rank without a batch contributes zero and still counts",
        solution=solution,
        wrong=lambda: [[3, 3, 4], [3, 3], [2, 2, 2], 3],
    )
