"""The checks of `ddplab conform` as tests: `pytest --pyargs ddplab --ddplab-class MODULE:CLASS`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from reference.errors import RankError
from reference.launch import RankPool

from .conformance.all_checks import CHECKS
from .conformance.check_runner import FULL, QUICK, Bench, Result, first_lines, run_check
from .conformance.conformance_report import Expectation, read_expectations
from .conformance.kit import subjects, why_left_out
from .conformance.overlap import compare, load_baseline, schedules_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each check, or a single error if the options make no sense."""
    if "check" not in metafunc.fixturenames:
        return
    option = metafunc.config.getoption
    name, path, checks = option("--ddplab-class"), option("--ddplab-expect"), list(CHECKS)
    try:
        if name is None:
            raise ValueError("expected --ddplab-class MODULE:CLASS, got no class to check")
        if option("--ddplab-world-size") < 2:
            raise ValueError(f"--ddplab-world-size: expected at least 2, got {option('--ddplab-world-size')}")
        subjects(name, option("--ddplab-against"))
        expected = {} if path is None else read_expectations(path, checks)
    except ValueError as error:
        raise pytest.Collector.CollectError(str(error)) from None
    marks = {
        "expected-fail": [pytest.mark.xfail(reason=f"expected-fail in {path}", strict=True)],
        "skip": [pytest.mark.skip(reason=f"skip in {path}")],
    }
    kinds = {check: expected.get(check) for check in checks}
    cases = [pytest.param(check, kind, id=check, marks=marks.get(str(kind), [])) for check, kind in kinds.items()]
    metafunc.parametrize(("check", "expected"), cases)


@pytest.fixture(scope="session")
def unexpected() -> list[Result]:
    """The outcomes so far of checks that were not expected to fail."""
    return []


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The class under test, on ranks that are started once."""
    option = request.config.getoption
    subject, against = subjects(option("--ddplab-class"), option("--ddplab-against"))
    effort = FULL if option("--ddplab-full") else QUICK
    ranks = RankPool(option("--ddplab-world-size"), backend=option("--ddplab-backend"))
    with tempfile.TemporaryDirectory() as folder, ranks as pool:
        found = Bench(subject, pool, effort, against=against, scratch=Path(folder))
        problem = ""
        try:
            found.start()
        except RankError as error:
            problem = first_lines(str(error))
        if problem:
            request.session.shouldfail = f"{subject.name} cannot be used on ranks"  # else one error a check
            pytest.fail(problem, pytrace=False)
        yield found


def test_conformance(bench: Bench, unexpected: list[Result], check: str, expected: Expectation | None) -> None:
    """The class passes this check.

    Skipped if the class lacks what the check needs, unless it must pass, and if the ranks did not match before.
    """
    if reason := why_left_out(check, unexpected):
        pytest.skip(f"left out: {reason}")
    result = run_check(check, CHECKS[check], bench)
    if expected != "expected-fail":
        unexpected.append(result)
    if result.outcome == "not supported" and expected != "must-pass":
        pytest.skip(result.message)
    if result.outcome != "passed":
        program = "" if result.program is None else f"\n{result.program!r}"
        pytest.fail(f"{result.message}{program}", pytrace=False)


def test_baseline(request: pytest.FixtureRequest) -> None:
    """No schedule in virtual time is slower than that of --ddplab-baseline."""
    text = request.config.getoption("--ddplab-baseline")
    if text is None:
        pytest.skip("no --ddplab-baseline")
    subject, _ = subjects(request.config.getoption("--ddplab-class"), None)
    try:
        before = load_baseline(text, subject.name)
        problems = [f"slower: {sentence}" for sentence in compare(list(schedules_of(subject)), before)]
    except (ValueError, RankError) as error:
        problems = [first_lines(str(error))]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
