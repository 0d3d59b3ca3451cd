"""Extrapolation: tables of all-reduces for world sizes that were not measured.

Each measured time has a fixed part, its latency, and a part for its bytes (`measured_tables.segments`). With the
world size the latency grows as the hops of a tree or a ring, and the bytes as on a ring. If the links are described,
the latencies of the further hops are added, and the bytes grow by the ratio of the rates, because no link reaches the
rate of its data sheet.

NCCL also changes protocols and channels with the world size, which no such law knows. For it, the growth that the
tables themselves show from one world size to the next counts as much as the law.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .algorithms import Levels, Library, ring, tree
from .measured_tables import Table, segment_at, segments
from .topology import Topology

Law = Callable[[int], float]
"""Relative cost by world size."""
LATENCY_LAWS: dict[str, Law] = {"tree": lambda ranks: float(np.log2(ranks)), "ring": lambda ranks: ranks - 1}
"""Hops on the longest path by world size; the tree comes first and is used if both fit equally well."""
DEFAULT_LATENCY_LAW: dict[Library, str] = {"nccl": "tree", "gloo": "ring"}
"""Law of each library if only one world size was measured: that of its algorithm for small messages."""
WEIGHT_OF_TABLES: dict[Library, float] = {"nccl": 0.5, "gloo": 0.0}
"""Weight of the growth that the tables show, beside that of the law; Gloo always runs the same ring."""


class Growth(NamedTuple):
    """How an all-reduce grows with the world size."""

    latency: Law | None  # relative latency; None: that of the hops is described
    hops_ns: Law  # nanoseconds of all hops, if they are described
    ns_per_byte: Law  # relative time of a byte
    levels: Law  # number of levels of links in use; growth that tables show on one number says nothing of another
    weight_of_tables: float  # see `WEIGHT_OF_TABLES`

    def of(self, table: Table, measured: int, ranks: int) -> NDArray[np.float64]:
        """Return the times on `ranks` ranks relative to those on `measured` ranks in `table`; shape [sizes]."""
        pieces = segments(table)
        shares = np.array([segment_at(pieces, size).latency_share(size) for size in table.sizes_bytes])
        bytes_grow = self.ns_per_byte(ranks) / self.ns_per_byte(measured)
        if self.latency is None:
            at_rate_ns = pieces[-1].ns_per_byte * table.sizes_bytes
            added_ns = self.hops_ns(ranks) - self.hops_ns(measured) + (bytes_grow - 1) * at_rate_ns
            return 1 + added_ns / np.maximum(1, table.ns)
        return shares * self.latency(ranks) / self.latency(measured) + (1 - shares) * bytes_grow


def growth_of(tables: Mapping[int, Table], library: Library, topology: Topology | None) -> Growth:
    """Return the growth for these measured tables; without a topology, all links are equal."""
    weight = WEIGHT_OF_TABLES[library]
    if topology is None:
        law = LATENCY_LAWS[latency_law(tables, DEFAULT_LATENCY_LAW[library])]
        return Growth(law, lambda _ranks: 0.0, lambda ranks: 1 - 1 / ranks, lambda _ranks: 1, weight)

    def in_use(ranks: int) -> Levels:
        return [level for level in topology.in_use(ranks) if level.size > 1]

    def hops_ns(ranks: int) -> float:
        """NCCL uses trees between nodes, and chains inside them; Gloo a ring."""
        algorithm = tree if library == "nccl" and len(in_use(ranks)) > 1 else ring
        return algorithm(topology.in_use(ranks)).latency_ns

    return Growth(None, hops_ns, lambda n: ring(in_use(n)).ns_per_byte, lambda n: len(in_use(n)), weight)


def extrapolated_table(tables: Mapping[int, Table], world_size: int, growth: Growth) -> Table:
    """Make a table for `world_size` from tables of other world sizes, at least one and all of several ranks."""
    smaller = [measured for measured in tables if measured < world_size]
    larger = [measured for measured in tables if measured > world_size]
    if smaller and larger:
        return table_between(tables, max(smaller), min(larger), world_size)
    return table_beyond(tables, max(smaller) if smaller else min(larger), world_size, growth)


def table_between(tables: Mapping[int, Table], below: int, above: int, world_size: int) -> Table:
    """Make a table between two measured world sizes; at each message size, time follows a power of the ranks."""
    small, large = tables[below], tables[above]
    sizes = np.union1d(small.sizes_bytes, large.sizes_bytes)
    share = np.log(world_size / below) / np.log(above / below)
    logs = [np.log(np.maximum(table.costs_ns(sizes), 1)) for table in (small, large)]
    return Table(sizes, np.rint(np.exp((1 - share) * logs[0] + share * logs[1])), max(small.spread, large.spread))


def table_beyond(tables: Mapping[int, Table], measured: int, world_size: int, growth: Growth) -> Table:
    """Make a table for `world_size` ranks from that of `measured` ranks and from the growth up to it."""
    table = tables[measured]
    added = growth.of(table, measured, world_size) - 1
    if growth.levels(world_size) == growth.levels(measured):
        others = [n for n in tables if n != measured and growth.levels(n) == growth.levels(measured)]
        by_law = {n: growth.of(table, measured, n) for n in others}
        added *= _shown_by_law(tables, table, by_law, growth.weight_of_tables)
    return Table(table.sizes_bytes, np.rint(table.ns * np.maximum(0, 1 + added)), table.spread)


def _shown_by_law(
    tables: Mapping[int, Table], table: Table, by_law: Mapping[int, NDArray[np.float64]], weight: float
) -> NDArray[np.float64]:
    """Return the growth that the tables show as a multiple of the law's, drawn towards 1; by message size.

    The multiple is that of the least squares over the world sizes in which a message size was measured.
    """
    product, square = np.zeros(len(table.ns)), np.zeros(len(table.ns))
    for ranks, relative in by_law.items():
        other = tables[ranks]
        inside = (other.sizes_bytes[0] <= table.sizes_bytes) & (table.sizes_bytes <= other.sizes_bytes[-1])
        law = np.where(inside, relative - 1, 0.0)
        product += law * (other.costs_ns(table.sizes_bytes) / np.maximum(1, table.ns) - 1)
        square += law**2
    shown = np.where(square > 0, product / np.where(square > 0, square, 1), 1.0)
    return np.maximum(0, 1 + weight * (shown - 1))


def latency_law(tables: Mapping[int, Table], default: str) -> str:
    """Return the law that fits the latencies best; `default` for a single table, or if a latency is zero."""
    latencies = np.array([segments(table)[0].alpha_ns for table in tables.values()])
    if len(tables) < 2 or not latencies.all():
        return default
    hops = {name: np.array([law(world_size) for world_size in tables]) for name, law in LATENCY_LAWS.items()}
    return min(LATENCY_LAWS, key=lambda name: _misfit(hops[name] / latencies))


def _misfit(ratios: NDArray[np.float64]) -> float:
    """Return the relative squared error of `latency = c * law` with the best c, given law / latency by world size."""
    return float(len(ratios) - ratios.sum() ** 2 / (ratios @ ratios))
