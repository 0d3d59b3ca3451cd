"""Report: the outcomes of all checks, beside what was expected, as a table, JSON and JUnit."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from reference.files.reading import parse_yaml, read_text
from reference.files.writing import printable, write_atomically

from .check_runner import Result

Expectation = Literal["must-pass", "expected-fail", "skip"]
EXPECTATIONS: tuple[Expectation, ...] = ("must-pass", "expected-fail", "skip")


@dataclass(frozen=True)
class Report:
    """Outcomes of all checks of a subject.

    Attributes:
        subject: Name of the class.
        results: One for each check that ran.
        expected: By check, what was expected; `must-pass` refuses "not supported" too.
    """

    subject: str
    results: tuple[Result, ...]
    expected: Mapping[str, Expectation]

    @property
    def problems(self) -> list[str]:
        """What is not as expected, one sentence each, the first cause first; empty if the class conforms."""
        if not any(result.outcome in ("passed", "failed") for result in self.results):
            return ["no check ran; a run without a check is no proof"]
        sentences = []
        for result in self.results:
            expected = self.expected.get(result.check)
            if result.outcome == "failed" and expected != "expected-fail":
                sentences.append(f"{result.check}: {result.message}")
            elif result.outcome == "passed" and expected == "expected-fail":
                sentences.append(f"{result.check}: passed, but was expected to fail; remove it from the file")
            elif result.outcome == "not supported" and expected == "must-pass":
                sentences.append(f"{result.check}: must pass, but is not supported: {result.message}")
            elif result.outcome == "left out" and expected == "must-pass":
                sentences.append(f"{result.check}: must pass, but was left out: {result.message}")
        return sentences

    def to_json(self) -> dict[str, Any]:
        """Return all outcomes."""
        return {
            "subject": self.subject,
            "conforms": not self.problems,
            "problems": self.problems,
            "checks": [
                {
                    "check": result.check,
                    "outcome": result.outcome,
                    "message": result.message,
                    "expected": self.expected.get(result.check),
                    "program": None if result.program is None else repr(result.program),
                }
                for result in self.results
            ],
        }

    def save_json(self, path: Path) -> None:
        """Write `to_json`."""
        write_atomically(path, (json.dumps(self.to_json(), indent=1) + "\n").encode())

    def save_junit(self, path: Path) -> None:
        """Write as JUnit XML, which CI servers show: an expected failure counts as skipped."""
        bad = {problem.partition(":")[0] for problem in self.problems}
        skipped = [one for one in self.results if one.check not in bad and one.outcome != "passed"]
        suite = ElementTree.Element(
            "testsuite",
            name=f"conformance of {self.subject}",
            tests=str(len(self.results)),
            failures=str(len(bad)),
            skipped=str(len(skipped)),
        )
        for result in self.results:
            case = ElementTree.SubElement(suite, "testcase", classname=self.subject, name=result.check)
            if result.check in bad:
                ElementTree.SubElement(case, "failure", message=result.message or result.outcome).text = repr(
                    result.program
                )
            elif result.outcome != "passed":
                ElementTree.SubElement(case, "skipped", message=f"{result.outcome}: {result.message}")
        for element in suite.iter():
            element.attrib = {key: printable(value) for key, value in element.attrib.items()}
        ElementTree.indent(suite)
        write_atomically(path, ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True) + b"\n")


def read_expectations(path: Path, checks: Sequence[str]) -> dict[str, Expectation]:
    """Read a YAML file with the three lists `must-pass`, `expected-fail` and `skip` of names of checks.

    Raises:
        ValueError: The file is missing or malformed, or names an unknown check.
    """
    text = read_text(path)
    try:
        document = parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path}: expected YAML: {error}") from None
    if not isinstance(document, dict) or not all(isinstance(one, list) for one in document.values()):
        raise ValueError(f"{path}: expected the lists {', '.join(EXPECTATIONS)}, got {type(document).__name__}")
    found: dict[str, Expectation] = {}
    for key, names in document.items():
        kind = next((one for one in EXPECTATIONS if one == key), None)
        if kind is None:
            raise ValueError(f"{path}: expected the lists {', '.join(EXPECTATIONS)}, got one named {key!r}")
        for name in names:
            if name not in checks:
                raise ValueError(f"{path}: {kind}: expected one of {', '.join(checks)}; got {name!r}")
            if name in found:
                raise ValueError(f"{path}: {name} is in two lists: {found[name]} and {kind}")
            found[name] = kind
    return found


def write_script(path: Path, subject: str, world_size: int, result: Result) -> None:
    """Write a script that shows a fault without Hypothesis; the message is in its docstring, whatever it contains."""
    lines = "\n".join(repr(line)[1:-1] for line in result.message.split("\n"))
    message = lines.replace('"""', r"\"\"\"")
    script = f'''"""{subject} fails the check "{result.check}".

{message}
"""

from pathlib import Path
from tempfile import gettempdir

from ddplab.conformance.check_runner import QUICK, Bench
from ddplab.conformance.training_programs import Program, Step, Weight
from ddplab.conformance.class_under_test import Subject
from reference.launch import RankPool

PROGRAM = {result.program!r}

if __name__ == "__main__":
    with RankPool({world_size}) as pool:
        Bench(Subject({subject!r}), pool, QUICK, scratch=Path(gettempdir())).try_program(PROGRAM)
'''
    write_atomically(path, script.encode())
