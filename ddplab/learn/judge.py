"""The judge of the ladder: runs the checks of a rung on a learner's class, names the likely mistake, and grades.

`climb` judges the next rungs of a file, keeps the progress, and `saves` waits for the next save of the file. All that
reads the progress raises a ValueError if its file is damaged.
"""

import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from threading import Timer
from typing import Any

from ..conformance.check_outcomes import is_unmatched
from ..conformance.check_runner import Bench, HangError, bench_on, cause_of, pace, run_alone
from ..conformance.class_under_test import NotSupportedError, Subject, error_line
from ..conformance.local_training import FindingError
from ..conformance.timing_and_overlap import averages_by_a_call
from ..junit import TestCase, write_junit
from ..reference.errors import RankError
from ..reference.launch import RankPool
from .checks import ALL
from .gains import Gain, gain
from .learner_file import LearnerClass, LearnerError
from .rungs import RUNGS, SYMPTOM_UNMATCHED, load_progress, update_progress

WORLD_SIZE = 3
"""Two ranks add in one order only, and powers of two hide wrong divisors."""
TENSOR = r"flatten|reshape|view\w*|numel|shape|size|dtype|device|detach|data\w*|clone|\w+_|mul|div|add"
"""Attributes of gradients that learners use."""
ANY_RUNG = {
    "no attribute '(backward|sum|mean|square)'": "forward() must return the module's output",
    r"forward\(\) (missing|got|takes)": "forward() must pass on all arguments: self.module(*inputs, **kwargs)",
    r"exited without reporting an error \(exit code \d": "the file ends its process, as os._exit() does",
    ": 0 times the expected": "a bucket is launched before its last gradient has arrived, or has zeros in its place",
    "StopIteration|attribute '_(parameters|backward_hooks)'": "call super().__init__() and set self.module = module",
    "'NoneType' object has no attribute 'wait'": "all_reduce() without async_op=True waits itself and returns None: "
    "pass async_op=True; or is `return` missing?",
    "'NoneType' object has no attribute '(step|zero_grad|state|param_groups)'": "shard_optimizer() returns None: is "
    "`return` missing?",
    f"'NoneType' object has no attribute '({TENSOR})'|'NoneType' and|expected Tensor as .* NoneType": "is "
    "`return` missing? Or a gradient is None: a frozen or unused parameter has none; one that this pass has not "
    "reached has none yet (is what you keep of a pass filled again for the next?); a hook of register_hook runs "
    "before it is there: use register_post_accumulate_grad_hook",
    "view size is not compatible": "a gradient that is not contiguous has no view(-1): use flatten() or reshape(-1)",
    "grad_dtype|data of a different type|scalar type": "a flat tensor has one dtype: make one for each dtype",
    "Boolean value of Tensor": "a tensor has no truth value: `if p.grad` asks for that of its elements, and `p in "
    "list` compares elements; use `is not None`, and a set or a dict of parameters",
    "Final callbacks can only": "queue_callback() works in a backward pass only: call it in the first hook of a pass",
    "wraps a.*no answer in": "the constructor never ends: has it an endless loop, or do ranks "
    "not call the same broadcasts, from rank 0?",
    "has not come back for": "does a loop never end, such as a `while` in which nothing changes what it asks?",
    r"ranks \[0\] wait for coll.*ranks \[1.* wait for the other ranks, to start": "only rank 0 calls it, as with "
    "`if rank == 0`: every rank must call every collective",
}
"""Likely mistakes in any rung, by symptom."""
OTHERWISE = SYMPTOM_UNMATCHED, "the ranks launch different collectives, or one waits for what the others never send"
"""The likely mistake if ranks do not match, and the rung has no better answer."""
HOOKS = 4
"""The rung from which on the script calls nothing after a backward pass."""
GLOO = r" Rank \d+ then failed: RuntimeError: \[.*"
"""Gloo's own message of a connection that another rank closed."""
EFFORT = 24
"""Three times the number of random programs of each kind, so that a check takes seconds."""


@dataclass(frozen=True)
class Judgement:
    """Outcome of a rung."""

    rung: int  #: number of the rung, from 1
    check: str = ""  #: the check that failed; empty if the class has passed
    message: str = ""  #: what was found, with iteration, rank, parameter and ratio
    likely: str = ""  #: the likely mistake; empty if the message is all that is known
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether the class passed all checks of the rung."""
        return not self.check

    def __str__(self) -> str:
        title = f"rung {self.rung} of {len(RUNGS)}, {RUNGS[self.rung - 1].title}"
        if self.passed:
            return f"passed   {title} ({self.seconds:.1f} s)"
        likely = f"\n  likely: {self.likely}" if self.likely else ""
        return f"not yet  {title} ({self.seconds:.1f} s)\n  check `{self.check}`: {self.message}{likely}"


class Judge(AbstractContextManager["Judge"]):
    """Ranks that stay alive between verdicts; a verdict on a new save therefore takes seconds.

    Without `ranks`, the context makes and ends some; all but one are new interpreters, which order sets differently.
    """

    def __init__(self, ranks: RankPool | None = None) -> None:
        self.ranks = ranks or RankPool(WORLD_SIZE, timeout_s=60.0, new_interpreters=WORLD_SIZE - 1, only_data=True)

    def __exit__(self, *_error: object) -> None:
        self.ranks.close()

    def prepare(self) -> None:
        """Start the ranks, unless they run: an error of the class has ended them, and a start takes seconds."""
        if not self.ranks.is_running:
            self.ranks.run(pace)

    def verdict(self, subject: Subject, rung: int) -> Judgement:
        """Run the checks of a rung, whose number counts from 1, up to the first that fails."""
        start, check = time.monotonic(), "construction"
        try:
            with bench_on(self.ranks, subject, EFFORT) as bench:
                if isinstance(subject, LearnerClass) and (rung >= HOOKS or _launches_alone(bench)):
                    bench.subject = replace(subject, is_finished=False)
                bench.shrinks = False
                for check in RUNGS[rung - 1].checks:
                    ALL[check](bench)
        except (NotSupportedError, FindingError, RankError, HangError, ValueError) as fault:
            message = described(fault, subject)
            likely = likely_mistake(f"{check}: {message}", RUNGS[rung - 1].mistakes, unmatched=is_unmatched(fault))
            return Judgement(rung, check, message, likely, time.monotonic() - start)
        return Judgement(rung, seconds=time.monotonic() - start)


def _launches_alone(bench: Bench) -> bool:
    """Whether a class launches without a call; a method `average_gradients` of it is then its own affair."""
    with suppress(RankError, NotSupportedError, ValueError):
        return not run_alone(bench, averages_by_a_call, bench.subject)
    return False


def described(fault: BaseException, subject: Subject) -> str:
    """Return the message of an error, with the line of the learner's file that raised it, if one did."""
    if isinstance(fault, LearnerError | NotSupportedError):
        return str(fault) if isinstance(fault, LearnerError) else f"not supported: {fault}"
    line = error_line(fault, getattr(subject, "path", ""))
    told = cause_of(fault).partition("\n\n")[0]  # without stacks, which would bury it
    return f"{re.sub(GLOO, '', told)}{f' ({line})' if line and line not in told else ''}"


def likely_mistake(message: str, mistakes: Mapping[str, str], *, unmatched: bool) -> str:
    """Return the mistake whose symptom is in `check: message`, those of any rung first; empty if there is none."""
    for symptom, likely in chain(ANY_RUNG.items(), mistakes.items(), [OTHERWISE]):
        if unmatched if symptom == SYMPTOM_UNMATCHED else re.search(symptom, message, re.DOTALL):
            return likely
    return ""


def grades(judge: Judge, subject: LearnerClass, junit: Path | None = None) -> dict[str, Any]:
    """Judge every rung, also those after one that is not passed; return the points, one for each rung.

    The file `junit` gets JUnit XML with a test case for each rung.
    """
    rows, cases = [], []
    for number, rung in enumerate(RUNGS, start=1):
        found = judge.verdict(subject, number)
        failure = "" if found.passed else f"{found.check}: {found.message}"
        details = found.likely or found.message
        cases.append(TestCase(f"{number:02}. {rung.title}", found.seconds, failure, details=details))
        points = {"title": rung.title, "points": int(found.passed), "possible": 1, "seconds": round(found.seconds, 3)}
        rows.append(vars(found) | points)
    if junit is not None:
        write_junit(junit, f"ladder of {subject.name}", subject.name, cases)
    points = sum(row["points"] for row in rows)
    return {"subject": subject.name, "points": points, "possible": len(rows), "rungs": rows}


# Climbing

WIDTH = 100
"""Of paragraphs, in characters, unless the terminal is narrower."""
HOW_TO_GO_ON = (
    "Save a change and run this again, or let `ddplab learn --watch` judge each save. `ddplab learn --hint` helps, "
    "and `ddplab learn --tutor` prints rules for an AI assistant."
)
SILENT_S = 8.0
"""After this time, a learner hears that the judge works."""
POLL_S = 0.1
"""How often `saves` looks at the file."""
Report = Callable[[str], None]
"""Receives one or several lines for the learner."""


def introduction(number: int) -> str:
    """Return task and reading of a rung, in lines that fit into the terminal; of the first also how to go on."""
    rung = RUNGS[number - 1]
    paragraphs = [rung.task, rung.reading, f"More: {rung.further}"] + [HOW_TO_GO_ON] * (number == 1)
    wrapped = [_filled(one, "  ", "  ") for one in paragraphs]
    return "\n\n".join([f"Rung {number} of {len(RUNGS)}: {rung.title}", *wrapped]) + "\n"


def _filled(text: str, first: str, others: str) -> str:
    """Wrap a paragraph to the terminal's width; `first` and `others` begin its first line and its other ones."""
    width = min(shutil.get_terminal_size((WIDTH, 24)).columns, WIDTH)
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def _fitted(text: object) -> str:
    """Return a text in lines that fit into the terminal, if the output is one; a pipe gets whole lines."""
    lines = str(text).splitlines()
    return "\n".join(_filled(line, "", "    ") for line in lines) if sys.stdout.isatty() else "\n".join(lines)


def strip(path: Path) -> str:
    """Return the progress of a learner's file as a row of squares, one for each rung."""
    passed = load_progress(path).passed
    return f"{'■' * passed}{'□' * (len(RUNGS) - passed)} {passed} of {len(RUNGS)} rungs"


def climb(judge: Judge, subject: LearnerClass, report: Report, *, introduces: bool = False) -> Judgement:
    """Judge a class from the present rung on, up to the first rung that is not passed; returns the last verdict.

    After a rung is passed, the rungs before are judged again, because a new idea may break an old one. The progress
    is kept beside the class's file. With `introduces`, the present rung's task is reported even if it was before.
    """
    path = Path(subject.path)
    passed = load_progress(path).passed
    if passed == len(RUNGS):
        report(f"All {len(RUNGS)} rungs are passed; they are judged again.")
        return _judged_again(judge, subject, len(RUNGS) + 1, report) or Judgement(len(RUNGS))
    for number in range(passed + 1, len(RUNGS) + 1):
        if (introduces and number == passed + 1) or number > load_progress(path).introduced:
            report(introduction(number))
            update_progress(path, introduced=number)
        verdict = judge_rung(judge, subject, number, report)
        if not verdict.passed:
            return verdict
    report(f"You have written a reducer: `ddplab conform {subject.name}` runs all checks on it.")
    return verdict


def judge_rung(judge: Judge, subject: LearnerClass, number: int, report: Report) -> Judgement:
    """Judge a class on one rung and those before; keeps the progress, reports the gain, returns the last verdict."""
    sentence = f"still judging rung {number}; a loop that never ends is stopped in a minute or two"
    patience = Timer(SILENT_S, report, [sentence])
    patience.start()
    try:
        verdict = judge.verdict(subject, number)
    finally:
        patience.cancel()
    report(_fitted(verdict))
    if not verdict.passed:
        return verdict
    if (broken := _judged_again(judge, subject, number, report)) is not None:
        return broken
    progress = load_progress(path := Path(subject.path))
    won: Gain = run_alone(judge.ranks, gain, subject, number, progress.iteration_ms.get(number - 1))
    progress = load_progress(path)  # another `learn` may have gone on meanwhile
    ours = f"  ours: {RUNGS[number - 1].lines}"
    report("\n".join(filter(None, [_fitted(f"  {won.sentence}"), won.picture, ours])).rstrip() + "\n")
    times = progress.iteration_ms | ({} if won.plain_ms is None else {number: won.plain_ms})
    update_progress(path, passed=max(number, progress.passed), iteration_ms=times)
    return verdict


def _judged_again(judge: Judge, subject: LearnerClass, below: int, report: Report) -> Judgement | None:
    """Judge the rungs below a number; reports and returns the first one that is not passed any more."""
    for number in range(1, below):
        if not (verdict := judge.verdict(subject, number)).passed:
            report(f"An earlier rung is broken.\n{_fitted(verdict)}")
            return verdict
    return None


def saves(path: Path, poll_s: float = POLL_S) -> Iterator[int]:
    """Yield the number of each version of a file: 0 for the present one, and the next one after each save.

    Raises ValueError if there is no file. One that vanishes later, as editors do while they save, is waited for.
    """
    if (known := _version(path)) is None:
        raise ValueError(f"{path}: expected a file to watch, got none")
    for number in count():
        yield number
        before: tuple[int, int] | None = known
        seen = before
        while seen in (None, known) or seen != before:  # an editor may still be writing
            time.sleep(poll_s)  # Python's library has no event for a changed file, so its size and time are polled
            before, seen = seen, _version(path)
        known = seen or known


def _version(path: Path) -> tuple[int, int] | None:
    """Return time and size of a file; None if there is none."""
    with suppress(OSError):  # it vanishes while an editor saves it, or its disk is away
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return None
