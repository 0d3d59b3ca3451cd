"""Closed formulas for the cost of each collective algorithm on a hierarchy of links.

`levels` is the hierarchy from the innermost level outwards, each level with its number of members in use; the product
of these numbers is the world size. A level with one member costs nothing. A link carries its full rate in both
directions at the same time. Additions cost no time because they overlap with the transfer. In the formulas S is the
size of the message, B a level's rate and m its number of members.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, log2, prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...reference.message_sizes import GLOO_THREADS
from .measured_tables import Sizes, Table
from .nccl_cost_model import NcclCost, nccl_all_reduce, nccl_broadcast, published_multiple
from .topology import Level

Levels = Sequence[Level]
POWERS_OF_TWO = 2 ** np.arange(41)
"""Message sizes in bytes, up to 1 TiB."""


class Cost(NamedTuple):
    """The cost of a collective by its size: `latency_ns + ns_per_byte * size`, or that of a pipeline."""

    latency_ns: float  # of an empty message
    ns_per_byte: float
    fill: int = 0  # steps after the first one until the first piece reaches the last rank; 0: no pipeline

    def costs_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        """Return the nanoseconds by size; a pipeline uses the number of pieces that is best for the size.

        N pieces take `(fill + N) (a + b / N)`, where a is the latency of a step and b the time of the bytes. The best
        N is `sqrt(fill b / a)`, at least 1 (the usual trade of pipelined trees; Sanders, Speck and Träff 2009).
        """
        step_ns = self.latency_ns / (self.fill + 1)
        bytes_ns = sizes_bytes.astype(np.float64) * self.ns_per_byte
        whole = (self.fill + 1) * (step_ns + bytes_ns)
        if not self.fill:
            return whole
        waiting_ns = self.fill * step_ns
        pieces = waiting_ns + bytes_ns + 2 * np.sqrt(waiting_ns * bytes_ns)
        return np.where(self.fill * bytes_ns <= step_ns, whole, pieces)


def ring(levels: Levels) -> Cost:
    """One flat ring through all ranks: 2 (n - 1) steps that send S / n each (Patarasu and Yuan 2009).

    Every link of the ring carries the same bytes, so the slowest level sets the pace. A piece goes from the first
    rank to the last twice, once to be reduced and once to be distributed, and enters each group once on each way.
    """
    n = prod(level.size for level in levels)
    return Cost(2 * _latency_ns(_chain_hops(levels)), sent_share(n) * _slowest_ns_per_byte(levels))


def tree(levels: Levels) -> Cost:
    """Two binary trees, each for half of the message, with chains inside the innermost groups; NCCL since 2.4.

    A member that has two children in one tree is a leaf in the other (Sanders, Speck and Träff 2009). It therefore
    has at most four neighbours, fewer where a level has few members, and sends half of the message to each. The
    chains of different pieces start at different ranks, so each rank sends 2 (m - 1) / m of S. A single level has no
    inner groups and so no chains.
    """
    chain, trees = (levels[0], levels[1:]) if len(levels) > 1 else (None, levels)
    depths = [(ceil(log2(level.size)), level) for level in trees]
    loads = [min(level.size, 4) / 2 * level.ns_per_byte for level in trees if level.size > 1]
    if chain is not None:
        depths.append((chain.size - 1, chain))
        loads.append(sent_share(chain.size) * chain.ns_per_byte)
    return _pipeline(2, depths, max(loads, default=0.0))


def in_network(levels: Levels) -> Cost:
    """Reduction in the switches (SHARP, NVLS): on a level that reduces, each byte goes up once and comes down once.

    Both directions overlap, so the level takes S / B. A level that does not reduce is a ring inside its groups. The
    levels work on different pieces at the same time, so the slowest sets the pace; filling the pipeline costs no
    time.
    """
    used = [level for level in levels if level.size > 1]
    hops = [(2 if level.reduces else 2 * (level.size - 1), level) for level in used]
    loads = [(1.0 if level.reduces else sent_share(level.size)) * level.ns_per_byte for level in used]
    return Cost(_latency_ns(hops), max(loads, default=0.0))


def tree_broadcast(levels: Levels) -> Cost:
    """Gloo's broadcast, along a binomial tree (Thakur, Rabenseifner and Gropp 2005).

    In each of log2 m steps every rank that has the whole message sends it to one that does not.
    """
    depths = [(ceil(log2(level.size)), level) for level in levels]
    return Cost(_latency_ns(depths), sum(depth * level.ns_per_byte for depth, level in depths))


def ring_broadcast(levels: Levels) -> Cost:
    """NCCL's broadcast: a pipeline of pieces along a chain of all ranks."""
    return _pipeline(1, _chain_hops(levels), _slowest_ns_per_byte(levels))


def _pipeline(passes: int, hops_by_level: Sequence[tuple[int, Level]], ns_per_byte: float) -> Cost:
    """Return the cost of a pipeline whose pieces make all these hops (count, level) `passes` times."""
    steps = passes * sum(hops for hops, _ in hops_by_level)
    return Cost(passes * _latency_ns(hops_by_level), ns_per_byte, fill=max(steps - 1, 0))


def _latency_ns(hops_by_level: Iterable[tuple[int, Level]]) -> float:
    return sum(hops * level.latency_ns for hops, level in hops_by_level)


def sent_share(members: int) -> float:
    """Fraction of the message that each member must send in an all-reduce (Patarasu and Yuan 2009): 2 (n - 1) / n."""
    return 2 * (members - 1) / members


def _slowest_ns_per_byte(levels: Levels) -> float:
    """Nanoseconds per byte on the slowest link in use."""
    return max((level.ns_per_byte for level in levels if level.size > 1), default=0.0)


def _chain_hops(levels: Levels) -> list[tuple[int, Level]]:
    """Hops on each level of a chain through all ranks that visits one group after the other; n - 1 in total."""
    groups = [prod(outer.size for outer in levels[position + 1 :]) for position in range(len(levels))]
    return [((level.size - 1) * count, level) for level, count in zip(levels, groups, strict=True)]


Library = Literal["nccl", "gloo"]
Algorithm = Literal["ring", "tree", "in_network"]
AlgorithmSetting = Literal["library", Algorithm, "cheapest"]
"""An algorithm, `library`: the one that the library chooses, or `cheapest`: of ring, tree and in_network."""

ALL_REDUCE = {"ring": ring, "tree": tree, "in_network": in_network}
BROADCAST = {"nccl": ring_broadcast, "gloo": tree_broadcast}
CONCURRENCY: dict[str, int] = {"gloo": GLOO_THREADS, "nccl": 1}
"""Collectives of one process group that the backend runs at a time: Gloo has two threads, NCCL one stream."""


@dataclass(frozen=True, eq=False)
class AlgorithmCosts:
    """The cost of an all-reduce at one world size by each algorithm that may be chosen.

    Attributes:
        costs: By name of the algorithm.
        nodes: Number of nodes of NCCL's model, which is multiplied by what published logs add to it; see `MULTIPLES`.
            None: the costs are not of NCCL's model.
    """

    costs: Mapping[str, Cost | NcclCost]
    nodes: int | None = None

    def costs_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        """Return the nanoseconds by size, each with the cheapest algorithm.

        NCCL chooses by its own model; published measurements then tell how much longer the chosen algorithm takes.
        """
        if self.nodes is None:
            return self._cheapest_ns(sizes_bytes)
        return self._published.costs_ns(sizes_bytes)

    @cached_property
    def _published(self) -> Table:
        """Times of powers of two, between which they are interpolated. A larger message never takes less."""
        assert self.nodes is not None
        multiple, _ = published_multiple(POWERS_OF_TWO, several_nodes=self.nodes > 1)
        return Table(POWERS_OF_TWO, np.maximum.accumulate(self._cheapest_ns(POWERS_OF_TWO) * multiple))

    def _cheapest_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        costs_ns: NDArray[np.float64] = np.min([cost.costs_ns(sizes_bytes) for cost in self.costs.values()], axis=0)
        return costs_ns

    def cheapest(self, size_bytes: int) -> tuple[str, Cost | NcclCost]:
        """Return name and cost of the cheapest algorithm for a size; the first one if several cost the same."""
        size = np.array([size_bytes])
        return min(self.costs.items(), key=lambda item: float(item[1].costs_ns(size)[0]))


def all_reduce_costs(
    levels: Levels, library: Library, setting: AlgorithmSetting, nccl_version: str
) -> AlgorithmCosts:
    """Return the cost of an all-reduce with the given algorithm, or with each that the library may choose.

    Gloo always runs a ring when torch calls it. NCCL reduces in the network only if a level in use supports that.
    """
    reducing = [place for place, level in enumerate(levels) if level.reduces and level.size > 1]
    if setting == "cheapest":
        names: tuple[Algorithm, ...] = ("ring", "tree", "in_network") if reducing else ("ring", "tree")
        return AlgorithmCosts({name: ALL_REDUCE[name](levels) for name in names})
    if setting != "library" or library == "gloo":
        name = "ring" if setting == "library" else setting
        return AlgorithmCosts({name: ALL_REDUCE[name](levels)})
    costs: dict[str, Cost | NcclCost] = {**nccl_all_reduce(levels, nccl_version)}
    if any(reducing[-1:]):  # beyond the innermost level, whose switches NCCL's model knows
        costs["in_network"] = in_network(levels)
    return AlgorithmCosts(costs, _nodes(levels))


def broadcast_costs(levels: Levels, library: Library, setting: AlgorithmSetting, nccl_version: str) -> AlgorithmCosts:
    """Return the cost of a broadcast; NCCL chooses the protocol if it also chooses the algorithm of an all-reduce."""
    if library == "gloo" or setting != "library":
        return AlgorithmCosts({library: BROADCAST[library](levels)})
    return AlgorithmCosts(nccl_broadcast(levels, nccl_version), _nodes(levels))


def _nodes(levels: Levels) -> int:
    return prod(level.size for level in levels[1:])
