"""Exercises of the tutorials: checks of a learner's answers, with hints and solutions.

`...` stands for an answer that the learner has not given yet. The exercises themselves, with their
solutions, are in `tutorials/answers/`, so that no page shows a solution before the learner asks for it.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isclose
from numbers import Real
from textwrap import dedent
from typing import Any

from ddplab.learn.rungs import TO_WRITE

NOT_ATTEMPTED = "not attempted"
RIGHT = "right"
NOT_YET = "not yet"


def is_open(answer: object) -> bool:
    """Whether the answer, or some part of it, is still `...`, or code that still contains `TO_WRITE`."""
    if inspect.isfunction(answer) or inspect.isclass(answer):
        return TO_WRITE in _source(answer)
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


def _source(code: Any) -> str:
    """Source of a function or class; empty if there is none, as for built-in functions."""
    try:
        return dedent(inspect.getsource(code))
    except (OSError, TypeError):
        return ""


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """One exercise: its check, hints and solution.

    Attributes:
        judge: Returns whether an answer is right. For a wrong one it may return a sentence about this answer, which
            is printed in place of the first hint.
        hints: Sentences for a wrong answer, from a nudge to nearly all of it. None may contain the right answer.
        explanation: Why the right answer is right, or a function that returns this sentence for the answer given.
        solution: Returns a right answer; a function whose header is one line.
        wrong: Returns wrong answers, with which `verify` tests the judge.
        code: Function or class whose source is the solution. None: `solution` computes the answer.
    """

    judge: Callable[[Any], bool | str]
    hints: tuple[str, ...]
    explanation: str | Callable[[Any], str]
    solution: Callable[[], Any]
    wrong: Callable[[], Sequence[object]] = tuple
    code: Any = None

    def check(self, answer: object, *, hints: int = 1) -> None:
        """Print whether the answer is not attempted, right or wrong, with this number of hints; never raises."""
        print(self.verdict(answer, hints=hints))

    def verdict(self, answer: object, *, hints: int = 1) -> str:
        """Return the sentences that `check` prints."""
        if is_open(answer):
            return NOT_ATTEMPTED
        try:
            judged = self.judge(answer)
        except Exception as error:  # noqa: BLE001  # the answer may be anything, and a traceback does not help
            message = str(getattr(error, "cause", error)).partition("\n")[0].rstrip(".")
            judged = f"the check raised {type(error).__name__} ({message}). Hint: {self.hints[0]}"
        if isinstance(judged, str) or not judged:
            return "\n".join([f"{NOT_YET}: {judged or self.hints[0]}", *self._further(hints)])
        return f"{RIGHT}: {self.explanation(answer) if callable(self.explanation) else self.explanation}"

    def _further(self, hints: int) -> list[str]:
        shown = [f"hint {number}: {hint}" for number, hint in enumerate(self.hints[1:hints], start=2)]
        return [*shown, f"(`hints={hints + 1}` gives another hint)"] if hints < len(self.hints) else shown

    def show_solution(self) -> None:
        """Print the source of the solution, and its value if the answer is a value."""
        if self.code is not None:
            print(_source(self.code))
            return
        _, _, body = _source(self.solution).partition("\n")
        print(f"{dedent(body)}# {shown(self.solution())}")

    def verify(self) -> None:
        """Raise AssertionError unless the solution is right and each of the wrong answers gets hints without it."""
        solution = self.solution()
        verdict = self.verdict(solution)
        assert verdict.startswith(RIGHT), f"{solution!r}: {verdict}"
        for answer in self.wrong():
            verdict = self.verdict(answer, hints=len(self.hints))
            assert verdict.startswith(NOT_YET), f"{answer!r}: {verdict}"
            assert not re.search(rf"(?<!\w){re.escape(str(solution))}(?!\w)", verdict), f"leaks the answer: {verdict}"


def shown(value: object) -> str:
    """Numbers rounded to three digits, all digits of a whole part; other values as they are."""
    value = _plain(value)
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    if isinstance(value, float) and abs(value) < 100:
        return f"{value:.3g}"
    return f"{value:.0f}" if isinstance(value, float) else str(value)
