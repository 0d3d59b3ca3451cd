"""Uncertainty: half-width of the band that holds a collective's cost nine times in ten, as a fraction of the cost.

The figures are those of published nccl-tests logs: links described by latency and rate miss by 14 % across the
protocols of a library; a 16-GPU curve taken to 32, 64 and 128 GPUs misses by 14, 19 and 24 %. Inside a node and at
its border growth can miss by more, so where several world sizes were measured, the last is foretold from the others.
The errors of the figures themselves come on top: a data sheet's peak rates are 6-25 % above what messages reach.
"""

from collections.abc import Mapping
from math import log2

import numpy as np

from .growth import table_for
from .tables import Table

DESCRIBED = 0.14
"""Of described links, and of a world size that lies between measured ones."""
COVERED = 0.9
"""Part of the costs that the band holds."""
MOST = 0.9
"""A band never reaches down to zero."""
A_DOUBLING = 0.05
"""More for each further doubling beyond what was measured."""


def table_error(tables: Mapping[int, Table], world_size: int, missed: float) -> float:
    """Of a world size that was measured: the spread of the measurements. Of another: that, and the way to it.

    Args:
        tables: The measured world sizes.
        world_size: The one in question.
        missed: What growth missed before (`missed_before`); it is no better beyond.
    """
    if world_size in tables:
        return tables[world_size].spread
    nearest = min(tables, key=lambda measured: abs(log2(world_size / measured)))
    if min(tables) < world_size < max(tables):
        return min(tables[nearest].spread + DESCRIBED, MOST)
    doublings = abs(log2(world_size / nearest)) - 1
    return min(tables[nearest].spread + max(DESCRIBED, missed) + A_DOUBLING * max(doublings, 0.0), MOST)


def missed_before(tables: Mapping[int, Table], law: str) -> float:
    """What nine in ten costs of the largest measured world size stay within, foretold from the smaller ones.

    Only sizes that both sides measured count. 0 where there is nothing to compare.
    """
    *smaller, largest = sorted(tables)
    if not smaller:
        return 0.0
    foretold, found = table_for({n: tables[n] for n in smaller}, largest, law), tables[largest]
    common = (found.sizes_bytes >= foretold.sizes_bytes[0]) & (found.sizes_bytes <= foretold.sizes_bytes[-1])
    if not common.any():
        return 0.0
    times = np.maximum(found.ns[common], 1)
    return float(np.quantile(np.abs(foretold.costs_ns(found.sizes_bytes[common]) / times - 1), COVERED))
