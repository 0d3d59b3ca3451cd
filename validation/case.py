"""Case files: published figures, split into what a prediction may know (inputs) and what it is held against (truth).

One TOML file is one case. `kind` says which record it is; the fields of each say what they hold, in which unit. Every
constant carries its source.
"""

import json
import tomllib
from pathlib import Path

from pydantic import ValidationError

from reference.schema import first_problem

from .all_reduce_case import AllReduceCase
from .training_case import IterationsCase, SchedulesCase

Case = AllReduceCase | IterationsCase | SchedulesCase
KINDS: dict[str, type[Case]] = {
    "all_reduce": AllReduceCase,
    "iterations": IterationsCase,
    "schedules": SchedulesCase,
}
ADVICE = "see validation/README.md"


def load_case(path: Path) -> Case:
    """Read a case file.

    Raises:
        ValueError: It is missing, not TOML, or not a case; one line, which names file, field and reason.
    """
    try:
        written = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}; {ADVICE}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not TOML: {error}; {ADVICE}") from None
    kind = written.get("kind")
    if kind not in KINDS:
        raise ValueError(f"{path}: kind: expected one of {', '.join(KINDS)}, got {kind!r}; {ADVICE}")
    try:
        return KINDS[kind].model_validate_json(json.dumps(written, default=str))
    except ValidationError as error:
        raise ValueError(f"{path}: {first_problem(error)}; {ADVICE}") from None
