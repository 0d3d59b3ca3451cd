"""The checks as tests: `pytest --pyargs reference.conformance --ddp MODULE:CLASS`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..launch import RankPool
from .bench import FULL, QUICK, Bench, run_check
from .kit import all_checks
from .subject import Subject


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """The class under test, on ranks that are started once."""
    option = request.config.getoption
    name = option("--ddp")
    if name is None:
        pytest.fail("expected --ddp MODULE:CLASS, got no class to check", pytrace=False)
    against = option("--ddp-against")
    effort = FULL if option("--ddp-full") else QUICK
    with tempfile.TemporaryDirectory() as folder, RankPool(option("--ddp-world-size")) as pool:
        other = None if against is None else Subject(against)
        found = Bench(Subject(name), pool, effort, against=other, scratch=Path(folder))
        found.start()
        yield found


@pytest.mark.parametrize("check", all_checks())
def test_conformance(bench: Bench, check: str) -> None:
    """The class passes this check; skipped if it lacks what the check needs."""
    result = run_check(check, all_checks()[check], bench)
    if result.outcome == "not supported":
        pytest.skip(result.message)
    if result.outcome == "failed":
        program = "" if result.program is None else f"\n{result.program!r}"
        pytest.fail(f"{result.message}{program}", pytrace=False)
