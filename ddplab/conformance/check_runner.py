"""Bench: the class under test on ranks, on which checks run programs."""

import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, get_args
from unittest import mock

import torch
import torch.distributed as dist

from ..emulation.virtual_time import NoTurnError, patient
from ..reference.errors import RankError, RanksStillRunningError
from ..reference.launch import RankPool, rank_device
from . import class_under_test
from .check_outcomes import SEEDED, CheckResult, Expectation, Level, Outcome, is_unmatched, level_of, why_left_out
from .class_under_test import NotSupportedError, Offer, OperatorError, RefusalError, Subject, methods_of, refusing
from .local_training import AS_TORCH, FindingError, WeakProgramError, check_program
from .training_programs import UNUSUAL, Program, in_one_order, in_whole_steps, of_usual_weights, unusual

if TYPE_CHECKING:
    from hypothesis import settings

    from .timing_and_overlap import EmulatedSchedule

VIEWS = "gradient_as_bucket_view"
OF_PASSES = "backward|pass|iteration|graph|gradient|bucket"
"""What a class may name when it refuses a pass."""
PACE_S = 0.1
"""How long `pace` takes at most on a machine with two cores that does nothing else."""
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


OF_ADAPTERS = (
    *("any timing", "one weight", "construction", "special parameters", "optimizers", "real models"),
    *("special values", "large gradients", "repeated forward passes", "checkpoints", "accumulation"),
    *("unused parameters", "autocast", "random programs", "state machine", "a failing rank", "a lost rank"),
    "new interpreters",
    *(MILDER := ("use as the module", "several backward passes", "gradients that nothing waits for")),
)
"""Checks of an adapter; those in `MILDER` are at level `should`, as its script may need other calls."""
NOT_OF_ADAPTERS = "it looks at gradients or options, which an adapter does not show"
QUICK, FULL = 9, 60
"""Efforts: numbers of random programs of each kind in virtual time, where they take milliseconds."""


class Bench:
    """The subject, the ranks on which it is tried, and the effort: `QUICK`, `FULL` or another number of programs.

    Every run with one `seed` tries the same programs. `against` is a class whose results must be equal. Methods that
    run something raise `FindingError` if the class is wrong, `RankError` if a rank failed, and `HangError` if the
    ranks did not end in time.
    """

    def __init__(
        self, subject: Subject, pool: RankPool, effort: int, *, against: Subject | None = None, seed: int = 0
    ) -> None:
        self.subject, self.pool, self.effort, self.against, self.seed = subject, pool, effort, against, seed
        self.world_size, self.device = pool.world_size, pool.device
        self.offer, self.methods = Offer(frozenset(), frozenset()), frozenset[str]()
        #: Of each method that the class has, the error with which the class refuses it; empty: none.
        self.refusals: dict[str, str] = {}
        self.schedules: list[EmulatedSchedule] = []  #: those in virtual time that the check `overlap` has recorded
        self.not_in_virtual_time = ""  #: why it does not run there, found out by `any timing`; empty: it may run
        self.slowness = 1.0  #: by how many times the machine was slower at the start than a quiet one; limits grow
        self.shrinks = True  #: whether a program that shows a fault is made smaller, and explained: the first one

    def start(self) -> None:
        """Start the ranks and find out what the class offers.

        Raises ValueError if it cannot be imported, or does not wrap a module.
        """
        self.run(pace)  # which also starts the ranks
        start = time.monotonic()
        self.run(pace)
        self.slowness = max(1.0, (time.monotonic() - start) / PACE_S)
        expected = "an importable module"
        try:
            for subject in filter(None, (self.against, self.subject)):
                self.offer = run_alone(self, Subject.offer, subject, timeout_s=TIMEOUT_S)
                if self.offer.is_adapter and (self.against or subject.tolerance):
                    option = "--against" if self.against else "--tolerance"
                    raise ValueError(f"{option}: expected classes whose gradients are compared, got an adapter")
            expected = "a class or a function that wraps a module, given nn.Linear(2, 1)"
            self.refusals = self.run(methods_of, self.subject)[0]
            usable = {name for name, refusal in self.refusals.items() if not refusal}
            self.methods = frozenset(usable | ({class_under_test.IGNORE} & self.offer.defines))
        except HangError:
            raise ValueError(
                f"{self.subject.name}: expected {expected}, got no answer in {self.limit(TIMEOUT_S):.3g} s"
            ) from None
        except RankError as error:
            line = class_under_test.error_line(error, self.offer.path) if expected.startswith("a class") else ""
            where = f" ({line})" if line else ""
            raise ValueError(f"{self.subject.name}: expected {expected}; {cause_of(error)}{where}") from error

    def run(self, body: Callable[..., Any], *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Run a body on all ranks.

        Raises HangError if it did not end in time, FindingError if a rank has then returned what is wrong, and
        RankError if a rank failed.
        """
        usual_s = timeout_s or (TIMEOUT_S if self.pool.is_running else START_TIMEOUT_S)
        try:
            with warnings.catch_warnings():  # about uneven inputs, which no check has by mistake
                warnings.filterwarnings("ignore", message="ranks .* are still running")
                return self.pool.run(body, *arguments, timeout_s=self.limit(usual_s))
        except RanksStillRunningError as error:
            report([problem for problem in error.returned.values() if isinstance(problem, str)])
            raise HangError(f"slow or hung: {cause_of(error)}") from error

    def limit(self, usual_s: float) -> float:
        """Return a time limit for this machine and its present load."""
        return max(usual_s * self.slowness, patient(usual_s))

    def needs(self, *names: str) -> None:
        """Raise `NotSupportedError` if the class lacks one of these methods and options."""
        for name in names:
            if name not in self.methods and name not in self.offer.options:
                refusal = self.refusals.get(name)
                raise NotSupportedError(f"it refuses {name}: {refusal}" if refusal else f"it has no {name}")

    def variants(self, options: dict[str, Any], *further: str) -> list[dict[str, Any]]:
        """Return these options alone, and with each of the further ones that the class has."""
        return [options, *(options | {name: True} for name in further if name in self.offer.options)]

    def try_body(self, body: Callable[..., Any], *arguments: Any, **keywords: Any) -> None:
        """Run a body on all ranks that returns what is wrong; `what` names the case where a rank failed, too."""
        try:
            report(self.run(partial(body, **keywords), self.subject, *arguments))
        except RankError as error:
            if not (what := keywords.get("what")):
                raise
            raise FindingError(f"{what}: {cause_of(error)}") from error

    def averages_or_refuses(self, words: str, body: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
        """Run a body as `try_body` does; a class may also refuse with an error that says one of these words.

        Returns the error; empty if there was none. An operator's error is a milder fault: it ends the script, too.
        """
        try:
            self.try_body(partial(refusing, words, body), *arguments, **keywords)
        except OperatorError as error:
            case, advice = f"{keywords.get('what', '')}: ", "the class refuses this with no error of its own"
            told = f"{case.removeprefix(': ')}{with_line(error, self.offer.path)}; {advice}"
            raise FindingError(told, milder=True) from error
        except RefusalError as error:
            return str(error)
        return ""

    def try_program(self, program: Program, habits: Sequence[str] = (AS_TORCH,), words: str = "") -> list[str]:
        """Run a program and compare it with local training; see `check_program`."""
        if self.subject.one_order:
            program = in_one_order(program)
        if self.offer.is_adapter:
            program = in_whole_steps(program)
        try:
            return check_program(self.subject, program, self, habits, words)
        except (FindingError, RankError) as error:
            raise FindingError(cause_of(error), program) from error

    def try_random(
        self,
        attempt: Callable[[Program], object] | None = None,
        *,
        examples: int | None = None,
        options: Sequence[dict[str, Any]] = ({},),
        **how: Any,
    ) -> None:
        """Try random programs, and shrink the first one that shows a fault.

        `attempt` tries a program, and may raise WeakProgramError; None: `try_program`. Without a number of
        `examples`, there are a third of the effort, because ranks are slow. Each program has one of the `options` of
        the class; `how` are further arguments for `programs`.
        """
        from hypothesis import assume, given, seed
        from hypothesis import strategies as st

        from .random_programs import programs

        found: list[tuple[float, FindingError]] = []

        def run(program: Program) -> None:
            if found and time.monotonic() > found[0][0] + SHRINK_S:
                raise _ShrunkError
            if self.offer.is_adapter:
                program = of_usual_weights(program)
            try:
                (attempt or self.try_program)(program)
            except WeakProgramError:
                assume(condition=False)
            except FindingError as fault:
                found.append((time.monotonic(), fault))
                raise

        drawn = programs(self.world_size, options=st.sampled_from(options), **how)
        try:
            seed(self.seed)(self.settings(examples or max(1, self.effort // 3))(given(drawn)(run)))()
        except (_ShrunkError, FindingError):
            fault = found[-1][1]
            what = unusual(fault.program) if fault.program else []
            told = f"{fault}; the program has {', '.join(what)}" if what else str(fault)
            raise FindingError(told, fault.program) from fault.__cause__  # which shows whether ranks did not match

    def right_without(self, program: Program) -> list[str]:
        """Return what of `UNUSUAL` a program that fails on real ranks must have to fail."""

        def passes(tried: Program) -> bool:
            with suppress(FindingError, RankError, HangError, RefusalError, WeakProgramError):
                return bool(self.try_program(tried))
            return False

        if len(program.steps[0].used) != self.world_size or passes(program):
            return []
        return [name for name in unusual(program) if passes(UNUSUAL[name](program))]

    def settings(self, examples: int) -> "settings":
        """Return settings of Hypothesis for so many random programs."""
        from hypothesis import HealthCheck, Phase, settings

        phases = [Phase.generate, Phase.shrink] if self.shrinks else [Phase.generate]
        how: dict[str, Any] = {"deadline": None, "database": None, "report_multiple_bugs": False}
        return settings(max_examples=examples, phases=phases, suppress_health_check=list(HealthCheck), **how)


def pace(_rank: int, _world_size: int) -> None:
    """Do what a program does: compute a little, and average it, many times."""
    x = torch.ones(64, 64, device=rank_device())
    for _ in range(20):
        dist.all_reduce(x @ x)


def run_alone(
    ranks: "RankPool | Bench",
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = START_TIMEOUT_S,
    **keywords: Any,
) -> Any:
    """Run a function on rank 0 only, so that no code of the class runs in this process; return what it returns.

    Raises what the function raises, with its traceback as a note, and HangError and RankError as `run` does.
    """
    value, error = ranks.run(partial(_on_rank_0, function, **keywords), *arguments, timeout_s=timeout_s)[0]
    if isinstance(error, NoTurnError):
        (ranks.pool if isinstance(ranks, Bench) else ranks).close()  # it still runs there
    if error is not None:
        raise error
    return value


def _on_rank_0(function: Callable[..., Any], rank: int, _world_size: int, *arguments: Any, **keywords: Any) -> Any:
    """Return the function's result and its error, as a value, after which the ranks live on."""
    if rank:
        return None
    try:
        return function(*arguments, **keywords), None
    except (NotSupportedError, RankError, ValueError) as error:
        if not type(error).__module__.startswith("ddplab."):
            error = ValueError(str(error)).with_traceback(error.__traceback__)
        error.add_note(traceback.format_exc())  # traceback and cause are lost on the way to another process
        return None, error


Check = Callable[[Bench], str | None]
"""Returns if the class passed, perhaps with a text on how; raises FindingError, RankError, HangError or
NotSupportedError."""


def run_checks(
    bench: Bench,
    checks: Iterable[tuple[str, Check]],
    expected: Mapping[str, Expectation] | None = None,
    level: Level = "speed",
) -> Iterator[CheckResult]:
    """Run checks with their names, one after the other; one that would say nothing new after the others is left out.

    `expected` has what is expected of checks, by name; of the others, those up to `level` must not fail.
    """
    levels = get_args(Level)
    results: list[CheckResult] = []
    for name, check in checks:
        expectation = (expected or {}).get(name)
        outcome: Outcome = "left out"
        program, unmatched, start = None, False, time.monotonic()
        its_level = "should" if bench.offer.is_adapter and name in MILDER else level_of(name)
        message = "it is in the list skip" if expectation == "skip" else why_left_out(name, results)
        if bench.offer.is_adapter and name.partition(SEEDED)[0] not in OF_ADAPTERS:
            outcome, message = "not supported", NOT_OF_ADAPTERS
        elif not message:
            try:
                outcome, message = "passed", check(bench) or ""
            except NotSupportedError as reason:
                outcome, message = "not supported", str(reason)
            except (FindingError, RankError, HangError) as fault:
                message, program = with_line(fault, bench.offer.path), getattr(fault, "program", None)
                unmatched = is_unmatched(fault) and not bench.subject.one_order
                if program is not None and bench.shrinks and not unmatched:
                    needed = bench.right_without(program)
                    message += f"; right without {', or without '.join(needed)}" if needed else ""
                outcome, is_milder = "failed", getattr(fault, "milder", False) and its_level == "must"
                its_level = "should" if is_milder else its_level
                bench.shrinks = bench.shrinks and program is None  # one small program is enough
        of_run = unmatched, time.monotonic() - start, its_level, levels.index(its_level) <= levels.index(level)
        results.append(CheckResult(name, outcome, message, program, expectation, *of_run))
        yield results[-1]


@contextmanager
def bench_on(
    ranks: RankPool, name: str | Subject, effort: int, against: str | None = None, seed: int = 0
) -> Iterator[Bench]:
    """Start a bench on ranks, which stay open; arguments as for `Bench` and `Subject`.

    Meanwhile this process computes with one thread: idle threads of OpenMP spin, on cores that the ranks need; and
    Hypothesis writes into a temporary folder. Raises ValueError as `Bench.start` does.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    subject = name if isinstance(name, Subject) else Subject(name)
    bench = Bench(subject, ranks, effort, against=None if against is None else Subject(against), seed=seed)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, HYPOTHESIS_STORAGE_DIRECTORY=folder):
        try:
            bench.start()
            yield bench
        finally:
            torch.set_num_threads(threads)


def check_possible(world_size: int, device: str | None, backend: str) -> None:
    """Raise ValueError if there are too few ranks, no such backend, or Hypothesis is not installed."""
    if find_spec("hypothesis") is None:
        raise ValueError("expected the package hypothesis; install it with `pip install 'ddplab[conform]'`")
    if world_size < (1 if device == "cuda" else 2):
        raise ValueError(f"world size: expected at least 2, got {world_size}")
    if backend not in (known := [one for one in dist.Backend.backend_list if one != dist.Backend.UNDEFINED]):
        raise ValueError(f"--backend: expected one of {', '.join(known)}, got {backend!r}")


def report(problems: Sequence[str]) -> None:
    """Raise `FindingError` for the first problem that a rank returned, if there is one."""
    for problem in filter(None, problems):
        raise FindingError(problem)


def cause_of(fault: BaseException) -> str:
    """Return the message of an error; of a rank's failure the cause, without its traceback and without advice.

    The advice, on uneven inputs, never applies, because a check of these trains inside `join()`. Of the stacks of
    ranks that hang, the calls in the class and its callees are left, down to those of the kit.
    """
    if not isinstance(fault, RankError):
        return str(fault)
    shown, is_kit = [fault.cause, ""] if fault.last_output else [fault.cause], False
    for line in fault.last_output.splitlines():
        is_frame = line.startswith("  File ")
        is_kit = is_frame and (is_kit or any(path in line for path in class_under_test.KIT))
        if not is_kit and not (is_frame and "<frozen " in line):
            shown.append(line)
    return "\n".join(shown)


def with_line(fault: BaseException, path: str) -> str:
    """Return the message of an error as `cause_of` does, with the line of the class that raised it, if one did."""
    told, end, stacks = cause_of(fault).partition("\n")
    line = class_under_test.error_line(fault, path)
    return f"{told} ({line}){end}{stacks}" if line and line not in told else f"{told}{end}{stacks}"
