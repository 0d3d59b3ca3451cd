"""Outcomes of checks beside what was expected of them, the report on a class, and a script that shows a fault."""

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from pydantic import TypeAdapter

from .. import __version__
from ..junit import TestCase
from ..reference.errors import RanksUnmatchedError
from ..reference.files.reading import one_line_errors, parse_yaml, read_text
from ..reference.files.writing import printable, write_atomically
from .training_programs import Program

if TYPE_CHECKING:
    from .timing_and_overlap import EmulatedSchedule

Outcome = Literal["passed", "failed", "not supported", "left out"]
Expectation = Literal["must-pass", "expected-fail", "skip"]
Level = Literal["must", "should", "speed"]
"""Of a check: averages are right and no rank crashes or hangs; more than most classes promise; no time is lost."""
SHOULD = (
    *("a backward pass that raises", "first pass of a static graph", "gradients that nothing waits for"),
    *("bucket layout", "half-precision sums", "missing sparse gradients", "gradients of another dtype"),
    *("peak memory", "compiled modules"),
)
SEEDED = " with seed "
"""Stands in the name of a check that is run again, before the seed."""
SPEED = ("overlap", "baseline")
"""Checks of the other two levels; all the others must pass."""
PLAIN = (
    *("any timing", "one weight", "construction", "bucket caps", "special parameters", "optimizers"),
    *("kept gradients", "real models"),
)
"""Checks of averaging without any option. If ranks do not match in one of them, they do not in most others."""
STILL_TELLING = ("overlap", "one weight", "construction")
"""Checks that can pass although ranks launch collectives in different orders: a single collective, or one order."""
MOST_UNMATCHED = 2
"""Number of checks in which ranks may hang or be lost, which takes seconds each, before all others are left out."""


def level_of(check: str) -> Level:
    """Return the level of a check."""
    return "should" if check in SHOULD else "speed" if check in SPEED else "must"


@dataclass(frozen=True)
class CheckResult:
    """Outcome of a check."""

    check: str
    outcome: Outcome
    message: str = ""  #: what was found, why the check does not apply or was left out, or how the class passed
    program: Program | None = None  #: the program that shows the fault; None: there is none
    expected: Expectation | None = None
    """What was expected; `must-pass` refuses "not supported" too. None: anything but a failure."""
    unmatched: bool = False
    """Whether the check failed because the ranks launched different collectives, hung, or one was lost."""
    seconds: float = 0.0
    level: Level = "must"  #: that of the check, or a milder one of what was found
    decides: bool = True  #: whether a failure is a problem even if nothing was expected: the level is asked for

    @property
    def problem(self) -> str:
        """What is not as expected, in one sentence; empty if nothing is."""
        if self.outcome == "passed":
            wrong = "passed, but was expected to fail; remove it from the file"
            return f"{self.check}: {wrong}" if self.expected == "expected-fail" else ""
        if self.outcome == "failed":
            is_fault = self.expected == "must-pass" or (self.decides and self.expected is None)
            return f"{self.check}: {self.message}" if is_fault else ""
        wrong = f"must pass, but {'was' if self.outcome == 'left out' else 'is'} {self.outcome}: {self.message}"
        return f"{self.check}: {wrong}" if self.expected == "must-pass" else ""

    def to_json(self) -> dict[str, Any]:
        """Return the outcome; the program as text."""
        shown = {name: value for name, value in vars(self).items() if name not in ("unmatched", "decides")}
        program = None if self.program is None else repr(self.program)
        return shown | {"seconds": round(self.seconds, 3), "program": program}

    def test_case(self) -> TestCase:
        """Return the outcome for JUnit XML; what is neither a problem nor passed was skipped."""
        skipped = "" if self.outcome == "passed" or self.problem else f"{self.outcome}: {self.message}"
        details = "" if self.program is None else repr(self.program)
        return TestCase(self.check, self.seconds, self.problem, skipped, details)


class UnjudgedError(ValueError):
    """A class could not be judged."""

    exit_status = 2


@dataclass(kw_only=True)
class ConformanceReport:
    """Whether a class conforms, after its checks."""

    subject: str
    needs_schedules: bool  #: whether the absence of `schedules` is a problem
    level: Level = "must"  #: the last level whose checks decide whether the class conforms
    asked: str = ""  #: of how many checks, if not all were asked for, as ` in 2 of 48 checks`
    seed: int = 0  #: of the random programs
    tolerance: float = 0.0  #: of averages
    ended: str = ""  #: why no check ran, or not all; empty if all ran, or up to the first problem
    results: list[CheckResult] = field(default_factory=list)
    schedules: list["EmulatedSchedule"] = field(default_factory=list)
    """What the class does in virtual time; empty if the check `overlap` did not find out."""

    @property
    def problems(self) -> list[str]:
        """All that is not as expected, one sentence each."""
        found = [result.problem for result in self.results if result.problem]
        if self.ended:
            return [*found, self.ended]
        if not self._is_decided:
            found = ["no check that decides ran; a run without one is no proof"]
        if self.needs_schedules and not self.schedules:
            found.append("--save-schedule: no schedule, because the class did not run in virtual time")
        return found

    @property
    def is_judged(self) -> bool:
        """Whether enough was seen to say that the class conforms, or that it does not."""
        return self._is_decided and (not self.ended or any(result.problem for result in self.results))

    @property
    def _is_decided(self) -> bool:
        deciding = (one for one in self.results if one.decides or one.expected)
        return any(one.problem or one.outcome in ("passed", "failed") for one in deciding)

    def __str__(self) -> str:
        """Return the last line: all outcomes, also those that do not decide."""
        problems, counts = self.problems, Counter(map(self._counted, self.results))
        others = "".join(f", {number} {outcome}" for outcome, number in sorted(counts.items()) if outcome != "passed")
        within = f" within {self.tolerance:g}" if self.tolerance else ""
        if not problems:
            conforms = f"{self.subject} conforms{self.asked}{within} at level {self.level}"
            return f"{conforms}: {counts['passed']} passed{others}"
        left_out = f", {gone} check{'s' * (gone > 1)} left out" if (gone := counts["left out"]) else ""
        wrong = f"{self.subject} {'does not conform' if self.is_judged else 'could not be judged'}"
        of_many = "the first, and perhaps the cause of the others, is " if len(problems) > 1 else ""
        if not of_many and any(one.problem for one in self.results if one.outcome == "failed"):  # the line before
            return f"{wrong}: 1 problem{left_out}"
        told, _, further = problems[0].partition("\n")
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        return f"{wrong}: {count}{left_out}; {of_many}{told}{' ...' if further else ''}"

    @staticmethod
    def _counted(result: CheckResult) -> str:
        if result.outcome != "failed" or result.problem:
            return result.outcome
        return "failed as expected" if result.expected else f"failed at level {result.level}"

    def test_cases(self) -> list[TestCase]:
        """Return the outcomes for JUnit XML; what does not belong to a check is a further test case."""
        own = [result.problem for result in self.results]
        others = [TestCase("the run", 0.0, problem) for problem in self.problems if problem not in own]
        return [*(result.test_case() for result in self.results), *others]

    def to_json(self) -> dict[str, Any]:
        """Return the report with outcomes and schedules."""
        return {
            "subject": self.subject,
            "conforms": None if self.problems and not self.is_judged else not self.problems,
            **self.about(),
            "problems": self.problems,
            "checks": [result.to_json() for result in self.results],
            **({"schedules": [schedule.row() for schedule in self.schedules]} if self.schedules else {}),
        }

    def about(self) -> dict[str, Any]:
        """Return what the outcomes depend on."""
        versions = {"ddplab": __version__, "torch": torch.__version__, "python": platform.python_version()}
        return {"level": self.level, "seed": self.seed, "tolerance": self.tolerance, "versions": versions}

    def to_expectations(self) -> str:
        """Return the outcomes as a file for `read_expectations`, so that a check that changes its outcome is seen."""
        lines = [f"# {self}".replace("\n", " "), f"class: {self.subject}"]
        for expectation, outcome in (("must-pass", "passed"), ("expected-fail", "failed")):
            own = (one.check for one in self.results if one.outcome == outcome and one.check != "baseline")
            names = [name for name in own if SEEDED not in name]  # --baseline itself must pass
            lines.append(f"{expectation}: [{', '.join(names)}]")
        return "\n".join(lines) + "\n"

    def tell_github(self) -> None:
        """In a workflow of GitHub, print the problems as annotations, and add the outcomes to the step's summary."""
        if os.environ.get("GITHUB_ACTIONS") != "true":
            return
        for problem in self.problems:
            print("::error title=ddplab conform::" + printable(problem).replace("%", "%25").replace("\n", "%0A"))
        if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
            rows = [("outcome", "level", "check", "message"), ("---",) * 4]
            rows += [(one.outcome, one.level, one.check, one.message.partition("\n")[0]) for one in self.results]
            lines = [" | ".join(printable(cell).replace("|", "\\|") for cell in row) for row in rows]
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write("\n".join([printable(str(self)), "", *(f"| {line} |" for line in lines), "\n"]))


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


def read_expectations(path: Path, checks: Sequence[str], subject: str) -> dict[str, Expectation]:
    """Read a YAML file with the three lists `must-pass`, `expected-fail` and `skip` of names of checks.

    Raises ValueError if the file is missing or malformed, names an unknown check, or names another `class`.
    """
    text, found = read_text(path), dict[str, Expectation]()
    try:
        given = parse_yaml(text)
        named = given.pop("class", subject) if isinstance(given, dict) else subject
        with one_line_errors():
            lists = TypeAdapter(dict[Expectation, list[str]]).validate_python(given)
    except ValueError as error:
        raise ValueError(f"{path}: expected the lists {', '.join(get_args(Expectation))}: {error}") from None
    if named != subject:
        raise ValueError(f"{path}: class: expected {subject}, got {named!r}; write a file with --save-expect")
    for kind, names in lists.items():
        for name in names:
            if name not in checks:
                raise ValueError(f"{path}: {kind}: expected one of {', '.join(checks)}; got {name!r}")
            if name in found:
                raise ValueError(f"{path}: {name} is in two lists: {found[name]} and {kind}")
            found[name] = kind
    return found


def write_script(path: Path, ranks: Mapping[str, Any], asked: Sequence[Any], result: CheckResult) -> None:
    """Write a script that repeats a failure: the program that shows it, without Hypothesis, or the whole check.

    `ranks` are arguments of `RankPool`, and `asked` those of `bench_on` after the ranks.
    """
    check, _, seed = result.check.partition(SEEDED)
    attempt = "CHECKS[CHECK](bench)"
    if result.program is not None and check != "same as another":
        attempt = "try_timing(bench, PROGRAM)" if check == "any timing" else "bench.try_program(PROGRAM)"
    script = f'''"""Repeats a failure of `ddplab conform`."""

from ddplab.conformance.all_checks import CHECKS
from ddplab.conformance.check_runner import bench_on
from ddplab.conformance.class_under_test import Subject
from ddplab.conformance.timing_and_overlap import try_timing
from ddplab.conformance.training_programs import Program, ProgramStep, Weight
from ddplab.reference.launch import RankPool

CHECK, RANKS = {check!r}, {dict(ranks)!r}
ASKED = {(*asked[:3], int(seed or asked[3]))!r}
MESSAGE = {result.message!r}
PROGRAM = {result.program!r}

if __name__ == "__main__":
    with RankPool(**RANKS) as pool, bench_on(pool, *ASKED) as bench:
        {attempt}
'''
    write_atomically(path, script.encode())
