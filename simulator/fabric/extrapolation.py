"""Extrapolation: tables of all-reduces for world sizes that were not measured.

Each measured time has a fixed part, its latency, and a part for its bytes (`measured_tables.segments`). With the
world size the latency grows as the hops of a tree or a ring, and the bytes as on a ring. If the links are described,
the latencies of the further hops are added, and the bytes grow by the ratio of the rates, because no link reaches the
rate of its data sheet.

NCCL also changes protocols and channels with the world size, which no such law knows. For it, the growth that the
tables themselves show from one world size to the next counts as much as the law.

On several nodes NCCL's trees need one more level for each doubling of the nodes. A level adds two hops. The pieces of
a message also wait for the first one, for a time in proportion to the square root of the message (Sanders, Speck and
Träff 2009: with the best number of pieces a pipeline takes (sqrt(latency) + sqrt(bytes time))^2). This wait is a
property of the network, 13 us for 1 MiB with InfiniBand (NetX-lab/Echo) and 48 us with Slingshot
(boeschf/nccl-benchmark-on-alps-2025), so it is read from the tables.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
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
USUAL_NODE = 8
"""GPUs per node where the links are not described."""
LEVEL_NS = 17_000.0
"""Two hops of a tree with LL128 between nodes (NVIDIA/nccl, src/graph/tuning.cc)."""
SHOWN_BY_FIRST_LEVEL = 0.6
"""Part of the growth from one node to two that a further doubling repeats; the rest is the slower link. Fitted on
NetX-lab/Echo and Alps, where it is 0.5 and 0.6."""
FITTED_BYTES = (2**18, 2**26)
"""Message sizes from which the wait of a level is read: smaller ones are latency, larger ones mostly rings."""


class Growth(NamedTuple):
    """How an all-reduce grows with the world size."""

    latency: Law | None  #: relative latency; None: that of the hops is described
    hops_ns: Law  #: nanoseconds of all hops, if they are described
    ns_per_byte: Law  #: relative time of a byte
    levels: Law  #: number of levels of links in use; growth that tables show on one number says nothing of another
    weight_of_tables: float  #: see `WEIGHT_OF_TABLES`
    node: int | None  #: ranks of a node from which trees grow by levels; None: they do not

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
        node = USUAL_NODE if library == "nccl" else None
        levels = (lambda _ranks: 1) if node is None else (lambda ranks: 1 + (ranks > USUAL_NODE))
        return Growth(law, lambda _ranks: 0.0, lambda ranks: 1 - 1 / ranks, levels, weight, node)

    def in_use(ranks: int) -> Levels:
        return [level for level in topology.in_use(ranks) if level.size > 1]

    def hops_ns(ranks: int) -> float:
        """NCCL uses trees between nodes, and chains inside them; Gloo a ring."""
        algorithm = tree if library == "nccl" and len(in_use(ranks)) > 1 else ring
        return algorithm(topology.in_use(ranks)).latency_ns

    node = topology.levels[0].size if library == "nccl" and len(topology.levels) > 1 else None
    return Growth(None, hops_ns, lambda n: ring(in_use(n)).ns_per_byte, lambda n: len(in_use(n)), weight, node)


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
    wait = None if growth.node is None or measured <= growth.node else wait_of_a_level(tables, growth.node)
    if wait is not None and world_size > measured:
        level_ns = LEVEL_NS + wait * np.sqrt(table.sizes_bytes)
        return Table(table.sizes_bytes, np.rint(table.ns + level_ns * np.log2(world_size / measured)), table.spread)
    added = growth.of(table, measured, world_size) - 1
    if growth.levels(world_size) == growth.levels(measured):
        others = [n for n in tables if n != measured and growth.levels(n) == growth.levels(measured)]
        by_law = {n: growth.of(table, measured, n) for n in others}
        added *= _shown_by_law(tables, table, by_law, growth.weight_of_tables)
    return Table(table.sizes_bytes, np.rint(table.ns * np.maximum(0, 1 + added)), table.spread)


def wait_of_a_level(tables: Mapping[int, Table], node: int) -> float | None:
    """Return the nanoseconds for which a message of one byte waits at each doubling of the nodes; None: not shown.

    It is the weighted median over pairs of measured world sizes and over message sizes. Later pairs and larger
    messages have more weight.
    """
    waits, weights = [], []
    for fewer, more in pairwise(n for n in tables if n >= node):
        sizes = np.intersect1d(tables[fewer].sizes_bytes, tables[more].sizes_bytes)
        sizes = sizes[(sizes >= FITTED_BYTES[0]) & (sizes <= FITTED_BYTES[1])]
        grown_ns = (tables[more].costs_ns(sizes) - tables[fewer].costs_ns(sizes)) / np.log2(more / fewer)
        grown_ns *= SHOWN_BY_FIRST_LEVEL if fewer == node else 1.0
        waits.append((grown_ns - LEVEL_NS) / np.sqrt(sizes))
        weights.append(min(1.0, 0.3 * fewer / node) * sizes**0.25)
    if not sum(map(len, waits)):
        return None
    found, weight = np.concatenate(waits), np.concatenate(weights)
    order = found.argsort()
    reached = np.cumsum(weight[order]) - weight[order] / 2
    return max(0.0, float(np.interp(weight.sum() / 2, reached, found[order])))


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

    def misfit(name: str) -> float:
        """Return the relative squared error of `latency = c * law` with the best c."""
        ratios = np.array([LATENCY_LAWS[name](world_size) for world_size in tables]) / latencies
        return float(len(ratios) - ratios.sum() ** 2 / (ratios @ ratios))

    return min(LATENCY_LAWS, key=misfit)
