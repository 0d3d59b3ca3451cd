"""Grades of a course: points by rung, as JSON, and as JUnit XML for an autograder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from reference.files.writing import printable, write_atomically

from .judge import Judge, Judgement
from .learner_file import LearnerClass
from .rungs import RUNGS


def grade(judge: Judge, subject: LearnerClass) -> list[Judgement]:
    """Judge every rung, also those after one that is not passed."""
    return [judge.verdict(subject, number) for number in range(1, len(RUNGS) + 1)]


def to_json(subject: LearnerClass, verdicts: Sequence[Judgement]) -> dict[str, Any]:
    """Return the points, one for each rung."""
    rows = [
        {
            "rung": one.rung,
            "title": RUNGS[one.rung - 1].title,
            "points": int(one.passed),
            "possible": 1,
            "check": one.check,
            "message": one.message,
            "likely": one.likely,
            "seconds": round(one.seconds, 3),
        }
        for one in verdicts
    ]
    return {
        "subject": subject.name,
        "points": sum(one.passed for one in verdicts),
        "possible": len(verdicts),
        "rungs": rows,
    }


def write_junit(path: Path, subject: LearnerClass, verdicts: Sequence[Judgement]) -> None:
    """Write the verdicts as JUnit XML, one test case for each rung."""
    failures = [one for one in verdicts if not one.passed]
    counts = {"tests": str(len(verdicts)), "failures": str(len(failures)), "errors": "0", "skipped": "0"}
    suite = ElementTree.Element("testsuite", {"name": f"ladder of {subject.name}"} | counts)
    for one in verdicts:
        title = f"{one.rung:02}. {RUNGS[one.rung - 1].title}"
        attributes = {"classname": subject.name, "name": title, "time": f"{one.seconds:.3f}"}
        case = ElementTree.SubElement(suite, "testcase", attributes)
        if not one.passed:
            message = printable(f"{one.check}: {one.message}")
            ElementTree.SubElement(case, "failure", message=message).text = printable(one.likely or one.message)
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    write_atomically(path, ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True) + b"\n")
