"""The rungs of the ladder: what to read, which checks judge, hints in three steps, likely mistakes; see `rungs.yaml`.

A rung asks for one idea. Its checks are those of the conformance kit and of `checks.py`, by name.
"""

from importlib import import_module
from inspect import getsourcelines
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter

from ..reference.files.reading import Schema, parse_yaml, read_text

FILE = Path(__file__).with_name("rungs.yaml")
SYMPTOM_UNMATCHED = "unmatched"
"""The symptom of ranks that launch different collectives, or wait for each other, in whatever words."""


class GainSettings(Schema):
    """Two emulated iterations to compare: ResNet-50 on 8 V100s over 10 Gbit/s.

    Attributes:
        before: Settings of the first one. None: the time of the class as it passed the rung before.
        after: Settings of the second one.
        registered_backwards: Whether the model registers its layers in the order in which gradients become ready.
        sharded: Whether a sharded Adam steps; before, without it.
        note: What the times do not show.
    """

    before: dict[str, Any] | None = None
    after: dict[str, Any] = Field(default_factory=dict)
    registered_backwards: bool = False
    sharded: bool = False
    note: str = ""


class Rung(Schema):
    """One idea.

    Attributes:
        title: Its name.
        task: What the class must do that it did not before.
        reading: Why, in one paragraph.
        code: `module:name`, whose lines show the idea in this project; named once the rung is passed.
        further: A tutorial, page or paper.
        checks: Names of checks, simple ones first.
        hints: From a nudge to nearly the code.
        mistakes: Likely mistakes by symptom: a regular expression that is found in `check: message` of a failed
            check, or `SYMPTOM_UNMATCHED`.
        gain: What to compare once the rung is passed.
    """

    title: str
    task: str
    reading: str
    code: str
    further: str
    checks: list[str] = Field(min_length=1)
    hints: list[str] = Field(min_length=3, max_length=3)
    mistakes: dict[str, str] = Field(default_factory=dict)
    gain: GainSettings = Field(default_factory=GainSettings)

    @property
    def lines(self) -> str:
        """The file and the lines of `code`."""
        module, _, name = self.code.partition(":")
        shown, first = getsourcelines(attrgetter(name)(import_module(module)))
        return f"{module.replace('.', '/')}.py, lines {first}-{first + len(shown) - 1}"


RUNGS: tuple[Rung, ...] = tuple(TypeAdapter(list[Rung]).validate_python(parse_yaml(read_text(FILE))))
"""All rungs, from the first."""
