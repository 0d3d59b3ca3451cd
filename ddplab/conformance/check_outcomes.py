"""Outcomes of checks beside what was expected of them, the report on a class, and a script that shows a fault."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import TypeAdapter

from ..junit import TestCase
from ..reference.errors import RanksUnmatchedError
from ..reference.files.reading import one_line_errors, parse_yaml, read_text
from ..reference.files.writing import write_atomically
from .training_programs import Program

if TYPE_CHECKING:
    from .timing_and_overlap import EmulatedSchedule

Outcome = Literal["passed", "failed", "not supported", "left out"]
Expectation = Literal["must-pass", "expected-fail", "skip"]
PLAIN = (
    *("any timing", "one weight", "construction", "bucket caps", "special parameters", "optimizers"),
    *("kept gradients", "real models"),
)
"""Checks of averaging without any option. If ranks do not match in one of them, they do not in most others."""
STILL_TELLING = ("overlap", "one weight", "construction")
"""Checks that can pass although ranks launch collectives in different orders: a single collective, or one order."""
MOST_UNMATCHED = 2
"""Number of checks in which ranks may hang or be lost, which takes seconds each, before all others are left out."""


@dataclass(frozen=True)
class CheckResult:
    """Outcome of a check.

    Attributes:
        message: What was found, why the check does not apply or was left out, or how the class passed.
        program: The program that shows the fault. None: there is none.
        expected: What was expected; `must-pass` refuses "not supported" too. None: anything but a failure.
        unmatched: Whether the check failed because the ranks launched different collectives, hung, or one was lost.
    """

    check: str
    outcome: Outcome
    message: str = ""
    program: Program | None = None
    expected: Expectation | None = None
    unmatched: bool = False
    seconds: float = 0.0

    @property
    def problem(self) -> str:
        """What is not as expected, in one sentence; empty if nothing is."""
        if self.outcome == "passed":
            wrong = "passed, but was expected to fail; remove it from the file"
            return f"{self.check}: {wrong}" if self.expected == "expected-fail" else ""
        if self.outcome == "failed":
            return "" if self.expected == "expected-fail" else f"{self.check}: {self.message}"
        verb = "was" if self.outcome == "left out" else "is"
        wrong = f"must pass, but {verb} {self.outcome}: {self.message}"
        return f"{self.check}: {wrong}" if self.expected == "must-pass" else ""

    def to_json(self) -> dict[str, Any]:
        """Return the outcome; the program as text."""
        shown = {name: value for name, value in vars(self).items() if name not in ("unmatched", "seconds")}
        return shown | {"program": None if self.program is None else repr(self.program)}

    def test_case(self) -> TestCase:
        """Return the outcome for JUnit XML; what is neither a problem nor passed was skipped."""
        skipped = "" if self.outcome == "passed" or self.problem else f"{self.outcome}: {self.message}"
        details = "" if self.program is None else repr(self.program)
        return TestCase(self.check, self.seconds, self.problem, skipped, details)


@dataclass(kw_only=True)
class ConformanceReport:
    """Whether a class conforms, after its checks.

    Attributes:
        ended: Why no check ran, or not all; empty if all ran, or up to the first problem.
        schedules: What the class does in virtual time; empty if the check `overlap` did not find out.
        needs_schedules: Whether their absence is a problem.
    """

    subject: str
    needs_schedules: bool
    ended: str = ""
    results: list[CheckResult] = field(default_factory=list)
    schedules: list["EmulatedSchedule"] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """All that is not as expected, one sentence each."""
        found = [result.problem for result in self.results if result.problem]
        if self.ended:
            return [*found, self.ended]
        if all(result.outcome not in ("passed", "failed") for result in self.results):
            found = ["no check ran; a run without a check is no proof"]
        if self.needs_schedules and not self.schedules:
            found.append("--save-schedule: no schedule, because the class did not run in virtual time")
        return found

    def __str__(self) -> str:
        counts, problems = Counter(result.outcome for result in self.results), self.problems
        if not problems:
            failed = f"{counts['failed']} failed as expected, " if counts["failed"] else ""
            passed = f"{self.subject} conforms: {counts['passed']} passed"
            return f"{passed}, {failed}{counts['not supported']} not supported"
        rest = f", {counts['left out']} checks left out" if counts["left out"] else ""
        wrong = f"{self.subject} does not conform"
        if len(problems) == 1:
            return f"{wrong}: 1 problem{rest}"
        first = f"the first, and perhaps the cause of the others, is {problems[0]}"
        return f"{wrong}: {len(problems)} problems{rest}; {first}"

    def test_cases(self) -> list[TestCase]:
        """Return the outcomes for JUnit XML; what does not belong to a check is a further test case."""
        own = [result.problem for result in self.results]
        others = [TestCase("the run", 0.0, problem) for problem in self.problems if problem not in own]
        return [*(result.test_case() for result in self.results), *others]

    def to_json(self) -> dict[str, Any]:
        """Return the report with outcomes and schedules."""
        return {
            "subject": self.subject,
            "conforms": not self.problems,
            "problems": self.problems,
            "checks": [result.to_json() for result in self.results],
            **({"schedules": [schedule.row() for schedule in self.schedules]} if self.schedules else {}),
        }


def is_unmatched(fault: BaseException) -> bool:
    """Return whether an error, or one that caused it, is of ranks that did not match, hung or were lost."""
    cause = fault.__cause__
    return isinstance(fault, RanksUnmatchedError) or (cause is not None and is_unmatched(cause))


def why_left_out(check: str, results: Sequence[CheckResult]) -> str:
    """Return why a check is left out after the results of others; empty if it runs.

    Where ranks launch different collectives, nearly every program ends in a hang, and says nothing new.
    """
    unmatched = [result.check for result in results if result.unmatched and result.problem]
    if len(unmatched) >= MOST_UNMATCHED:
        return f"the ranks did not match in {' and '.join(unmatched)}"
    if unmatched and unmatched[0] in PLAIN and check not in STILL_TELLING:
        return f"the ranks did not match in {unmatched[0]}, which needs no option"
    return ""


def read_expectations(path: Path, checks: Sequence[str]) -> dict[str, Expectation]:
    """Read a YAML file with the three lists `must-pass`, `expected-fail` and `skip` of names of checks.

    Raises:
        ValueError: The file is missing or malformed, or names an unknown check.
    """
    text, found = read_text(path), dict[str, Expectation]()
    try:
        with one_line_errors():
            lists = TypeAdapter(dict[Expectation, list[str]]).validate_python(parse_yaml(text))
    except ValueError as error:
        raise ValueError(f"{path}: expected the lists {', '.join(get_args(Expectation))}: {error}") from None
    for kind, names in lists.items():
        for name in names:
            if name not in checks:
                raise ValueError(f"{path}: {kind}: expected one of {', '.join(checks)}; got {name!r}")
            if name in found:
                raise ValueError(f"{path}: {name} is in two lists: {found[name]} and {kind}")
            found[name] = kind
    return found


def write_script(path: Path, subject: str, world_size: int, result: CheckResult) -> None:
    """Write a script that shows a fault without Hypothesis."""
    script = f'''"""A program that fails a check of `ddplab conform`, without random choices."""

from ddplab.conformance.check_runner import QUICK, Bench
from ddplab.conformance.training_programs import Program, ProgramStep, Weight
from ddplab.conformance.class_under_test import Subject
from ddplab.reference.launch import RankPool

SUBJECT, CHECK = {subject!r}, {result.check!r}
MESSAGE = {result.message!r}
PROGRAM = {result.program!r}

if __name__ == "__main__":
    with RankPool({world_size}) as pool:
        Bench(Subject(SUBJECT), pool, QUICK).try_program(PROGRAM)
'''
    write_atomically(path, script.encode())
