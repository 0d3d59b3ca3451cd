"""Exercises of tutorial 5."""

from collections.abc import Callable, Sequence

from ddplab.conformance.check_outcomes import CheckResult

from ..exercises import Exercise, matches

Fault = tuple[str, str]
"""A piece of the source, and the piece in its place."""


def faulty_piece() -> Exercise:
    """Name the faulty piece of the sixth class."""

    def solution() -> str:
        return "copy out"

    return Exercise(
        judge=lambda piece: matches(piece, solution()),
        hints=(
            "subtract the average from the gradient after the backward pass. Which column remains?",
            "the average itself is right on every rank, so it was launched, divided and waited for",
        ),
        explanation="the average is added to the rank's own gradient instead of replacing it",
        solution=solution,
        wrong=lambda: ["average", "launch", "wait", 6],
    )


def hidden_fault(
    known: Sequence[Fault], loss_above: Callable[[Fault], float], failed: Callable[[Fault], Sequence[CheckResult]]
) -> Exercise:
    """Plant a fault that the loss hides and the kit finds.

    Args:
        known: Faults that do not count; the first one replaces the division.
        loss_above: Loss of a class with this fault, as a fraction above the loss without one.
        failed: The checks that fail.
    """

    def judge(fault: Fault) -> bool | str:
        if fault in known:
            return "this fault is one of ours"
        shown = loss_above(fault)
        if not shown <= 0.05:
            return f"the loss at the end is {shown:.0%} higher"
        return bool(failed(fault)) or "all checks passed"

    def solution() -> Fault:
        divide = known[0][0]
        return divide, f"{divide} - 0.01"

    return Exercise(
        judge=judge,
        hints=(
            "answer with a piece of the source that is there once, and another piece",
            "a gradient that is a little wrong in the same way on every rank still trains",
            "change the divisor by a percent",
        ),
        explanation="the loss hides it, and the kit finds it",
        solution=solution,
        wrong=lambda: [
            ("not there", ""),
            ("work.wait()", "work.wait()"),
            (known[0][0], "flat *= float('nan')"),
            known[1],
            7,
        ],
    )
