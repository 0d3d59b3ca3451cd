"""Which algorithms a library has, and which one it takes for a size."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import algorithms
from .algorithms import Cost
from .level import Level

Library = Literal["nccl", "gloo"]
Algorithm = Literal["ring", "tree", "halving_doubling", "hierarchical", "in_network"]
Choice = Literal["library", Algorithm]
"""An algorithm by name, or `library`: whichever of its own the library takes."""

ALL_REDUCE = {
    "ring": algorithms.ring,
    "tree": algorithms.tree,
    "halving_doubling": algorithms.halving_doubling,
    "hierarchical": algorithms.hierarchical,
    "in_network": algorithms.in_network,
}
BROADCAST = {"nccl": algorithms.ring_broadcast, "gloo": algorithms.tree_broadcast}
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
