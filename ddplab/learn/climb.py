"""Climbing: judges the next rungs of a learner's file, keeps the progress, and watches the file for saves."""

import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from .gains import gain
from .judge import Judge, Judgement
from .learner_file import LearnerClass
from .progress import load_progress, update_progress
from .rungs import RUNGS

WIDTH = 100
"""Of paragraphs, in characters, unless the terminal is narrower."""
HOW_TO_GO_ON = (
    "Save a change and run this again, or let `ddplab learn --watch` judge each save. `ddplab learn --hint` helps, "
    "and `ddplab learn --tutor` prints rules for an AI assistant."
)
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
    """Return the progress of a learner's file as a row of squares, one for each rung.

    Raises:
        ValueError: The progress file is damaged.
    """
    passed = load_progress(path).passed
    return f"{'■' * passed}{'□' * (len(RUNGS) - passed)} {passed} of {len(RUNGS)} rungs"


def climb(judge: Judge, subject: LearnerClass, report: Report, *, introduces: bool = False) -> Judgement:
    """Judge a class from the present rung on, up to the first rung that is not passed; returns the last verdict.

    After a rung is passed, the rungs before are judged again, because a new idea may break an old one. The progress
    is kept beside the class's file. With `introduces`, the present rung's task is reported even if it was before.

    Raises:
        ValueError: The progress file is damaged.
    """
    path = Path(subject.path)
    progress = load_progress(path)
    if progress.passed == len(RUNGS):
        report(f"All {len(RUNGS)} rungs are passed; they are judged again.")
        return _judged_again(judge, subject, len(RUNGS) + 1, report) or Judgement(len(RUNGS))
    while True:
        number = progress.passed + 1
        if introduces or number > progress.introduced:
            report(introduction(number))
            introduces, progress = False, update_progress(path, introduced=number)
        verdict = judge_rung(judge, subject, number, report)
        if not verdict.passed:
            return verdict
        if number == len(RUNGS):
            report(f"You have written a reducer: `ddplab conform {subject.name}` runs all checks on it.")
            return verdict
        progress = load_progress(path)


def judge_rung(judge: Judge, subject: LearnerClass, number: int, report: Report) -> Judgement:
    """Judge a class on one rung and on those before; keeps the progress, reports the gain, returns the last verdict.

    Raises:
        ValueError: The progress file is damaged.
    """
    verdict = judge.verdict(subject, number)
    report(_fitted(verdict))
    if not verdict.passed:
        return verdict
    if (broken := _judged_again(judge, subject, number, report)) is not None:
        return broken
    progress = load_progress(path := Path(subject.path))
    won = gain(subject, RUNGS[number - 1], progress.iteration_ms.get(number - 1))
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

    Raises:
        ValueError: There is no file at first. One that vanishes later, as editors do while they save, is waited for.
    """
    if (known := _version(path)) is None:
        raise ValueError(f"{path}: expected a file to watch, got none")
    for number in count():
        yield number
        before: tuple[int, int] | None = known
        seen = before
        while seen in (None, known) or seen != before:  # an editor may still be writing
            time.sleep(poll_s)
            before, seen = seen, _version(path)
        known = seen or known


def _version(path: Path) -> tuple[int, int] | None:
    """Return time and size of a file; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size
