"""The ladder in a notebook: `%load_ext ddplab.learn`, then a cell that begins with `%%rung` is judged."""

import re
from pathlib import Path
from typing import Any

from .judge import Judge, climb, judge_rung, strip
from .learner_file import LearnerClass
from .rungs import CLASS, RUNGS, TO_WRITE, next_hint

NAME = "my_ddp"
"""Of the module that the cells make; its progress is the only file that is written."""


def register(ipython: Any) -> None:
    """Add the magics `%%rung [NUMBER]` and `%rung_hint`.

    `%%rung` runs its cell here, so that the class can be tried out, and judges the class `MyDDP` of the cell, which
    must contain its own imports: from the present rung on, or only on rung NUMBER and those before. With a number,
    the cell goes on from the cells of lower numbers and may begin with `class MyDDP(MyDDP):`. The ranks live as
    long as the notebook's kernel.
    """
    judge = Judge()
    cells: dict[int, str] = {}

    def rung(line: str, cell: str) -> None:
        number = int(line) if line.strip().isdecimal() else 0
        if line.strip() and not 0 < number <= len(RUNGS):
            print(f"%%rung {line.strip()}: expected the number of a rung, from 1 to {len(RUNGS)}")
            return
        cells.pop(number, None)
        if TO_WRITE in cell:
            print("not attempted")
            return
        above = "".join(f"{cells[lower].rstrip()}\n" for lower in sorted(cells) if 0 < lower < number)
        cells[number] = cell
        if not ipython.run_cell(above + cell).success:
            return

        def report(text: str) -> None:
            print(re.sub(rf"{NAME}\.py, line (\d+)", lambda found: _place(int(found[1]) - above.count("\n")), text))

        subject = LearnerClass(f"{NAME}:{CLASS}", f"{NAME}.py", above + cell)
        judge_rung(judge, subject, number, report) if number else climb(judge, subject, report)
        print(strip(Path(f"{NAME}.py")))

    def rung_hint(_line: str) -> None:
        print(next_hint(Path(f"{NAME}.py")))

    ipython.register_magic_function(rung, magic_kind="cell")
    ipython.register_magic_function(rung_hint, magic_kind="line")


def _place(line: int) -> str:
    """Name a line as JupyterLab counts it, where the magic is line 1."""
    return f"line {line + 1} of the cell" if line > 0 else "a line of an earlier cell"
