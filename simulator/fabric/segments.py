"""Segments: a measured table as few straight lines, one for each protocol that the library switches between."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tables import Table

NOISE = 0.03
"""Relative error of a good measurement; what a line misses beyond it speaks for one more segment."""


class Segment(NamedTuple):
    """From `from_bytes` on a collective takes `alpha_ns + ns_per_byte * size`; neither is negative."""

    from_bytes: int
    alpha_ns: float
    ns_per_byte: float

    def latency_share(self, size_bytes: float) -> float:
        """Part of the time that does not depend on the size."""
        total = self.alpha_ns + self.ns_per_byte * size_bytes
        return self.alpha_ns / total if total else 0.0


def segments(table: Table, noise: float = NOISE) -> tuple[Segment, ...]:
    """The segments of least relative squared error, in units of `noise`, plus a price on each.

    The price is that of the Bayesian information criterion (Schwarz 1978) for the three numbers that a segment
    has. The best division is found by dynamic programming over the breakpoints, as in Bellman 1961.
    """
    count = len(table.ns)
    price = 3 * float(np.log(max(count, 2))) * noise**2
    best: list[tuple[float, tuple[Segment, ...]]] = [(0.0, ())]
    for end in range(1, count + 1):
        ways = []
        for start in range(end):
            error, line = _fit(table.sizes_bytes[start:end], table.ns[start:end])
            ways.append((best[start][0] + error + price, (*best[start][1], line)))
        best.append(min(ways, key=lambda way: way[0]))
    return best[-1][1]


def segment_at(pieces: tuple[Segment, ...], size_bytes: float) -> Segment:
    """The segment of a size; below the first it is the first."""
    return [pieces[0], *(piece for piece in pieces if piece.from_bytes <= size_bytes)][-1]


def relative_squared_error(line: Segment, sizes_bytes: NDArray[np.int64], ns: NDArray[np.float64]) -> float:
    """Sum over the points of the squared error, each relative to its time."""
    error = (line.alpha_ns + line.ns_per_byte * sizes_bytes - ns) / np.maximum(ns, 1)
    return float(error @ error)


def _fit(sizes_bytes: NDArray[np.int64], ns: NDArray[np.float64]) -> tuple[float, Segment]:
    """The line of least relative squared error whose latency and slope are not negative, and that error.

    Where the free line has a negative part, the best is at the edge: no latency, or no slope.
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
