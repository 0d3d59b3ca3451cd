"""Grades of a course: points by rung, as JSON, and as JUnit XML for an autograder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..junit import TestCase, write_junit
from .judge import Judge, Judgement
from .learner_file import LearnerClass
from .rungs import RUNGS


def grade(judge: Judge, subject: LearnerClass) -> list[Judgement]:
    """Judge every rung, also those after one that is not passed."""
    return [judge.verdict(subject, number) for number in range(1, len(RUNGS) + 1)]


def to_json(subject: LearnerClass, verdicts: Sequence[Judgement]) -> dict[str, Any]:
    """Return the points, one for each rung."""
    rows = [
        vars(one)
        | {"title": RUNGS[one.rung - 1].title, "points": int(one.passed), "possible": 1}
        | {"seconds": round(one.seconds, 3)}
        for one in verdicts
    ]
    return {
        "subject": subject.name,
        "points": sum(one.passed for one in verdicts),
        "possible": len(verdicts),
        "rungs": rows,
    }


def write_grade(path: Path, subject: LearnerClass, verdicts: Sequence[Judgement]) -> None:
    """Write the verdicts as JUnit XML, one test case for each rung."""
    cases = [
        TestCase(
            f"{one.rung:02}. {RUNGS[one.rung - 1].title}",
            one.seconds,
            failure="" if one.passed else f"{one.check}: {one.message}",
            details=one.likely or one.message,
        )
        for one in verdicts
    ]
    write_junit(path, f"ladder of {subject.name}", subject.name, cases)
