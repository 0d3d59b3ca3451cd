"""Measured tables of collective times by message size: interpolated, and split into segments.

Times between neighbouring sizes are interpolated linearly. One line through all sizes would be off by 12 to 35 %,
because libraries switch protocols at certain sizes.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from statistics import median, median_high
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...reference.files.reading import Schema
from ...reference.files.value_ranges import Bytes, Nanoseconds, RelativeError, WorldSize

Sizes = NDArray[Any]
"""Message sizes in bytes, whole numbers; as floats they may be larger than 64 bits hold."""
MOST_FITTED = 200


class CostCurve(Protocol):
    """The cost of a collective at one world size."""

    def costs_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        """Nanoseconds by size; shape [sizes], as the argument's."""


class Timing(Schema):
    """A measured collective: `world_size` ranks with a message of `size_bytes` each took `ns`."""

    world_size: WorldSize
    """ranks that took part, a count; from the measurement's set-up"""
    size_bytes: Bytes
    """message of one rank, bytes; from the log's column of sizes"""
    ns: Nanoseconds
    """time of the collective, nanoseconds; the smaller time of a log's row"""
    spread: RelativeError = 0.0
    """half-width of the band that holds 90 % of the repeated measurements, a fraction of `ns`; from the repetitions,
    0 if they were not kept"""


@dataclass(frozen=True, eq=False)
class Table:
    """Times of one world size."""

    sizes_bytes: NDArray[np.int64]  #: message sizes, strictly ascending; shape [sizes]
    ns: NDArray[np.float64]  #: nanoseconds by size, floats that hold whole numbers; shape [sizes]
    spread: float = 0.0
    """Half-width of the band that holds 90 % of repetitions, a fraction: median over repeated sizes."""
    beyond: CostCurve | None = None
    """Costs of described links, which continue the table to other sizes. None: its first and last line do."""

    def costs_ns(self, sizes_bytes: Sizes) -> NDArray[np.float64]:
        """Return the nanoseconds by size, interpolated linearly.

        Beyond the smallest and the largest size, the times of `beyond` are multiplied so that they join the table.
        Without them, the first and the last line are continued. Below the smallest size the time neither grows nor
        falls faster than the bytes. Above the largest, if the last line does not rise or if there is only one size,
        the time grows in proportion to the bytes.
        """
        first, last = self.sizes_bytes[0], self.sizes_bytes[-1]
        inside = np.minimum(np.maximum(sizes_bytes, first), last)
        inside_ns = piecewise_linear(self.sizes_bytes, self.ns, inside)
        if (inside == sizes_bytes).all():
            return inside_ns
        if self.beyond is not None:
            there_ns, edge_ns = (np.maximum(1, self.beyond.costs_ns(sizes)) for sizes in (sizes_bytes, inside))
            return inside_ns * (there_ns / edge_ns)
        missing: NDArray[np.float64] = (first - np.minimum(sizes_bytes, first)) / max(1, first)
        smaller = 1 - self._share_of_bytes * missing
        if len(self.ns) == 1 or self.ns[-2] >= self.ns[-1]:
            return inside_ns * smaller * (np.maximum(sizes_bytes, last) / last if last else 1.0)
        return piecewise_linear(self.sizes_bytes, self.ns, np.maximum(sizes_bytes, first)) * smaller

    @cached_property
    def _share_of_bytes(self) -> float:
        """Part of the smallest size's time that is for its bytes, by the first line; 1 if there is only one size."""
        if len(self.ns) == 1:
            return 1.0
        first, second = self.sizes_bytes[:2]
        grown = self.ns[1] / max(1.0, self.ns[0]) - 1
        return float(min(max(0.0, grown * first / (second - first)), 1.0))


FREE = Table(np.zeros(1, dtype=np.int64), np.zeros(1))
"""The table of one rank, which sends nothing."""


def piecewise_linear(x: NDArray[np.int64], y: NDArray[np.float64], at: Sizes) -> NDArray[np.float64]:
    """Interpolate linearly between the points (x, y), with ascending x; the first and last line are continued."""
    if len(x) == 1:
        return np.full(at.shape, y[0])
    right = np.clip(x.searchsorted(at), 1, len(x) - 1)
    x0, y0 = x[right - 1], y[right - 1]
    return y0 + (y[right] - y0) * (at - x0) / (x[right] - x0)


def tables_by_world_size(timings: Sequence[Timing]) -> Mapping[int, Table]:
    """Make a table for each world size, in ascending order; repeated measurements give their median and spread."""
    tables = {}
    ordered = sorted(timings, key=attrgetter("world_size", "size_bytes"))
    for world_size, group in groupby(ordered, attrgetter("world_size")):
        rows = list(group)
        same = {size: [row.ns for row in some] for size, some in groupby(rows, attrgetter("size_bytes"))}
        times = {size: median_high(some) for size, some in same.items()}
        repeated = {size: _spread(some) for size, some in same.items() if len(some) > 1}
        of_buckets = [spread for size, spread in repeated.items() if size >= BUCKETS_FROM]
        tables[world_size] = Table(
            np.array(list(times), dtype=np.int64),
            np.array(list(times.values()), dtype=np.float64),
            max(median(row.spread for row in rows), median(of_buckets or repeated.values() or [0.0])),
        )
    return tables


def _spread(times_ns: Sequence[int]) -> float:
    """Return the relative error with which the median holds nine in ten repeated measurements; see `uncertainty`."""
    low, middle, high = np.quantile(np.maximum(times_ns, 1), (0.05, 0.5, 0.95), method="nearest")
    return float(max(middle / low, high / middle) - 1)


BUCKETS_FROM = 2**18
"""Bytes from which a message is as large as a bucket, whose spread counts before that of smaller ones."""
LARGE = 2**20
"""Bytes from which the only measured message is one whose time is for its bytes."""
NOISE = 0.03
"""Relative error of a good measurement; larger deviations from a line justify a further segment."""


class Segment(NamedTuple):
    """From `from_bytes` on, a collective takes `alpha_ns + ns_per_byte * size`; neither coefficient is negative."""

    from_bytes: int
    alpha_ns: float
    ns_per_byte: float

    def latency_share(self, size_bytes: float) -> float:
        """Return the fraction of the time for `size_bytes` that does not depend on the size."""
        total = self.alpha_ns + self.ns_per_byte * size_bytes
        return self.alpha_ns / total if total else 0.0


def segments(table: Table, noise: float = NOISE) -> tuple[Segment, ...]:
    """Fit segments that minimise the squared error relative to `noise` plus a penalty per segment.

    The penalty is that of the Bayesian information criterion (Schwarz 1978) for the three parameters of a segment.
    The optimum is found by dynamic programming over the breakpoints (Bellman 1961). Of a table with more than
    `MOST_FITTED` sizes, so many are fitted.
    """
    if len(table.ns) > MOST_FITTED:
        kept = np.linspace(0, len(table.ns) - 1, MOST_FITTED).astype(int)
        table = Table(table.sizes_bytes[kept], table.ns[kept])
    count = len(table.ns)
    penalty = 3 * float(np.log(max(count, 2))) * noise**2
    best: list[tuple[float, tuple[Segment, ...]]] = [(0.0, ())]
    for end in range(1, count + 1):
        ways = []
        for start in range(end):
            error, line = _fit(table.sizes_bytes[start:end], table.ns[start:end])
            is_large = start or (count == 1 and table.sizes_bytes[0] >= LARGE)
            if end - start == 1 and is_large:  # one point fits any line; a larger message takes longer for its bytes
                line = Segment(line.from_bytes, 0.0, float(table.ns[start] / table.sizes_bytes[start]))
            ways.append((best[start][0] + error + penalty, (*best[start][1], line)))
        best.append(min(ways, key=lambda way: way[0]))
    return best[-1][1]


def segment_at(pieces: tuple[Segment, ...], size_bytes: float) -> Segment:
    """Return the segment for a size; the first one also covers smaller sizes."""
    return [pieces[0], *(piece for piece in pieces if piece.from_bytes <= size_bytes)][-1]


def relative_squared_error(line: Segment, sizes_bytes: Sizes, ns: NDArray[np.float64]) -> float:
    """Return the sum over the points of (line / ns - 1) squared."""
    error = (line.alpha_ns + line.ns_per_byte * sizes_bytes - ns) / np.maximum(ns, 1)
    return float(error @ error)


def _fit(sizes_bytes: Sizes, ns: NDArray[np.float64]) -> tuple[float, Segment]:
    """Fit a line with nonnegative latency and slope; return its relative squared error and the line.

    If the unconstrained optimum has a negative coefficient, then latency or slope of the constrained optimum is zero.
    """
    weights, start = 1 / np.maximum(ns, 1) ** 2, int(sizes_bytes[0])
    sizes = sizes_bytes.astype(np.float64)
    total = weights.sum()
    middle, level = weights @ sizes / total, weights @ ns / total
    away = sizes - middle
    scale = weights @ away**2
    slope = weights @ (away * (ns - level)) / scale if scale > 0 else 0.0
    if slope >= 0 and level >= slope * middle:
        lines = [Segment(start, float(level - slope * middle), float(slope))]
    else:
        through_zero = weights @ (sizes * ns) / (weights @ sizes**2) if sizes.any() else 0.0
        lines = [Segment(start, float(level), 0.0), Segment(start, 0.0, float(through_zero))]
    return min((relative_squared_error(line, sizes_bytes, ns), line) for line in lines)


RANKS_AND_LOG = re.compile(r"([1-9]\d{0,5}):(.+)", re.DOTALL)


def ranks_and_log(path: str | os.PathLike[str]) -> tuple[int | None, str]:
    """Split `40:file.log` into the number of ranks and the log; the number is None if the path has none."""
    match = RANKS_AND_LOG.fullmatch(os.fspath(path))
    return (int(match[1]), match[2]) if match else (None, os.fspath(path))
