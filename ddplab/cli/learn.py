"""`ddplab learn`: a ladder of rungs, on which a learner writes a reducer."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from reference.fork_server import start_server

from .shared_options import Json, check_outputs
from .terminal_output import show_table, write_json

if TYPE_CHECKING:
    from ..learn.judge import Judge


def learn(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Your file, or FILE:CLASS; an empty class MyDDP is written if there is none."
        ),
    ] = Path("my_ddp.py"),
    watch: Annotated[  # noqa: FBT002 - a flag of the command line
        bool, typer.Option("--watch", help="Judge again after each save, until Ctrl-C.")
    ] = False,
    hint: Annotated[  # noqa: FBT002 - as above
        bool, typer.Option("--hint", help="Show the next of three hints for the present rung; judge nothing.")
    ] = False,
    tutor: Annotated[  # noqa: FBT002 - as above
        bool, typer.Option("--tutor", help="Print rules for an AI assistant that helps you; judge nothing.")
    ] = False,
    grade: Annotated[  # noqa: FBT002 - as above
        bool,
        typer.Option("--grade", help="Judge all rungs and print points; progress is neither read nor written."),
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="With --grade: write the rungs as JUnit XML, for an autograder."),
    ] = None,
    json_path: Json = None,
) -> None:
    """Write a reducer yourself, in seventeen rungs, each one idea of a real one.

    Names the next rung, why it is there, and the first check that fails, with rank, parameter and ratio and the
    likely mistake. Once a rung is passed, prints what it has won on emulated GPUs, and where our code does it. FILE
    is written only if there is none; the progress is in FILE with the ending .progress.json. The exit status is 1 if
    the next rung is not passed.
    """
    if junit is not None and not grade:
        raise ValueError("--junit: expected --grade too, which judges all rungs")
    if grade and (watch or hint):
        raise ValueError("--grade: expected neither --watch nor --hint, because a grade is one run")
    if json_path is not None and (watch or hint):
        raise ValueError("--json: expected neither --watch nor --hint, which give no single result")
    if find_spec("hypothesis") is None:
        raise ValueError("learn: expected the package hypothesis; install it with `pip install 'ddplab[conform]'`")
    from ..learn.progress import next_hint
    from ..learn.source_text import CLASS, TUTOR, write_skeleton

    path, _, name = str(file).partition(":")
    file, name = Path(path), name or CLASS
    check_outputs(junit, json_path, inputs=[file])
    if tutor:
        print(TUTOR.read_text(), end="")
        return
    if hint:
        print(next_hint(file))
        return
    if not grade:
        if write_skeleton(file):
            print(f"{file}: an empty class to begin with")
        _flushed("starting ranks")
    start_server()  # it imports torch while this process does
    from ..learn.judge import Judge

    with Judge() as judge:
        if grade:
            _grade(judge, file, name, junit, json_path)
        elif watch:
            _watch(judge, file, name)
        else:
            _climb(judge, file, name, json_path)


def _climb(judge: "Judge", file: Path, name: str, json_path: Path | None) -> None:
    from ..learn.climb import climb, strip
    from ..learn.learner_file import learner_class
    from ..learn.progress import load_progress

    verdict = climb(judge, learner_class(file, name), print)
    print(strip(file))
    document = {"rung": verdict.rung, "passed": verdict.passed, "check": verdict.check, "message": verdict.message}
    progress = load_progress(file)
    write_json(json_path, document | {"likely": verdict.likely, "rungs_passed": progress.passed})
    if not verdict.passed:
        raise typer.Exit(1)


def _watch(judge: "Judge", file: Path, name: str) -> None:
    from ..learn.climb import climb, saves, strip
    from ..learn.learner_file import learner_class

    for number in saves(file):
        try:
            climb(judge, learner_class(file, name), _flushed, introduces=not number)
            _flushed(strip(file))
        except ValueError as error:  # a damaged file is saved again sooner or later
            _flushed(str(error))
        judge.prepare()
        _flushed(f"watching {file}; Ctrl-C ends\n")


def _flushed(text: str) -> None:
    print(text, flush=True)


def _grade(judge: "Judge", file: Path, name: str, junit: Path | None, json_path: Path | None) -> None:
    from ..learn.grade import grade, to_json, write_grade
    from ..learn.learner_file import learner_class
    from ..learn.rungs import RUNGS

    subject = learner_class(file, name)
    verdicts = grade(judge, subject)
    rows = [
        {
            "rung": f"{one.rung}",
            "name": RUNGS[one.rung - 1].title,
            "points": f"{int(one.passed)}",
            "main cause": one.likely or one.message[:120],
        }
        for one in verdicts
    ]
    show_table(rows, f"{subject.name}: {sum(one.passed for one in verdicts)} of {len(verdicts)} points")
    write_json(json_path, to_json(subject, verdicts))
    if junit is not None:
        write_grade(junit, subject, verdicts)
