"""Part (j): whether measured throughput lies in the range that `ddplab plan` answers.

Its rows are those of parts (d) and (i) that start from the iteration on one GPU, as `ddplab plan --step-ms` does. A
plan's range of the throughput is that of the predicted iteration, so nothing is predicted again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .comparison import Comparison, Part

PARTS: tuple[Part, ...] = ("d", "i")
FROM_ONE = "1 GPU"
LEAST_INSIDE = 0.85
"""Least part of the rows whose measured throughput has to be in the range."""


class Inside(NamedTuple):
    """Rows of one kind.

    Attributes:
        kind: One node, several nodes, or all rows.
        rows: Number of rows.
        inside: How many have a measured throughput in the range.
    """

    kind: str
    rows: int
    inside: int

    @property
    def is_met(self) -> bool:
        """Whether enough rows are inside."""
        return self.inside >= LEAST_INSIDE * self.rows


def count_inside(rows: Sequence[Comparison]) -> list[Inside]:
    """Count the rows of one node, of several nodes, and of both; empty if no row starts from one GPU."""
    planned = [row for row in rows if row.part in PARTS and row.calibrated_from == FROM_ONE and row.counts]
    kinds = {
        "one node": [row for row in planned if not row.several_nodes],
        "several nodes": [row for row in planned if row.several_nodes],
        "all": planned,
    }
    return [
        Inside(kind, len(members), sum(row.is_inside for row in members))
        for kind, members in kinds.items()
        if members
    ]
