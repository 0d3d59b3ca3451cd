"""`ddplab learn`: a ladder of rungs, on which a learner writes a reducer."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from typer import Argument, Exit, Option

from ..reference.ranks.fork_server import start_server
from .shared_options import Json, check_outputs, refuse
from .terminal_output import show_table, write_json

_flushed = partial(print, flush=True)
HELP = {
    "file": "Your file, or FILE:CLASS; an empty class MyDDP is written if there is none.",
    "watch": "Judge again after each save, until Ctrl-C.",
    "hint": "Show the next of three hints for the present rung; judge nothing.",
    "tutor": "Print rules for an AI assistant that helps you; judge nothing.",
    "grade": "Judge all rungs and print points; progress is neither read nor written.",
    "junit": "With --grade: write the rungs as JUnit XML, for an autograder.",
}


def learn(
    file: Annotated[Path, Argument(metavar="FILE", help=HELP["file"])] = Path("my_ddp.py"),
    watch: Annotated[bool, Option("--watch", help=HELP["watch"])] = False,  # noqa: FBT002 - flags
    hint: Annotated[bool, Option("--hint", help=HELP["hint"])] = False,  # noqa: FBT002
    tutor: Annotated[bool, Option("--tutor", help=HELP["tutor"])] = False,  # noqa: FBT002
    grade: Annotated[bool, Option("--grade", help=HELP["grade"])] = False,  # noqa: FBT002
    junit: Annotated[Path | None, Option(metavar="PATH", help=HELP["junit"])] = None,
    json_path: Json = None,
) -> None:
    """Write a reducer yourself, in seventeen rungs, each one idea of a real one.

    Names the next rung, why it is there, and the first check that fails, with rank, parameter and ratio and the
    likely mistake. Once a rung is passed, prints what it has won on emulated GPUs, and where our code does it. FILE
    is written only if there is none; the progress is in FILE with the ending .progress.json. The exit status is 1 if
    the next rung is not passed.
    """
    excluded = watch or hint
    refuse({"--junit": junit and not grade}, "expected --grade too, which judges all rungs")
    refuse({"--grade": grade and excluded}, "expected neither --watch nor --hint, because a grade is one run")
    refuse({"--json": json_path and excluded}, "expected neither --watch nor --hint, which give no single result")
    if find_spec("hypothesis") is None:
        raise ValueError("learn: expected the package hypothesis; install it with `pip install 'ddplab[conform]'`")
    from ..learn.rungs import CLASS, TUTOR, load_progress, next_hint, write_skeleton

    path, _, name = str(file).partition(":")
    file, name = Path(path), name or CLASS
    check_outputs(junit, json_path, inputs=[file])
    if tutor:
        print(TUTOR.read_text(), end="")
        return
    if hint:
        missing = f"expected your file, {file}, got none; `ddplab learn {file}` writes it"
        refuse({"--hint": not file.exists()}, missing)
        print(next_hint(file))
        return
    if not grade:
        if write_skeleton(file):
            print(f"{file}: an empty class to begin with")
        _flushed("starting ranks")
    start_server()  # it imports torch while this process does
    from ..learn.judge import Judge, climb, grades, saves, strip
    from ..learn.learner_file import learner_class

    with Judge() as judge:
        if grade:
            result = grades(judge, learner_class(file, name), junit)
            cells = [
                {
                    "rung": f"{rung['rung']}",
                    "name": rung["title"],
                    "points": f"{rung['points']}",
                    "main cause": rung["likely"] or rung["message"][:120],
                }
                for rung in result["rungs"]
            ]
            show_table(cells, f"{result['subject']}: {result['points']} of {result['possible']} points")
            write_json(json_path, result)
            return
        for number in saves(file) if watch else ():  # until Ctrl-C
            try:
                climb(judge, learner_class(file, name), _flushed, introduces=not number)
                _flushed(strip(file))
            except ValueError as error:  # a damaged file is saved again sooner or later
                _flushed(str(error))
            judge.prepare()
            _flushed(f"watching {file}; Ctrl-C ends\n")
        verdict = climb(judge, learner_class(file, name), print)
    is_broken = not verdict.passed and verdict.rung <= load_progress(file).passed
    print(strip(file) + f", of which rung {verdict.rung} is broken" * is_broken)
    document = {"rung": verdict.rung, "passed": verdict.passed, "check": verdict.check, "message": verdict.message}
    write_json(json_path, document | {"likely": verdict.likely, "rungs_passed": load_progress(file).passed})
    if not verdict.passed:
        raise Exit(1)
