"""Cost curves: which costs by size hold at a world size: measured, extrapolated, or of described links."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import log2
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .algorithms import BROADCAST, AlgorithmCosts, AlgorithmSetting, Library, all_reduce_costs, ring
from .extrapolation import Growth, extrapolated_table, growth_of
from .measured_tables import FREE, Sizes, Table
from .topology import Level, Topology
from .uncertainty import described_errors, extrapolation_error, table_error


class CostCurve(Protocol):
    """The cost of a collective at one world size."""

    def costs_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        """Nanoseconds by size; shape [sizes], as the argument's."""


@dataclass(frozen=True, eq=False)
class RatioCurve:
    """The curve `base` multiplied by the ratio of two other curves, `numerator / denominator`."""

    base: CostCurve
    numerator: CostCurve
    denominator: CostCurve

    def costs_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        """Nanoseconds by size."""
        ratio = self.numerator.costs_ns(sizes_bytes) / np.maximum(1, self.denominator.costs_ns(sizes_bytes))
        return self.base.costs_ns(sizes_bytes) * ratio


@dataclass(frozen=True, eq=False)
class CostCurves:
    """The cost curves of a fabric by world size, each computed when it is first used.

    A curve is the table measured at the world size; without one, a table extrapolated from other world sizes if
    `extrapolate` is set; or else computed from the links. `Fabric` describes the settings.
    """

    all_reduces: Mapping[int, Table]  # measured, by world size
    broadcasts: Mapping[int, Table]
    topology: Topology | None
    library: Library
    algorithm: AlgorithmSetting
    extrapolate: bool
    _made: dict[int, CostCurve] = field(default_factory=dict)

    def all_reduce(self, world_size: int) -> CostCurve:
        """Return the cost curve of an all-reduce.

        Raises:
            ValueError: The world size was not measured and cannot be extrapolated or computed from links.
        """
        if world_size not in self._made:
            self._made[world_size] = self._make(world_size)
        return self._made[world_size]

    def broadcast(self, world_size: int) -> CostCurve:
        """Return the cost curve of a broadcast.

        A measured table is extrapolated to other world sizes in proportion to the all-reduce. If only all-reduces
        were measured, at this world size or at all, their curve is returned, which is an upper bound.

        Raises:
            ValueError: As `all_reduce`.
        """
        if world_size > 1 and world_size in self.broadcasts:
            return self.broadcasts[world_size]
        curve = self.all_reduce(world_size)
        if isinstance(curve, AlgorithmCosts):
            return BROADCAST[self.library](self._levels(world_size))
        both = [measured for measured in self.broadcasts if measured > 1 and measured in self.all_reduces]
        if world_size in (1, *self.all_reduces) or not both:
            return curve
        nearest = min(both, key=lambda measured: abs(measured - world_size))
        return RatioCurve(curve, self.broadcasts[nearest], self.all_reduces[nearest])

    def all_gather(self, world_size: int) -> CostCurve:
        """Return twice the cost curve of an all-gather: a ring all-reduce on links, else the measured all-reduce.

        Raises:
            ValueError: As `all_reduce`.
        """
        curve = self.all_reduce(world_size)
        return ring(self._levels(world_size)) if isinstance(curve, AlgorithmCosts) else curve

    def origin(self, world_size: int) -> str:
        """Return the source of the curve: "measured", "extrapolated", "described", or "none" for one rank."""
        if isinstance(self.all_reduce(world_size), AlgorithmCosts):
            return "described"
        if world_size == 1:
            return "none"
        return "measured" if world_size in self.all_reduces else "extrapolated"

    def relative_errors(self, sizes_bytes: Sizes, world_size: int) -> NDArray[np.float64]:
        """Return the relative error of an all-reduce by size; see `Fabric.relative_errors`."""
        curve, origin = self.all_reduce(world_size), self.origin(world_size)
        if isinstance(curve, AlgorithmCosts):
            return described_errors(sizes_bytes, several_nodes=curve.several_nodes)
        match origin:
            case "none":
                error = 0.0
            case "measured":
                error = self.all_reduces[world_size].spread
            case _:
                nearest = min(self._of_several_ranks, key=lambda measured: abs(log2(world_size / measured)))
                by_levels = world_size > nearest > (self._growth.node or world_size)
                error = table_error(
                    self._of_several_ranks, world_size, self._extrapolation_error, by_levels=by_levels
                )
        return np.full(sizes_bytes.shape, error)

    def _make(self, world_size: int) -> CostCurve:
        if world_size < 1:
            raise ValueError(f"world_size: expected at least 1, got {world_size}")
        if world_size == 1:
            return FREE
        if world_size in self.all_reduces:
            return self.all_reduces[world_size]
        if self.extrapolate and self._of_several_ranks:
            return extrapolated_table(self._of_several_ranks, world_size, self._growth)
        return all_reduce_costs(self._levels(world_size), self.library, self.algorithm)

    @cached_property
    def _growth(self) -> Growth:
        return growth_of(self._of_several_ranks, self.library, self.topology)

    @cached_property
    def _extrapolation_error(self) -> float:
        return extrapolation_error(self._of_several_ranks, self.library, self.topology)

    @property
    def _of_several_ranks(self) -> Mapping[int, Table]:
        """Tables that can be extrapolated; a table of one rank cannot."""
        return {world_size: table for world_size, table in self.all_reduces.items() if world_size > 1}

    def _levels(self, world_size: int) -> tuple[Level, ...]:
        if self.topology is not None:
            return self.topology.in_use(world_size)
        raise ValueError(
            f"world_size: expected one of {list(self.all_reduces)}, for which all-reduces were measured, "
            f"got {world_size}; measure it (ddplab calibrate --world-size {world_size}), extrapolate "
            "(extrapolate=True, --fabric-set extrapolate=true), or describe the links (a YAML file is a --fabric too)"
        )
