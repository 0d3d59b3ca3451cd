"""Exercises and guesses of the tutorials: checks of a learner's answers, and guesses beside measured values.

`...` stands for an answer or a guess that the learner has not given yet.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isclose
from numbers import Real
from typing import Any

NOT_ATTEMPTED = "not attempted"
RIGHT = "right"
NOT_YET = "not yet"


def is_open(answer: object) -> bool:
    """Whether the answer, or some part of it, is still `...`."""
    if isinstance(answer, Mapping):
        return any(map(is_open, chain(answer, answer.values())))
    if isinstance(answer, list | tuple | set | frozenset):
        return any(map(is_open, answer))
    return answer is ...


def matches(answer: object, truth: object, *, tolerance: float = 1e-6) -> bool:
    """Whether an answer equals the truth, compared as the type of the truth requires.

    Args:
        answer: The learner's answer, of any type.
        truth: A number (compared with a tolerance), a word (upper or lower case), a list or tuple (part by part, in
            order), a set (the parts in any order, repeats ignored), or anything else that has `==`.
        tolerance: Relative error at which two numbers are still equal.
    """
    if isinstance(truth, str):
        return isinstance(answer, str) and answer.strip().casefold() == truth.casefold()
    if isinstance(truth, set | frozenset):
        parts = _parts(answer)
        return parts is not None and _covers(parts, truth, tolerance) and _covers(truth, parts, tolerance)
    if isinstance(truth, list | tuple):
        parts = _parts(answer)
        return (
            parts is not None
            and len(parts) == len(truth)
            and all(matches(one, other, tolerance=tolerance) for one, other in zip(parts, truth, strict=True))
        )
    answer = _plain(answer)
    if isinstance(truth, bool) or isinstance(answer, bool):
        return answer is truth
    if isinstance(truth, Real) and isinstance(answer, Real):
        return isclose(float(answer), float(truth), rel_tol=tolerance, abs_tol=1e-12)
    return bool(answer == truth)


def _parts(answer: object) -> list[Any] | None:
    """Parts of a list, tuple, set, array or tensor; None for anything else."""
    answer = _plain(answer)
    return list(answer) if isinstance(answer, list | tuple | set | frozenset) else None


def _plain(answer: object) -> object:
    """Turn numbers and arrays of numpy and torch into numbers and lists of Python."""
    to_list = getattr(answer, "tolist", None)
    return to_list() if callable(to_list) else answer


def _covers(some: Any, others: Any, tolerance: float) -> bool:
    """Whether each of the others matches one of some."""
    return all(any(matches(one, other, tolerance=tolerance) for one in some) for other in others)


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """The check of one exercise.

    Attributes:
        judge: Returns whether an answer is right. For a wrong one it may return a sentence about this answer, which
            is printed in place of `hint`.
        hint: Sentence for a wrong answer. Must not contain the right one.
        explanation: Why the right answer is right, or a function that returns this sentence for the answer given.
    """

    judge: Callable[[Any], bool | str]
    hint: str
    explanation: str | Callable[[Any], str]

    def check(self, answer: object) -> None:
        """Print whether the answer is not attempted, right, or wrong; never raises."""
        print(self.verdict(answer))

    def verdict(self, answer: object) -> str:
        """Return the sentence that `check` prints."""
        if is_open(answer):
            return NOT_ATTEMPTED
        try:
            judged = self.judge(answer)
        except Exception as error:  # noqa: BLE001  # the answer may be anything, and a traceback does not help
            return f"{NOT_YET}: the check raised {type(error).__name__} on this answer. Hint: {self.hint}"
        if isinstance(judged, str) or not judged:
            return f"{NOT_YET}: {judged or self.hint}"
        return f"{RIGHT}: {self.explanation(answer) if callable(self.explanation) else self.explanation}"

    def verify(self, solution: object, *, wrong: Sequence[object]) -> None:
        """Raise AssertionError unless the solution is right and each of the wrong answers gets a hint without it."""
        verdict = self.verdict(solution)
        assert verdict.startswith(RIGHT), f"{solution!r}: {verdict}"
        for answer in wrong:
            verdict = self.verdict(answer)
            assert verdict.startswith(NOT_YET), f"{answer!r}: {verdict}"
            assert not re.search(rf"(?<!\w){re.escape(str(solution))}(?!\w)", verdict), f"leaks the answer: {verdict}"


def compare_guesses(guesses: Mapping[str, object], measured: Sequence[object]) -> None:
    """Print each guess beside the value that the notebook computed.

    Args:
        guesses: By question; `...` if the learner recorded none.
        measured: The values, in the order of the questions.
    """
    for (question, guess), value in zip(guesses.items(), measured, strict=True):
        print(f"{question}: {_compared(guess, value)}")


def _compared(guess: object, value: object) -> str:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    result = f"measured {_shown(value)}" if is_number else f"the answer is {_shown(value)}"
    if is_open(guess):
        return f"no guess recorded, {result}"
    return f"you guessed {_shown(guess)}, {result}"


def _shown(value: object) -> str:
    """Numbers rounded to three digits, all digits of a whole part; other values as they are."""
    value = _plain(value)
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)
