"""Cost curves: which costs hold at a world size (measured, extrapolated or of described links), and their errors."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import exp, log2
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .algorithms import AlgorithmCosts, all_reduce_costs, broadcast_costs, published_deviations, ring
from .extrapolation import USUAL_NODE, Growth, extrapolated_table, growth_of
from .measured_tables import FREE, CostCurve, Sizes, Table, tables_by_world_size
from .topology import Level

if TYPE_CHECKING:
    from .fabric import Fabric


class RatioCurve(NamedTuple):
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
    """

    def __init__(self, fabric: "Fabric") -> None:
        self.all_reduces = tables_by_world_size(fabric.all_reduce)  #: measured, by world size
        self.broadcasts = tables_by_world_size(fabric.broadcast)  #: likewise
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
        levels = self._levels(world_size) if isinstance(curve, AlgorithmCosts) else ()
        return ring([*levels[:1], *(level.one_way() for level in levels[1:])]) if levels else curve

    def origin(self, world_size: int) -> str:
        """Return the source of the curve; see `Fabric.origin`."""
        if isinstance(self.all_reduce(world_size), AlgorithmCosts):
            return "described"
        if world_size == 1:
            return "none"
        return "measured" if world_size in self.all_reduces else "extrapolated"

    def relative_errors(self, sizes_bytes: Sizes, world_size: int) -> NDArray[np.float64]:
        """Return the relative errors of an all-reduce; see `Fabric.relative_errors`."""
        curve = self.all_reduce(world_size)
        if isinstance(curve, AlgorithmCosts):
            return self._errors_of_links(sizes_bytes, world_size)
        assert isinstance(curve, Table)
        if curve is FREE:
            return np.zeros((2, *sizes_bytes.shape))
        error = curve.spread if world_size in self.all_reduces else self._unmeasured_error(world_size)
        errors = error + errors_beyond(curve, sizes_bytes)
        if self.crosses(world_size) and isinstance(curve.beyond, AlgorithmCosts):
            return np.maximum(errors, self._errors_of_links(sizes_bytes, world_size))
        return np.stack([errors, errors])

    def has_usual_latency(self, world_size: int) -> bool:
        """Return whether NCCL crosses a network whose latency is a usual one, or below every published one."""
        used = [level for level in self._levels(world_size)[1:] if level.size > 1]
        longest_ns = max((level.latency_ns for level in used), default=np.inf)
        is_usual = longest_ns == USUAL_LATENCY_NS or any(level.latency_is_usual for level in used)
        return self._described(world_size).nodes is not None and (is_usual or longest_ns < LEAST_LATENCY_NS)

    def doublings_beyond_a_connection(self, world_size: int) -> float:
        """Return by how many doublings a slow network of NCCL, maybe Ethernet, is faster than a TCP connection."""
        of_nodes = (level.ns_per_byte for level in self._levels(world_size)[1:] if level.size > 1)
        rate = 1e9 / max(of_nodes, default=1e-9)
        is_slow = rate <= SLOW_NETWORK and self._described(world_size).nodes
        return max(0.0, log2(rate / CONNECTION)) if is_slow else 0.0

    def _errors_of_links(self, sizes_bytes: Sizes, world_size: int) -> NDArray[np.float64]:
        """Return the relative errors of costs computed from links; Ethernet is slower than its rate, never faster."""
        costs = self._described(world_size)
        levels = self._levels(world_size)
        nearest_ns = [min(level.latency_ns, USUAL_LATENCY_NS) for level in levels[1:]]
        outermost = next((level for level in reversed(levels) if level.size > 1), levels[0])
        of_transport = np.zeros((2, *sizes_bytes.shape))
        for end, (latency, wait) in enumerate(zip(LATENCIES, WAITS, strict=True)):
            changes: list[list[dict[str, float]]] = []
            if self.has_usual_latency(world_size):
                nearest: list[dict[str, float]] = [{"latency_ns": round(latency * ns)} for ns in nearest_ns]
                changes.append([{}, *nearest])
            if costs.nodes is not None and (outermost.wait is None or outermost.latency_is_usual):
                changes.append([{"wait": wait}] * len(levels))
            for of_levels in changes:
                other = [level.model_copy(update=new) for level, new in zip(levels, of_levels, strict=True)]
                others = all_reduce_costs(other, "nccl", "library", self._fabric.nccl_version)
                missed = np.log(others.costs_ns(sizes_bytes) / costs.costs_ns(sizes_bytes))
                of_transport[end] = np.hypot(of_transport[end], missed)
        of_sockets = SOCKETS_DEVIATION * self.doublings_beyond_a_connection(world_size)
        return described_errors(sizes_bytes, costs, np.hypot(of_transport, [[0.0], [of_sockets]]))

    def crosses(self, world_size: int) -> bool:
        """Return whether all tables are of fewer levels of links, so that they say nothing of the outermost one."""
        if world_size in self.all_reduces:
            return False
        levels = self._growth.levels
        return all(levels(measured) < levels(world_size) for measured in self._of_several_ranks)

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
            if self.crosses(world_size):  # what was not measured is as the links say, and the two count as much
                linked_ns = self._described(world_size).costs_ns(table.sizes_bytes)
                table = replace(table, ns=np.rint(np.sqrt(table.ns * linked_ns)))
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

    def _unmeasured_error(self, world_size: int) -> float:
        """Return the relative error at an unmeasured world size, which adds to the spread of the nearest table."""
        tables = self._of_several_ranks
        nearest = min(tables, key=lambda measured: abs(log2(world_size / measured)))
        if min(tables) < world_size < max(tables):
            return tables[nearest].spread + LINKS_ERROR
        by_levels = world_size > nearest > (self._growth.node or world_size)
        further_doublings = max(abs(log2(world_size / nearest)) - 1, 0.0)
        extrapolated = max(SEVERAL_NODES_ERROR if by_levels else LINKS_ERROR, self._extrapolation_error)
        return tables[nearest].spread + extrapolated + ERROR_PER_DOUBLING[by_levels] * further_doublings

    @cached_property
    def _extrapolation_error(self) -> float:
        """The 90th percentile of the relative error of extrapolating to the largest measured world size.

        The costs at the largest world size are extrapolated from the smaller ones and compared with the measurements,
        at message sizes within the range of both. 0 if there are no common sizes, or fewer than two smaller world
        sizes that use as many levels of links: one of them does not show how costs grow, so its error would say
        nothing of an extrapolation from both.
        """
        tables, fabric, levels = self._of_several_ranks, self._fabric, self._growth.levels
        *smaller, largest = sorted(tables)
        if sum(levels(n) == levels(largest) for n in smaller) < 2:
            return 0.0
        inputs = {n: tables[n] for n in smaller}
        predicted = extrapolated_table(inputs, largest, growth_of(inputs, fabric.library, fabric.topology))
        sizes, ns = tables[largest].sizes_bytes, np.maximum(tables[largest].ns, 1)
        common = (sizes >= predicted.sizes_bytes[0]) & (sizes <= predicted.sizes_bytes[-1])
        if not common.any():
            return 0.0
        return float(np.quantile(np.abs(predicted.costs_ns(sizes[common]) / ns[common] - 1), BAND))

    @property
    def _of_several_ranks(self) -> Mapping[int, Table]:
        """Tables that can be extrapolated; a table of one rank cannot."""
        return {world_size: table for world_size, table in self.all_reduces.items() if world_size > 1}

    def _levels(self, world_size: int) -> tuple[Level, ...]:
        if self._fabric.topology is not None:
            return self._fabric.topology.in_use(world_size)
        extrapolate = "extrapolate (extrapolate=True, --set extrapolate=true), " * bool(self._of_several_ranks)
        raise ValueError(
            f"world_size: expected one of {list(self.all_reduces)}, for which all-reduces were measured, "
            f"got {world_size}; measure it (ddplab calibrate --world-size {world_size}), {extrapolate}"
            "or describe the links (a YAML file is a --fabric too)"
        )


# Relative errors
#
# With relative errors `faster, slower`, nine in ten costs lie between the cost divided by 1 + faster and the cost
# times 1 + slower, because a network is more often much slower than expected than much faster.

LINKS_ERROR = 0.14
"""Relative error of costs computed from links, and of a world size between two measured ones."""
BAND = 0.9
"""Fraction of the costs that the error band contains."""
NORMAL_HALF_BAND = 1.645
"""Half-width of the band that holds 90 % of normally distributed values, in standard deviations."""
ERROR_PER_DOUBLING = 0.05, 0.15
"""Relative error added by each further doubling beyond the measured world sizes, on one node and between nodes. With
it, the band contains nine of ten all-reduces on 64 GH200s from 16 (Alps) and on 64 and 128 A100s from 16 (Azure), and
all on 2,160 A100s from 32 (Polaris)."""
SEVERAL_NODES_ERROR = 0.25
"""Relative error of extrapolating NCCL's tables from several nodes to more: nine in ten of the errors for messages of
256 KiB and more on 32 to 128 A100s from 2 to 16 (NetX-lab/Echo), and on 64 to 2,048 GH200s from 4 to 64 (Alps)."""
RATE_DEVIATION = {False: 0.08, True: 0.17}
"""Standard deviation of the logarithm of measured over described rates of large messages, on one node and on several.

On one node, all-reduces of 1 GiB reach 0.69 to 0.90 of NVLink's data sheet (A100: 0.77 Echo, 0.76 vTrain; GH200
0.76; V100 0.90). On more than two nodes they reach 0.96 (Alps), 0.92 (Isambard-AI) and 0.63 (Azure ND A100 v4) of the
network cards' rate. From the catalogue's names, messages above 64 MiB on 16 to 64 H100, B200 and MI300X are off by 0
to 20 %, but for two pairs of nodes that are out of order, by 50 and 64 %: with 0.17 the band holds 87 % of them."""
MANY_NODES, MANY_NODES_DEVIATION = 16, 0.1
"""Nodes beyond which congestion adds to `RATE_DEVIATION`, and what each doubling adds to it.

Up to 16 nodes (Azure ND A100 v4) the spread does not grow. On 540 nodes of Polaris, times are 2.4 times those that
the data sheets give, on 8 nodes 1.6 times."""
USUAL_LATENCY_NS, LEAST_LATENCY_NS = 14_000, 9_000
"""NCCL's latency of a hop between nodes, and one that is shorter than any published half of 8 bytes on two nodes."""
LATENCIES = 9.3 / 14, exp(1.36)
"""Multiples of `USUAL_LATENCY_NS` that are one standard deviation away, of transports with short and with long
latencies. Long: the root mean square of the logarithms of half of what 8 bytes take on two nodes over it, by
transport. Slingshot 9.3 (Alps) and 60 us (Polaris), InfiniBand 16.6, EFA 36 (P5) and 91 (P4d), TCPXO 61, RoCE 109 us
(MI300X); logs as in `catalogue.yaml`. Short: the shortest of these."""
WAITS = 0.65, 2.25
"""Where `Level.wait` is not known, both ends of one standard deviation of the systems in `UNKNOWN_WAIT`."""
CONNECTION, SLOW_NETWORK = 10e9 / 8, 50e9 / 8
"""Bytes per second that one TCP connection reaches, and up to which a node's network is usually Ethernet."""
SOCKETS_DEVIATION = 0.47
"""Standard deviation of the logarithm of the time over Ethernet, for each doubling of its rate beyond `CONNECTION`.

NCCL's sockets reach all of 10 Gbit/s (HKBU, 8 nodes of 4 GPUs), 14 of 25 (2 of 4, NVIDIA/nccl-tests issue 83), 15
and 22 of 32 (2 and 4 of 8, NVIDIA/nccl issue 209), and 15 to 23 (HKBU), 32 to 48 (issue 450) and 11 to 41 (issue 209)
of 100: the root mean square of the logarithms by doubling. With one GPU a node they reach 31 of 32 (issue 209)."""


def described_errors(
    sizes_bytes: Sizes, costs: AlgorithmCosts, of_transport: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the relative errors of costs computed from links.

    `of_transport`: standard deviations of the logarithm that an unknown latency and Ethernet add; shape [2, sizes].
    """
    nodes = costs.nodes
    if nodes is None:
        return np.full(of_transport.shape, LINKS_ERROR)
    deviation = published_deviations(sizes_bytes, costs.waits(sizes_bytes))
    congestion = MANY_NODES_DEVIATION * max(0.0, log2(nodes / MANY_NODES))
    of_rate = RATE_DEVIATION[nodes > 1] + np.array([[0.0], [congestion]])  # which makes no message faster
    return np.exp(NORMAL_HALF_BAND * np.sqrt(deviation**2 + of_rate**2 + of_transport**2)) - 1


JOINED_ERROR = {False: 0.17, True: 0.27}
"""Logarithm of the error that nine of ten all-reduces do not exceed one doubling of the size beyond a table that
described links continue, on one node and on several; it grows with the root of the doublings.
`python -m validation.nccl_model_error` cuts published tables off, continues them and compares with the rest."""
LINE_ERROR = 0.4
"""The same for each doubling where the first or last line of a table is continued. On several nodes only three of
four do not exceed it."""
LARGEST_BEYOND, LARGEST_BELOW = 50.0, 5.0
"""Upper limits of the relative error beyond a table, and below one whose first line is continued."""


def errors_beyond(table: Table, sizes_bytes: Sizes) -> NDArray[np.float64]:
    """Return the relative errors by size that come from continuing a table to other sizes; 0 within it."""
    first, last = np.maximum(1, table.sizes_bytes[[0, -1]])
    doublings = np.log2(first / np.clip(sizes_bytes, 1, first)) + np.log2(np.maximum(sizes_bytes, last) / last)
    one_node = isinstance(table.beyond, AlgorithmCosts) and table.beyond.nodes == 1
    if table.beyond is not None:
        return _relative(JOINED_ERROR[not one_node] * np.sqrt(doublings))
    # A smaller message takes no longer than the smallest measured one, so the time is not much above its upper end.
    most = np.maximum(LARGEST_BELOW, table.ns[0] / np.maximum(1, table.costs_ns(sizes_bytes)) - 1)
    errors = _relative(LINE_ERROR * doublings)
    return np.where(sizes_bytes < first, np.minimum(errors, most), errors)


def _relative(logarithms: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.expm1(np.minimum(logarithms, np.log1p(LARGEST_BEYOND)))
