"""The checks of `ddplab conform` as tests: `pytest --pyargs ddplab --ddplab-class MODULE:CLASS`."""

from collections.abc import Iterator
from dataclasses import fields

import pytest

from .conformance.all_checks import BASELINE, CHECKS
from .conformance.check_outcomes import Expectation
from .conformance.check_runner import Bench, run_check
from .conformance.conformance_run import ConformanceRun


def run_of(config: pytest.Config) -> ConformanceRun:
    """Return the run that the options of pytest ask for."""
    return ConformanceRun(
        **{field.name: config.getoption(f"ddplab_{field.name}") for field in fields(ConformanceRun)}
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each check, or a single error if the options make no sense."""
    run = run_of(metafunc.config)
    try:
        if run.subject is None:
            raise ValueError("expected --ddplab-class MODULE:CLASS, got no class to check")
        expectations = run.expectations()
    except ValueError as error:
        raise pytest.Collector.CollectError(str(error)) from error
    metafunc.parametrize(("check", "expected"), expectations.items(), ids=expectations)


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The class under test, on ranks that are started once."""
    run = run_of(request.config)
    try:
        with run.bench() as found:
            yield found
    except ValueError as error:
        request.session.shouldfail = f"{run.subject} cannot be used on ranks"  # else one error a check
        raise pytest.fail.Exception(str(error), pytrace=False) from error


def test_conformance(bench: Bench, check: str, expected: Expectation | None) -> None:
    """The class passes this check.

    Skipped if the class lacks what the check needs, or if the ranks did not match before, unless it must pass.
    """
    result = run_check(check, (CHECKS | BASELINE)[check], bench, expected)
    if result.problem:
        pytest.fail(
            result.problem if result.program is None else f"{result.problem}\n{result.program!r}", pytrace=False
        )
    if result.outcome == "failed":
        pytest.xfail(result.message)
    if result.outcome != "passed":
        pytest.skip(f"{result.outcome}: {result.message}")
