"""What each algorithm of a collective costs on a hierarchy of links: closed formulas.

`levels` are those of a hierarchy, innermost first, each with its number of members in use; their product is the
world size. A level with one member costs nothing. A link carries its full rate in both directions at a time, and
adding up costs no time (it runs beside the transfer). S is the size of the message, B a level's rate, m its members.
"""

from collections.abc import Sequence
from math import ceil, log2, prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .topology import Level

Levels = Sequence[Level]


class Cost(NamedTuple):
    """A collective's cost against its size: `latency_ns + ns_per_byte * size`, and the filling of a pipeline.

    `fill` is the number of steps after the first before the last rank sees the first piece; 0: no pipeline.
    """

    latency_ns: float
    ns_per_byte: float
    fill: int = 0

    def costs_ns(self, sizes_bytes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Nanoseconds by size; a pipeline is cut into the number of pieces that is best for the size.

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
    """One flat ring through all ranks: 2 (n - 1) steps that each pass on an n-th (Patarasu and Yuan 2009).

    Every link of the ring carries the same bytes, so the slowest level sets the pace. On its way from the first rank
    to the last a piece enters each group once; it goes that way twice, to be reduced and to be spread.
    """
    n = prod(level.size for level in levels)
    return Cost(2 * _chain_ns(levels), 2 * (n - 1) / n * _slowest(levels))


def tree(levels: Levels) -> Cost:
    """Two binary trees, each with half of the message; a chain inside the innermost groups, as in NCCL since 2.4.

    Sanders, Speck and Träff 2009: a member that has two children in one tree is a leaf in the other, hence has at
    most four neighbours (one fewer than there are members, in each tree, where there are few), and sends half the
    message to each. The chains start at other ranks for other pieces, so each rank carries 2 (m - 1) / m of S. A
    level that stands alone has no inside: it is a tree.
    """
    chain, trees = (levels[0], levels[1:]) if len(levels) > 1 else (None, levels)
    depths = [(ceil(log2(level.size)), level) for level in trees]
    loads = [min(level.size, 4) / 2 * level.ns_per_byte for level in trees if level.size > 1]
    if chain is not None:
        depths.append((chain.size - 1, chain))
        loads.append(_share(chain.size) * chain.ns_per_byte)
    return _pipeline(2, depths, max(loads, default=0.0))


def halving_doubling(levels: Levels) -> Cost:
    """Recursive halving, then doubling (Thakur, Rabenseifner and Gropp 2005): 2 log2 m steps at each level.

    The first and largest halves are exchanged inside the innermost groups, so a group sends 2 (m - 1) / m of S to
    others of its level. Where m is no power of two, the members beyond it first send all they have to a partner and
    at the end get the result: two steps of S more.
    """
    latency_ns = ns_per_byte = 0.0
    for level in levels:
        rounds = int(log2(level.size))
        folds = 0 if level.size == 1 << rounds else 2
        latency_ns += (2 * rounds + folds) * level.latency_ns
        ns_per_byte += (_share(1 << rounds) + folds) * level.ns_per_byte
    return Cost(latency_ns, ns_per_byte)


def hierarchical(levels: Levels) -> Cost:
    """Reduce-scatter inside, all-reduce of the shards across by the same rule, all-gather inside; one after another.

    Each phase is a ring. A group holds S in shards whatever its size, so each level passes 2 (m - 1) / m of S on. On
    one level this is `ring`.
    """
    latency_ns = sum(2 * (level.size - 1) * level.latency_ns for level in levels)
    return Cost(latency_ns, sum(_share(level.size) * level.ns_per_byte for level in levels))


def in_network(levels: Levels) -> Cost:
    """Switches that add up (SHARP, NVLS): where a level reduces, each byte goes up once and comes down once.

    Up and down overlap, as links work both ways: S / B. A level that does not reduce is a ring inside its groups.
    The levels work at the same time on different pieces, so the slowest sets the pace, and fill at once.
    """
    used = [level for level in levels if level.size > 1]
    hops = [(2 if level.reduces else 2 * (level.size - 1), level) for level in used]
    loads = [(1.0 if level.reduces else _share(level.size)) * level.ns_per_byte for level in used]
    return Cost(sum(count * level.latency_ns for count, level in hops), max(loads, default=0.0))


def tree_broadcast(levels: Levels) -> Cost:
    """From one rank to all, along a binomial tree (Thakur, Rabenseifner and Gropp 2005): Gloo's broadcast.

    In each of log2 m steps everyone who has the whole message sends it to one who has not.
    """
    depths = [(ceil(log2(level.size)), level) for level in levels]
    latency_ns = sum(depth * level.latency_ns for depth, level in depths)
    return Cost(latency_ns, sum(depth * level.ns_per_byte for depth, level in depths))


def ring_broadcast(levels: Levels) -> Cost:
    """From one rank to all, along a chain of all ranks, cut into pieces: NCCL's only broadcast."""
    hops = list(zip(_chain_hops(levels), levels, strict=True))
    return _pipeline(1, hops, _slowest(levels))


def _pipeline(passes: int, depths: Sequence[tuple[int, Level]], ns_per_byte: float) -> Cost:
    """Pieces that go through all `depths` (hops, level) `passes` times."""
    steps = passes * sum(hops for hops, _ in depths)
    latency_ns = passes * sum(hops * level.latency_ns for hops, level in depths)
    return Cost(latency_ns, ns_per_byte, fill=max(steps - 1, 0))


def _share(members: int) -> float:
    """Part of the message that each of `members` must send in an all-reduce (Patarasu and Yuan 2009)."""
    return 2 * (members - 1) / members


def _slowest(levels: Levels) -> float:
    """Nanoseconds a byte on the slowest link in use."""
    return max((level.ns_per_byte for level in levels if level.size > 1), default=0.0)


def _chain_hops(levels: Levels) -> list[int]:
    """How often a chain through all ranks, group by group, crosses each level; n - 1 together."""
    groups = [prod(outer.size for outer in levels[position + 1 :]) for position in range(len(levels))]
    return [(level.size - 1) * count for level, count in zip(levels, groups, strict=True)]


def _chain_ns(levels: Levels) -> float:
    """Latency from the first rank of a chain to the last."""
    return sum(hops * level.latency_ns for hops, level in zip(_chain_hops(levels), levels, strict=True))


Library = Literal["nccl", "gloo"]
Algorithm = Literal["ring", "tree", "halving_doubling", "hierarchical", "in_network"]
Choice = Literal["library", Algorithm]
"""An algorithm by name, or `library`: whichever of its own the library takes."""

ALL_REDUCE = {
    "ring": ring,
    "tree": tree,
    "halving_doubling": halving_doubling,
    "hierarchical": hierarchical,
    "in_network": in_network,
}
BROADCAST = {"nccl": ring_broadcast, "gloo": tree_broadcast}
OFFERS: dict[Library, tuple[Algorithm, ...]] = {"nccl": ("ring", "tree", "in_network"), "gloo": ("ring",)}
"""All-reduce algorithms that torch gets from a library without asking for one."""
CONCURRENCY: dict[str, int] = {"gloo": 2, "nccl": 1}
"""Collectives of one process group that the backend runs at a time: Gloo has two threads, NCCL one stream."""


class Offer(NamedTuple):
    """Algorithms to choose from, and what each costs at one world size."""

    names: tuple[str, ...]
    costs: tuple[Cost, ...]

    def costs_ns(self, sizes_bytes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Nanoseconds by size with the cheapest algorithm; NCCL's own model of costs chooses so."""
        cheapest = self.costs[0].costs_ns(sizes_bytes)
        for cost in self.costs[1:]:
            cheapest = np.minimum(cheapest, cost.costs_ns(sizes_bytes))
        return cheapest

    def choice(self, size_bytes: int) -> tuple[str, Cost]:
        """The cheapest algorithm for a size, by name and cost; the first of equals."""
        size = np.array([size_bytes])
        return min(zip(self.names, self.costs, strict=True), key=lambda item: float(item[1].costs_ns(size)[0]))


def offer(levels: Sequence[Level], library: Library, algorithm: Choice) -> Offer:
    """What there is to choose from: the named algorithm, or with "library" all that the library has.

    A library reduces in the network only where a level that is in use can.
    """
    in_network = any(level.reduces and level.size > 1 for level in levels)
    offered = tuple(name for name in OFFERS[library] if in_network or name != "in_network")
    names = offered if algorithm == "library" else (algorithm,)
    return Offer(names, tuple(ALL_REDUCE[name](levels) for name in names))


def broadcast(levels: Sequence[Level], library: Library) -> Cost:
    """What the library's broadcast costs."""
    return BROADCAST[library](levels)
