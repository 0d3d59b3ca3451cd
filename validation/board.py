"""The board: any predictor's answers on the rows of the score, beside ours.

    python -m validation.board --method module:function

`data/board` has the inputs of each row as plain files, and apart from them the measured times.
"""

import csv
from functools import cache
from pathlib import Path
from typing import Any

from ddplab.reference.files.reading import Schema
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric

BOARD = Path(__file__).parent / "data" / "board"


class Row(Schema):
    """The inputs of one row: what was known before the iteration on `gpus` GPUs was measured."""

    name: str  #: unique, such as "i: DGX V100, ResNet-50, 25 MB, 16 GPUs"
    part: str  #: part of the score, "b" to "i"
    system: str  #: name of the case or of the run
    gpu: str | None  #: GPU or node, as the catalogue or the case names it
    gpus: int  #: number of GPUs to predict, one rank each
    gpus_per_node: int
    known_gpus: int  #: on how many GPUs the known iteration was measured
    known_ms: float  #: the known iteration, milliseconds
    model: str | None  #: name, or module:callable, of the model
    trace: str  #: file in `traces`: when the gradients of the known iteration are ready
    fabric: str  #: file in `fabrics`: links, or measured all-reduces
    settings: dict[str, Any]  #: buckets and other settings of the reducer, arguments of `ddplab.predict`
    source: str
    licence: str

    def load_trace(self) -> Trace:
        """Read the trace; rows of one file share it."""
        return _trace(self.trace)

    def load_fabric(self) -> Fabric:
        """Read the fabric."""
        return Fabric.load(BOARD / "fabrics" / self.fabric)


@cache
def _trace(name: str) -> Trace:
    return Trace.load(BOARD / "traces" / name)


Answer = float | tuple[float, float, float] | None
"""Milliseconds; or milliseconds and both ends of a 90 % interval; None: the method cannot take the row."""


@cache
def rows() -> tuple[Row, ...]:
    """The inputs of all rows."""
    return tuple(map(Row.model_validate_json, (BOARD / "inputs.jsonl").read_text().splitlines()))


def truths() -> dict[str, float]:
    """Measured milliseconds by name of the row."""
    with (BOARD / "truth.csv").open(newline="") as file:
        return {line["name"]: float(line["measured_ms"]) for line in csv.DictReader(file)}
