"""Growth: a table for a world size that was not measured, from those (of two ranks or more) that were.

Latency and bytes grow by different laws, and which of the two a size pays for is read from the segments of the table.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from .segments import segment_at, segments
from .tables import Table

Law = Callable[[float], float]
LATENCY_LAWS: dict[str, Law] = {"tree": np.log2, "ring": lambda ranks: ranks - 1}
"""How the hops on the longest way grow with the ranks; a tree comes first and wins a tie."""
UNMEASURED = {"nccl": "tree", "gloo": "ring"}
"""The law where only one world size was measured: that of the algorithm for small messages."""


def table_for(tables: Mapping[int, Table], world_size: int, law: str) -> Table:
    """A table for `world_size`, from tables of other world sizes; `law` is the latency's where the data is silent."""
    below, above = (
        max((n for n in tables if n < world_size), default=None),
        min((n for n in tables if n > world_size), default=None),
    )
    if below is not None and above is not None:
        return between(tables, below, above, world_size)
    nearest = above if below is None else below
    assert nearest is not None
    return grown(tables[nearest], nearest, world_size, LATENCY_LAWS[latency_law(tables, law)])


def between(tables: Mapping[int, Table], below: int, above: int, world_size: int) -> Table:
    """Times follow a power of the world size between two measured neighbours, at each size that either has."""
    small, large = tables[below], tables[above]
    sizes = np.union1d(small.sizes_bytes, large.sizes_bytes)
    share = np.log(world_size / below) / np.log(above / below)
    logs = [np.log(np.maximum(table.costs_ns(sizes), 1)) for table in (small, large)]
    return Table(sizes, np.rint(np.exp((1 - share) * logs[0] + share * logs[1])), max(small.spread, large.spread))


def grown(table: Table, measured: int, world_size: int, law: Law) -> Table:
    """Beyond what was measured: latency grows by `law`, time of bytes by a ring's 2 (n - 1) / n."""
    pieces = segments(table)
    shares = np.array([segment_at(pieces, size).latency_share(size) for size in table.sizes_bytes])
    latency = law(world_size) / law(measured)
    bytes_ = (1 - 1 / world_size) / (1 - 1 / measured)
    return Table(table.sizes_bytes, np.rint(table.ns * (shares * latency + (1 - shares) * bytes_)), table.spread)


def latency_law(tables: Mapping[int, Table], otherwise: str) -> str:
    """The law that the latencies of the measured world sizes follow best; `otherwise` where there is only one."""
    latencies = np.array([segments(table)[0].alpha_ns for table in tables.values()])
    if len(tables) < 2 or not latencies.all():
        return otherwise
    hops = {name: np.array([law(world_size) for world_size in tables]) for name, law in LATENCY_LAWS.items()}
    return min(LATENCY_LAWS, key=lambda name: _misfit(hops[name] / latencies))


def _misfit(ratios: NDArray[np.float64]) -> float:
    """Relative squared error of `latency = c * law` with the best c, from law / latency."""
    return float(len(ratios) - ratios.sum() ** 2 / (ratios @ ratios))
