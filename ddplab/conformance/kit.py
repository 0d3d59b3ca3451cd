"""Kit: runs all checks on a class, one after the other, on ranks that are started once."""

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch

from reference.launch import RankPool

from .all_checks import CHECKS
from .check_runner import Bench, Effort, Result, run_check
from .class_under_test import Subject
from .conformance_report import Expectation, Report

WORLD_SIZE = 3
"""Two ranks add in one order only, and powers of two hide wrong divisors."""

PLAIN = (
    "any timing",
    "one weight",
    "construction",
    "bucket caps",
    "special parameters",
    "optimizers",
    "kept gradients",
    "real models",
)
"""Checks of averaging without any option. If ranks do not match in one of them, they do not in most others."""
STILL_TELLING = ("overlap", "one weight", "construction")
"""Checks that can pass although ranks launch collectives in different orders: a single collective, or one order."""
MOST_UNMATCHED = 2
"""Number of checks in which ranks may hang or be lost, which takes seconds each, before all others are left out."""


def subjects(name: str, against: str | None) -> tuple[Subject, Subject | None]:
    """Return the class under test and the one to compare with, both of which can be imported.

    Raises:
        ValueError: There is no such class, or Hypothesis is not installed.
    """
    if find_spec("hypothesis") is None:
        raise ValueError("conform: expected the package hypothesis; install it with `pip install 'ddplab[conform]'`")
    subject, other = Subject(name), None if against is None else Subject(against)
    for one in (subject, other):
        if one is not None:
            one.check()
    return subject, other


def conform(
    name: str,
    effort: Effort,
    *,
    world_size: int = WORLD_SIZE,
    backend: str = "gloo",
    against: str | None = None,
    expected: Mapping[str, Expectation] | None = None,
    stop: bool = False,
    only: Collection[str] | None = None,
    pool: RankPool | None = None,
    on_result: Callable[[Result], None] = lambda _result: None,
) -> Report:
    """Run all checks on a class.

    Args:
        name: `module:class`; see `subject`.
        effort: How much is tried.
        world_size: Number of ranks.
        backend: Backend of the process group.
        against: A class whose results must be equal. None: none.
        expected: By check, what is expected; checks to be skipped do not run.
        stop: Whether to stop after the first check that fails and was not expected to.
        only: Names of the checks to run. None: all.
        pool: Ranks to use instead of `world_size` new ones; they stay open.
        on_result: Called after each check.

    Raises:
        ValueError: There is no such class or no such check, or Hypothesis is not installed.
        RankError: The class cannot be constructed.
    """
    subject, other = subjects(name, against)
    expected, checks = expected or {}, CHECKS
    if unknown := sorted(set(only or ()) - set(checks)):
        raise ValueError(f"only: expected names of checks, got {', '.join(unknown)}; there are {', '.join(checks)}")
    ranks = RankPool(world_size, backend=backend) if pool is None else nullcontext(pool)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder, ranks as pool, one_thread():
        bench = Bench(subject, pool, effort, against=other, scratch=Path(folder))
        bench.start()
        for check_name, check in checks.items():
            if expected.get(check_name) != "skip" and (only is None or check_name in only):
                unexpected = [one for one in results if expected.get(one.check) != "expected-fail"]
                reason = why_left_out(check_name, unexpected)
                result = Result(check_name, "left out", reason) if reason else run_check(check_name, check, bench)
                results.append(result)
                on_result(result)
                if stop and result.outcome == "failed" and expected.get(check_name) != "expected-fail":
                    break
    return Report(name, tuple(results), expected)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread in this process: idle threads of OpenMP spin, on cores that the ranks need."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def why_left_out(check: str, results: Sequence[Result]) -> str:
    """Return why a check is left out after the results of others; empty if it runs.

    Where ranks launch different collectives, nearly every program ends in a hang, and says nothing new.
    """
    unmatched = [one.check for one in results if one.unmatched]
    if len(unmatched) >= MOST_UNMATCHED:
        return f"the ranks did not match in {' and '.join(unmatched)}"
    if unmatched and unmatched[0] in PLAIN and check not in STILL_TELLING:
        return f"the ranks did not match in {unmatched[0]}, which needs no option"
    return ""
