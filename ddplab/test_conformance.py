"""The checks of `ddplab conform` as tests: `pytest --pyargs ddplab --ddplab-class MODULE:CLASS`."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import pytest

from reference.errors import RankError
from reference.launch import RankPool

from .conformance.all_checks import CHECKS
from .conformance.check_outcomes import Expectation, read_expectations
from .conformance.check_runner import FULL, QUICK, Bench, bench_on, cause_of, run_check
from .conformance.class_under_test import Subject
from .conformance.overlap import EmulatedSchedule, compare, load_baseline, schedules_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each check and of the baseline, or a single error if the options make no sense."""
    option = metafunc.config.getoption
    name, path, baseline = option("--ddplab-class"), option("--ddplab-expect"), option("--ddplab-baseline")
    try:
        if "before" in metafunc.fixturenames:
            before = [] if baseline is None else [pytest.param(load_baseline(baseline, name), id=baseline)]
            metafunc.parametrize("before", before)
            return
        if find_spec("hypothesis") is None:
            raise ValueError("expected the package hypothesis; install it with `pip install 'ddplab[conform]'`")
        if name is None:
            raise ValueError("expected --ddplab-class MODULE:CLASS, got no class to check")
        if option("--ddplab-world-size") < (1 if option("--ddplab-device") == "cuda" else 2):
            raise ValueError(f"--ddplab-world-size: expected at least 2, got {option('--ddplab-world-size')}")
        for one in {name, option("--ddplab-against") or name}:
            Subject(one).check()
        expected = {} if path is None else read_expectations(path, list(CHECKS))
    except ValueError as error:
        raise pytest.Collector.CollectError(str(error)) from error
    marks = {
        "expected-fail": [pytest.mark.xfail(reason=f"expected-fail in {path}", strict=True)],
        "skip": [pytest.mark.skip(reason=f"skip in {path}")],
    }
    kinds = {check: expected.get(check) for check in CHECKS}
    cases = [pytest.param(check, kind, id=check, marks=marks.get(str(kind), [])) for check, kind in kinds.items()]
    metafunc.parametrize(("check", "expected"), cases)


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The class under test, on ranks that are started once."""
    option = request.config.getoption
    name, effort = option("--ddplab-class"), FULL if option("--ddplab-full") else QUICK
    backend = option("--ddplab-backend")
    device = option("--ddplab-device") or ("cuda" if backend == "nccl" else None)
    with RankPool(option("--ddplab-world-size"), backend=backend, device=device) as ranks:
        try:
            with bench_on(ranks, name, effort, option("--ddplab-against")) as found:
                yield found
        except ValueError as error:
            request.session.shouldfail = f"{name} cannot be used on ranks"  # else one error a check
            raise pytest.fail.Exception(str(error), pytrace=False) from error


def test_conformance(bench: Bench, check: str, expected: Expectation | None) -> None:
    """The class passes this check.

    Skipped if the class lacks what the check needs, or if the ranks did not match before, unless it must pass.
    """
    result = run_check(check, CHECKS[check], bench, expected)
    if result.outcome == "failed" or (result.problem and result.outcome != "passed"):
        program = "" if result.program is None else f"\n{result.program!r}"
        pytest.fail(f"{result.message}{program}", pytrace=False)
    if result.outcome != "passed":
        pytest.skip(f"{result.outcome}: {result.message}")


def test_baseline(bench: Bench, before: Sequence[EmulatedSchedule]) -> None:
    """No schedule in virtual time is slower than that of --ddplab-baseline."""
    try:
        bench.schedules = bench.schedules or list(schedules_of(bench.subject))
        bench.slower = compare(bench.schedules, before)
    except RankError as error:
        bench.slower = [f"{bench.subject.name}: no schedule: {cause_of(str(error))}"]
    if bench.slower:
        pytest.fail("\n".join(f"slower: {sentence}" for sentence in bench.slower), pytrace=False)
