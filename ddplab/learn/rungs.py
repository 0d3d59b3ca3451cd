"""The rungs of the ladder, and how far a learner has come on them.

A rung asks for one idea: what to read, which checks judge, hints in three steps, likely mistakes; see `rungs.yaml`.
Its checks are those of the conformance kit and of `checks.py`, by name.
"""

from importlib import import_module
from inspect import getsourcelines
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from ..reference.files.reading import Schema, parse_yaml, read_schema, read_text
from ..reference.files.value_ranges import Count
from ..reference.files.writing import write_atomically

FILE = Path(__file__).with_name("rungs.yaml")
SYMPTOM_UNMATCHED = "unmatched"
"""The symptom of ranks that launch different collectives, or wait for each other, in whatever words."""


class GainSettings(Schema):
    """Two emulated iterations to compare: ResNet-50 on 8 V100s over 10 Gbit/s."""

    before: dict[str, Any] | None = None
    """Settings of the first one. None stands for the class as it passed the rung before."""
    after: dict[str, Any] = Field(default_factory=dict)  #: settings of the second one
    registered_backwards: bool = False  #: whether layers are registered in the order in which gradients become ready
    sharded: bool = False  #: whether a sharded Adam steps; before, without it
    note: str = ""  #: what the times do not show


class Rung(Schema):
    """One idea."""

    title: str
    task: str  #: what the class must do that it did not before
    reading: str  #: why, in one paragraph
    code: str  #: what shows the idea in this project, as module, colon and name; named once the rung is passed
    further: str  #: a tutorial, page or paper
    checks: list[str] = Field(min_length=1)  #: names of checks, simple ones first
    hints: list[str] = Field(min_length=3, max_length=3)  #: from a nudge to nearly the code
    mistakes: dict[str, str] = Field(default_factory=dict)
    """Likely mistakes by symptom, which is `SYMPTOM_UNMATCHED` or a regular expression that is found in the words
    `check: message` of a failed check."""
    gain: GainSettings = Field(default_factory=GainSettings)  #: what to compare once the rung is passed

    @property
    def lines(self) -> str:
        """The file and the lines of `code`."""
        module, _, name = self.code.partition(":")
        shown, first = getsourcelines(attrgetter(name)(import_module(module)))
        return f"{module.replace('.', '/')}.py, lines {first}-{first + len(shown) - 1}"


RUNGS: tuple[Rung, ...] = tuple(TypeAdapter(list[Rung]).validate_python(parse_yaml(read_text(FILE))))

# Text that a learner begins with

TUTOR = Path(__file__).with_name("tutor.md")
"""Rules for an AI assistant that helps a learner."""
CLASS = "MyDDP"
"""Name of the learner's class."""
TO_WRITE = "...  # your code"
"""Stands in a cell for the part that the learner writes."""
SKELETON = Path(__file__).with_name("skeleton.txt").read_text()


def check_name(path: Path) -> None:
    """Raise ValueError if a learner's file cannot be imported by its name."""
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise ValueError(f"{path}: expected a Python file whose name is a name in Python, such as my_ddp.py")


def write_skeleton(path: Path) -> bool:
    """Write an empty class to begin with, unless there is a file; returns whether it was. Errors: `check_name`."""
    check_name(path)
    if path.exists():
        return False
    write_atomically(path, SKELETON.encode())
    return True


# Progress of a learner, in one file beside the class; nothing else is written


class Progress(Schema):
    """Progress on the ladder."""

    passed: int = Field(default=0, ge=0, le=len(RUNGS))  #: number of rungs passed so far, one after the other
    introduced: int = Field(default=0, ge=0, le=len(RUNGS))  #: number of the last rung whose task was printed
    hints: dict[int, Count] = Field(default_factory=dict)  #: by number of the rung, how many hints were shown
    iteration_ms: dict[int, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """By number of the rung, the emulated iteration of the class that passed it."""


def progress_file(path: Path) -> Path:
    """Return where the progress of a learner's file is kept."""
    return path.with_suffix(".progress.json")


def load_progress(path: Path) -> Progress:
    """Read the progress of a learner's file, none at first; a ValueError names the progress file if it is damaged."""
    file = progress_file(path)
    if not file.exists():
        return Progress()
    return read_schema(Progress, file, what="progress on the ladder", cure="remove it to begin again")


def update_progress(path: Path, **changes: Any) -> Progress:
    """Read the progress, change the given fields, and write the progress.

    The file is read again because `--hint` may have counted a hint while `--watch` was judging. Raises ValueError as
    `load_progress` does, and if a change is invalid.
    """
    progress = Progress.model_validate(load_progress(path).model_dump() | changes)
    write_atomically(progress_file(path), (progress.model_dump_json(indent=1) + "\n").encode())
    return progress


def next_hint(path: Path) -> str:
    """Return the next hint for the present rung, and count it; the last one comes again. Errors: `load_progress`."""
    progress = load_progress(path)
    number = min(progress.passed + 1, len(RUNGS))
    shown = min(progress.hints.get(number, 0) + 1, len(RUNGS[number - 1].hints))
    update_progress(path, hints=progress.hints | {number: shown})
    rung = RUNGS[number - 1]
    return f"rung {number}, {rung.title}, hint {shown} of {len(rung.hints)}: {rung.hints[shown - 1]}"
