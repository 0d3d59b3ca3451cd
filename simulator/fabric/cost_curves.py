"""Cost curves: the cost of a collective by size at one world size, and how uncertain that cost is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import log2
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .algorithms import Choice, Library, Offer, broadcast, offer, ring
from .tables import FREE, UNMEASURED, Table, table_for
from .topology import Level, Topology


class Curve(Protocol):
    """What a collective costs at one world size."""

    def costs_ns(self, sizes_bytes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Nanoseconds by size."""


@dataclass(frozen=True, eq=False)
class Proportional:
    """A curve that is to `grown` as `part` is to `whole`."""

    grown: Curve
    part: Curve
    whole: Curve

    def costs_ns(self, sizes_bytes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Nanoseconds by size."""
        ratio = self.part.costs_ns(sizes_bytes) / np.maximum(1, self.whole.costs_ns(sizes_bytes))
        return self.grown.costs_ns(sizes_bytes) * ratio


@dataclass(frozen=True, eq=False)
class Charged:
    """A curve with what the whole fabric adds: each collective passes the slowest link, and all are scaled."""

    alone: Curve
    slow_link: float
    scale: float

    def costs_ns(self, sizes_bytes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Nanoseconds by size; a slow link slows the bytes, not the latency."""
        costs = self.alone.costs_ns(sizes_bytes)
        if self.slow_link > 1:
            empty = self.alone.costs_ns(np.zeros(1, dtype=np.int64))
            costs = costs + (self.slow_link - 1) * np.maximum(costs - empty, 0)
        return self.scale * costs


@dataclass(frozen=True, eq=False)
class Curves:
    """The curves of a fabric by world size, each made when it is first asked for.

    A measured table comes first; then, if `extrapolate` says so, one grown out of other world sizes; then links.
    """

    all_reduces: Mapping[int, Table]
    broadcasts: Mapping[int, Table]
    topology: Topology | None
    library: Library
    algorithm: Choice
    extrapolate: bool
    _made: dict[int, Curve] = field(default_factory=dict)

    def all_reduce(self, world_size: int) -> Curve:
        """The all-reduce's curve.

        Raises:
            ValueError: Nothing says what it costs at that world size, or the topology does not fit it.
        """
        if world_size not in self._made:
            self._made[world_size] = self._make(world_size)
        return self._made[world_size]

    def broadcast(self, world_size: int) -> Curve:
        """The broadcast's curve.

        At a world size that was not measured it grows as the all-reduce does; where only all-reduces were measured it
        is theirs, which bounds it from above.
        """
        if world_size > 1 and world_size in self.broadcasts:
            return self.broadcasts[world_size]
        curve = self.all_reduce(world_size)
        if isinstance(curve, Offer):
            return broadcast(self._levels(world_size), self.library)
        both = [measured for measured in self.broadcasts if measured > 1 and measured in self.all_reduces]
        if world_size in (1, *self.all_reduces) or not both:
            return curve
        nearest = min(both, key=lambda measured: abs(measured - world_size))
        return Proportional(curve, self.broadcasts[nearest], self.all_reduces[nearest])

    def all_gather(self, world_size: int) -> Curve:
        """Of an all-reduce that an all-gather is half of: the ring's on links, whatever was measured of a table."""
        curve = self.all_reduce(world_size)
        return ring(self._levels(world_size)) if isinstance(curve, Offer) else curve

    def origin(self, world_size: int) -> str:
        """Where the all-reduce's curve comes from: "measured", "extrapolated" or "described"; "none" of one rank."""
        if isinstance(self.all_reduce(world_size), Offer):
            return "described"
        if world_size == 1:
            return "none"
        return "measured" if world_size in self.all_reduces else "extrapolated"

    def relative_error(self, world_size: int) -> float:
        """Half-width of the band that holds an all-reduce's cost nine times in ten, as a fraction of it."""
        origin = self.origin(world_size)
        known = {"none": 0.0, "described": DESCRIBED}
        if origin in known:
            return known[origin]
        return table_error(self._of_several_ranks, world_size, 0.0 if origin == "measured" else self._missed)

    def _make(self, world_size: int) -> Curve:
        if world_size < 1:
            raise ValueError(f"world_size: expected at least 1, got {world_size}")
        if world_size == 1:
            return FREE
        if world_size in self.all_reduces:
            return self.all_reduces[world_size]
        if self.extrapolate and self._of_several_ranks:
            return table_for(self._of_several_ranks, world_size, UNMEASURED[self.library])
        return offer(self._levels(world_size), self.library, self.algorithm)

    @cached_property
    def _missed(self) -> float:
        return missed_before(self._of_several_ranks, UNMEASURED[self.library])

    @property
    def _of_several_ranks(self) -> Mapping[int, Table]:
        """Tables from which others may grow: one rank alone tells nothing of several."""
        return {world_size: table for world_size, table in self.all_reduces.items() if world_size > 1}

    def _levels(self, world_size: int) -> tuple[Level, ...]:
        if self.topology is not None:
            return self.topology.in_use(world_size)
        raise ValueError(
            f"world_size: all-reduce was measured for {list(self.all_reduces)} ranks, not for {world_size}; "
            f"measure it (ddplab calibrate --world-size {world_size}), let it grow (extrapolate=True, "
            "--fabric-set extrapolate=true), or describe the links (a topology in YAML is a --fabric too)"
        )


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
