"""The ladder in a notebook: `%load_ext ddplab.learn`, then a cell that begins with `%%rung` is judged."""

from pathlib import Path
from typing import Any

from .climb import climb, strip
from .judge import Judge
from .learner_file import LearnerClass
from .progress import next_hint
from .source_text import CLASS

NAME = "my_ddp"


def register(ipython: Any) -> None:
    """Add the magics `%%rung [NAME]` and `%rung_hint [NAME]`; NAME is that of the progress file, by default `my_ddp`.

    `%%rung` runs its cell here, so that the class can be tried out, and judges the class `MyDDP` of the cell, which
    must contain its own imports. Its ranks live as long as the notebook's kernel. `ipython` is the notebook's shell.
    """
    judge = Judge()

    def rung(line: str, cell: str) -> None:
        name = line.strip() or NAME
        if ipython.run_cell(cell).success:
            climb(judge, LearnerClass(f"{name}:{CLASS}", f"{name}.py", cell), print)
            print(strip(Path(f"{name}.py")))

    def rung_hint(line: str) -> None:
        print(next_hint(Path(f"{line.strip() or NAME}.py")))

    ipython.register_magic_function(rung, magic_kind="cell")
    ipython.register_magic_function(rung_hint, magic_kind="line")
