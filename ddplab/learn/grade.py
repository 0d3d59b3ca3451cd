"""Grades of a course: points by rung, as JSON, and as JUnit XML for an autograder."""

from pathlib import Path
from typing import Any

from ..junit import TestCase, write_junit
from .judge import Judge
from .learner_file import LearnerClass
from .rungs import RUNGS


def grades(judge: Judge, subject: LearnerClass, junit: Path | None = None) -> dict[str, Any]:
    """Judge every rung, also those after one that is not passed; return the points, one for each rung.

    The file `junit` gets JUnit XML with a test case for each rung.
    """
    rows, cases = [], []
    for number, rung in enumerate(RUNGS, start=1):
        one = judge.verdict(subject, number)
        failure = "" if one.passed else f"{one.check}: {one.message}"
        cases.append(TestCase(f"{number:02}. {rung.title}", one.seconds, failure, details=one.likely or one.message))
        points = {"title": rung.title, "points": int(one.passed), "possible": 1, "seconds": round(one.seconds, 3)}
        rows.append(vars(one) | points)
    if junit is not None:
        write_junit(junit, f"ladder of {subject.name}", subject.name, cases)
    points = sum(row["points"] for row in rows)
    return {"subject": subject.name, "points": points, "possible": len(rows), "rungs": rows}
