"""Progress of a learner, in one file beside the class; nothing else is written."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ..reference.files.reading import Schema, read_schema
from ..reference.files.value_ranges import Count
from ..reference.files.writing import write_atomically
from .rungs import RUNGS

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Progress(Schema):
    """Progress on the ladder.

    Attributes:
        passed: Number of rungs passed so far, one after the other.
        introduced: Number of the last rung whose task was printed.
        hints: By number of the rung, how many hints were shown.
        iteration_ms: By number of the rung, the emulated iteration of the class that passed it.
    """

    passed: int = Field(default=0, ge=0, le=len(RUNGS))
    introduced: int = Field(default=0, ge=0, le=len(RUNGS))
    hints: dict[int, Count] = Field(default_factory=dict)
    iteration_ms: dict[int, Positive] = Field(default_factory=dict)


def progress_file(path: Path) -> Path:
    """Return where the progress of a learner's file is kept."""
    return path.with_suffix(".progress.json")


def load_progress(path: Path) -> Progress:
    """Read the progress of a learner's file; none if there is no progress yet.

    Raises:
        ValueError: The progress file is damaged; the message names it.
    """
    file = progress_file(path)
    if not file.exists():
        return Progress()
    return read_schema(Progress, file, what="progress on the ladder", cure="remove it to begin again")


def update_progress(path: Path, **changes: Any) -> Progress:
    """Read the progress, change the given fields, and write the progress.

    The file is read again because `--hint` may have counted a hint while `--watch` was judging.

    Raises:
        ValueError: The progress file is damaged, or a change is invalid.
    """
    progress = Progress.model_validate(load_progress(path).model_dump() | changes)
    write_atomically(progress_file(path), (progress.model_dump_json(indent=1) + "\n").encode())
    return progress


def next_hint(path: Path) -> str:
    """Return the next hint for the present rung, and count it; the last one comes again.

    Raises:
        ValueError: The progress file is damaged.
    """
    progress = load_progress(path)
    number = min(progress.passed + 1, len(RUNGS))
    shown = min(progress.hints.get(number, 0) + 1, len(RUNGS[number - 1].hints))
    update_progress(path, hints=progress.hints | {number: shown})
    rung = RUNGS[number - 1]
    return f"rung {number}, {rung.title}, hint {shown} of {len(rung.hints)}: {rung.hints[shown - 1]}"
