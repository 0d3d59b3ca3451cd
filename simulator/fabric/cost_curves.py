"""Cost curves: which costs by size hold at a world size: measured, extrapolated, or of described links."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .algorithms import AlgorithmCosts, all_reduce_costs, broadcast_costs, ring
from .extrapolation import USUAL_NODE, Growth, extrapolated_table, growth_of
from .measured_tables import FREE, CostCurve, Sizes, Table, tables_by_world_size
from .topology import Level
from .uncertainty import described_errors, errors_beyond, extrapolation_error, table_error

if TYPE_CHECKING:
    from .fabric import Fabric


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


class CostCurves:
    """The cost curves of a fabric by world size, each computed when it is first used.

    A curve is the table measured at the world size; without one, a table extrapolated from other world sizes if
    `extrapolate` is set; or else computed from the links. Described links also continue a table of all-reduces below
    its smallest and above its largest message.

    Attributes:
        all_reduces: Measured tables of all-reduces by world size.
        broadcasts: Measured tables of broadcasts by world size.
    """

    def __init__(self, fabric: "Fabric") -> None:
        self.all_reduces = tables_by_world_size(fabric.all_reduce)
        self.broadcasts = tables_by_world_size(fabric.broadcast)
        self._fabric = fabric
        self._made: dict[int, CostCurve] = {}

    def all_reduce(self, world_size: int) -> CostCurve:
        """Return the cost curve of an all-reduce; a world size without any curve is a ValueError."""
        if world_size not in self._made:
            self._made[world_size] = self._make(world_size)
        return self._made[world_size]

    def broadcast(self, world_size: int) -> CostCurve:
        """Return the cost curve of a broadcast.

        A measured table is extrapolated to other world sizes in proportion to the all-reduce. If only all-reduces
        were measured, at this world size or at all, their curve is returned, which is an upper bound.
        """
        if world_size > 1 and world_size in self.broadcasts:
            return self.broadcasts[world_size]
        curve = self.all_reduce(world_size)
        if isinstance(curve, AlgorithmCosts):
            return self._described(world_size, broadcast_costs)
        both = [measured for measured in self.broadcasts if measured > 1 and measured in self.all_reduces]
        if world_size in (1, *self.all_reduces) or not both:
            return curve
        nearest = min(both, key=lambda measured: abs(measured - world_size))
        return RatioCurve(curve, self.broadcasts[nearest], self.all_reduces[nearest])

    def all_gather(self, world_size: int) -> CostCurve:
        """Return twice the cost curve of an all-gather: a ring all-reduce on links, else the measured all-reduce."""
        curve = self.all_reduce(world_size)
        return ring(self._levels(world_size)) if isinstance(curve, AlgorithmCosts) else curve

    def origin(self, world_size: int) -> str:
        """Return the source of the curve; see `Fabric.origin`."""
        if isinstance(self.all_reduce(world_size), AlgorithmCosts):
            return "described"
        if world_size == 1:
            return "none"
        return "measured" if world_size in self.all_reduces else "extrapolated"

    def relative_errors(self, sizes_bytes: Sizes, world_size: int) -> NDArray[np.float64]:
        """Return the relative error of an all-reduce by size; see `Fabric.relative_errors`."""
        curve = self.all_reduce(world_size)
        if isinstance(curve, AlgorithmCosts):
            return described_errors(sizes_bytes, curve.nodes)
        assert isinstance(curve, Table)
        if curve is FREE:
            return np.zeros(sizes_bytes.shape)
        if world_size in self.all_reduces:
            error = curve.spread
        else:
            error = table_error(self._of_several_ranks, world_size, self._growth.node, self._extrapolation_error)
        return error + errors_beyond(curve, sizes_bytes)

    def _make(self, world_size: int) -> CostCurve:
        if world_size < 1:
            raise ValueError(f"world_size: expected at least 1, got {world_size}")
        if world_size == 1:
            return FREE
        fabric = self._fabric
        if world_size in self.all_reduces:
            table = self.all_reduces[world_size]
        elif fabric.extrapolate and self._of_several_ranks:
            self._check_levels(world_size)
            table = extrapolated_table(self._of_several_ranks, world_size, self._growth)
        else:
            return self._described(world_size)
        with suppress(ValueError):  # no links are described, or they do not fit this world size
            return replace(table, beyond=self._described(world_size))
        return table

    def _described(
        self, world_size: int, costs_of: Callable[..., AlgorithmCosts] = all_reduce_costs
    ) -> AlgorithmCosts:
        fabric = self._fabric
        return costs_of(self._levels(world_size), fabric.library, fabric.algorithm, fabric.nccl_version)

    def _check_levels(self, world_size: int) -> None:
        """Refuse to extrapolate from one node to several, or back, where no links are described."""
        measured, levels = list(self._of_several_ranks), self._growth.levels
        if self._fabric.topology is None and levels(world_size) not in map(levels, measured):
            missing = "several nodes" if world_size > USUAL_NODE else "one node"
            raise ValueError(
                f"world_size: expected a table of {missing} (of {USUAL_NODE} GPUs) or described links, to "
                f"extrapolate to {world_size} ranks, got tables of {measured} ranks; add a log of {missing}, or "
                "describe the links (a YAML file is a --fabric too)"
            )

    @cached_property
    def _growth(self) -> Growth:
        return growth_of(self._of_several_ranks, self._fabric.library, self._fabric.topology)

    @cached_property
    def _extrapolation_error(self) -> float:
        return extrapolation_error(self._of_several_ranks, self._fabric.library, self._fabric.topology)

    @property
    def _of_several_ranks(self) -> Mapping[int, Table]:
        """Tables that can be extrapolated; a table of one rank cannot."""
        return {world_size: table for world_size, table in self.all_reduces.items() if world_size > 1}

    def _levels(self, world_size: int) -> tuple[Level, ...]:
        if self._fabric.topology is not None:
            return self._fabric.topology.in_use(world_size)
        raise ValueError(
            f"world_size: expected one of {list(self.all_reduces)}, for which all-reduces were measured, "
            f"got {world_size}; measure it (ddplab calibrate --world-size {world_size}), extrapolate "
            "(extrapolate=True, --set extrapolate=true), or describe the links (a YAML file is a --fabric too)"
        )
