"""Bench: the class under test on ranks, on which checks run programs."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from reference.errors import RankError
from reference.launch import RankPool

from .check_outcomes import LOST, STILL_RUNNING, CheckResult, Expectation, why_left_out
from .class_under_test import NotSupportedError, Subject, methods_of
from .local_training import AS_TORCH, FindingError, WeakProgramError, check_program
from .training_programs import Program

if TYPE_CHECKING:
    from hypothesis import settings

    from .overlap import EmulatedSchedule

VIEWS = "gradient_as_bucket_view"
TIMEOUT_S = 10.0
"""Time-out of each program on the ranks; a class that hangs is reported then."""
SHRINK_S = 20.0
"""How long smaller programs with the same fault are sought; an error ends the ranks, and new ones take seconds."""
START_TIMEOUT_S = 60.0
"""Time-out of the first program, which starts the ranks."""


class HangError(BaseException):
    """A program hung. Not an `Exception`, so that Hypothesis does not repeat it to find a smaller one."""


class _ShrunkError(BaseException):
    """The time for smaller programs is over. Not an `Exception`, so that Hypothesis stops."""


class Effort(NamedTuple):
    """How much is tried.

    Attributes:
        examples: Random programs of each kind.
        derandomized: Whether every run tries the same ones.
    """

    examples: int
    derandomized: bool


QUICK, FULL = Effort(60, derandomized=True), Effort(1000, derandomized=True)


class Bench:
    """The subject, the ranks on which it is tried, and the effort.

    Args:
        subject: The class under test.
        pool: Ranks.
        effort: How much is tried.
        against: A class whose results must be equal. None: none.

    Attributes:
        results: Outcomes of the checks so far.
        schedules: What the class does in virtual time, as far as the check `overlap` has found out.
        slower: Sentences on schedules that are slower than the baseline's.
    """

    def __init__(self, subject: Subject, pool: RankPool, effort: Effort, *, against: Subject | None = None) -> None:
        self.subject, self.pool, self.effort, self.against = subject, pool, effort, against
        self.world_size = pool.world_size
        self.methods: frozenset[str] = frozenset()
        self.results: list[CheckResult] = []
        self.schedules: list[EmulatedSchedule] = []
        self.slower: list[str] = []
        self.shrinks = True
        """Whether a random program that shows a fault is made smaller; a first fault has been shown else."""

    def start(self) -> None:
        """Start the ranks and find out which methods the class has."""
        found = self.run(methods_of, self.subject, timeout_s=START_TIMEOUT_S)
        self.methods = frozenset(found[0])

    def run(self, body: Callable[..., Any], *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Run a body on all ranks.

        Raises:
            FindingError: A rank returned what is wrong, and others did not end in time.
            HangError: It did not end in time.
            RankError: A rank failed.
        """
        first = not self.pool._ranks
        try:
            return self.pool.run(body, *arguments, timeout_s=timeout_s or (START_TIMEOUT_S if first else TIMEOUT_S))
        except RankError as error:
            report([one for one in error.returned.values() if isinstance(one, str)])
            if STILL_RUNNING in str(error):
                raise HangError(str(error)) from None
            raise

    def needs(self, *names: str) -> None:
        """Check that the class has these methods and options.

        Raises:
            NotSupportedError: It lacks one.
        """
        for name in names:
            if name not in self.methods and name not in self.subject.options:
                raise NotSupportedError(f"it has no {name}")

    def variants(self, options: dict[str, Any], *further: str) -> list[dict[str, Any]]:
        """Return these options alone, and with each of the further ones that the class has."""
        return [options, *(options | {name: True} for name in further if name in self.subject.options)]

    def averages_or_raises(self, body: Callable[..., Any], *arguments: Any) -> str:
        """Run a body on all ranks that returns what is wrong. A class may also raise an error, but not lose a rank.

        Returns:
            The first line of the error; empty if there was none.

        Raises:
            FindingError: Something is wrong.
            HangError: It did not end in time.
        """
        try:
            problems = self.run(body, self.subject, *arguments)
        except RankError as error:
            if LOST in str(error):
                raise FindingError(first_lines(str(error))) from None
            return first_lines(str(error))
        report(problems)
        return ""

    def try_program(self, program: Program, habits: Sequence[str] = (AS_TORCH,)) -> list[str]:
        """Run a program and compare it with local training; see `check_program`.

        Raises:
            FindingError: The class is wrong, or a rank failed.
            HangError: It did not end in time.
            WeakProgramError: The program could not show a fault.
        """
        try:
            return check_program(self.subject, program, self, habits)
        except (FindingError, RankError) as error:
            raise FindingError(str(error), program) from None

    def try_random(self, **how: Any) -> None:
        """Run random programs, and shrink the first one that shows a fault; arguments as for `programs`.

        Raises:
            FindingError: The class is wrong.
        """
        from hypothesis import assume, given

        from .random_programs import programs

        def run(program: Program) -> None:
            try:
                search.attempt(self.try_program, program)
            except WeakProgramError:
                assume(condition=False)

        search = Search()
        search.run(self.settings()(given(programs(self.world_size, **how))(run)))

    def settings(self, **further: Any) -> "settings":
        """Return settings of Hypothesis for a random check; `further` replaces single ones."""
        from hypothesis import HealthCheck, Phase, settings

        usual: dict[str, Any] = {
            "max_examples": self.effort.examples,
            "derandomize": self.effort.derandomized,
            "deadline": None,
            "database": None,
            "phases": [Phase.generate, Phase.shrink] if self.shrinks else [Phase.generate],
            "report_multiple_bugs": False,
            "suppress_health_check": list(HealthCheck),
        }
        return settings(**usual | further)


class Search:
    """A search for a faulty program, whose time for smaller programs with the same fault is limited."""

    def __init__(self) -> None:
        self._found: list[tuple[FindingError, float]] = []

    def attempt(self, run: Callable[..., object], *arguments: Any) -> None:
        """Try one program."""
        if self._found and time.monotonic() - self._found[0][1] > SHRINK_S:
            raise _ShrunkError
        try:
            run(*arguments)
        except FindingError as fault:
            self._found.append((fault, time.monotonic()))
            raise

    def run(self, test: Callable[[], None]) -> None:
        """Run a test of Hypothesis that calls `attempt`.

        Raises:
            FindingError: The class is wrong.
        """
        try:
            test()
        except _ShrunkError:
            raise self._found[-1][0] from None


Check = Callable[[Bench], str | None]
"""Returns if the class passed, perhaps with a text on how; raises FindingError, RankError, HangError or
NotSupportedError."""


def run_check(name: str, check: Check, bench: Bench, expected: Expectation | None = None) -> CheckResult:
    """Run one check, unless it would say nothing new; the result is added to those of the bench."""
    result = CheckResult(name, "left out", why_left_out(name, bench.results), expected=expected)
    if not result.message:
        result = replace(result, **_outcome(check, bench))
    bench.results.append(result)
    return result


def _outcome(check: Check, bench: Bench) -> dict[str, Any]:
    """Run one check; returns fields of its result."""
    try:
        return {"outcome": "passed", "message": check(bench) or ""}
    except NotSupportedError as reason:
        return {"outcome": "not supported", "message": str(reason)}
    except (FindingError, RankError, HangError) as fault:
        program = getattr(fault, "program", None)
        bench.shrinks = bench.shrinks and program is None  # one small program is enough
        return {"outcome": "failed", "message": first_lines(str(fault)), "program": program}


@contextmanager
def bench_on(ranks: RankPool, name: str, effort: Effort, against: str | None = None) -> Iterator[Bench]:
    """Start a bench; meanwhile this process computes with one thread.

    Idle threads of OpenMP spin, on cores that the ranks need.

    Args:
        ranks: The ranks, which stay open.
        name: `module:class`; see `Subject`.
        effort: How much is tried.
        against: A class whose results must be equal. None: none.

    Raises:
        ValueError: There is no such class, or Hypothesis is not installed.
        RankError: The class cannot be constructed.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bench = Bench(Subject(name), ranks, effort, against=None if against is None else Subject(against))
        bench.start()
        yield bench
    finally:
        torch.set_num_threads(threads)


def report(problems: Sequence[str]) -> None:
    """Raise an error for the first problem that a rank returned.

    Raises:
        FindingError: There is one.
    """
    for problem in problems:
        if problem:
            raise FindingError(problem)


def first_lines(message: str) -> str:
    """Shorten the message of a failed rank: its cause without the traceback."""
    return message.partition(" Traceback:\n")[0]
