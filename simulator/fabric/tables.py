"""Measured collectives: a table of times by size for each world size, read between its lines.

Straight lines join neighbours, because one line through all sizes is off by 12-35 % across protocol switches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from statistics import median, median_high

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from reference.records import Record


class Timing(Record):
    """A measured collective: all ranks of `world_size` moved `size_bytes` each in `ns`."""

    world_size: int = Field(ge=1, description="ranks that took part, a count; from the measurement's set-up")
    size_bytes: int = Field(ge=0, description="message of one rank, bytes; from the log's column of sizes")
    ns: int = Field(ge=0, description="time of the collective, nanoseconds; from the log's out-of-place time")
    spread: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="half-width of the band that holds 90 % of the repeated measurements, a fraction of `ns`; "
        "from the repetitions; 0 where they were not kept",
    )
    repeats: int = Field(default=1, ge=1, description="measurements of it, a count; chosen in the calibration")
    outliers: int = Field(
        default=0,
        ge=0,
        description="measurements that took over twice the median, a count; from the repetitions",
    )


@dataclass(frozen=True, eq=False)
class Table:
    """Times of one world size: `sizes_bytes` rise, `ns` are floats that hold whole numbers."""

    sizes_bytes: NDArray[np.int64]
    ns: NDArray[np.float64]
    spread: float = 0.0

    def costs_ns(self, sizes_bytes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Nanoseconds by size: on straight lines between neighbours; below the smallest size its time.

        Above the largest the last line goes on; where that does not rise, or there is none, time grows as bytes do.
        """
        last, last_ns = self.sizes_bytes[-1], self.ns[-1]
        grows = len(self.ns) == 1 or self.ns[-2] >= last_ns
        if grows:
            inside = polygon(self.sizes_bytes, self.ns, np.clip(sizes_bytes, self.sizes_bytes[0], last))
            return inside * (np.maximum(sizes_bytes, last) / last if last else 1.0)
        return polygon(self.sizes_bytes, self.ns, np.maximum(sizes_bytes, self.sizes_bytes[0]))


FREE = Table(np.zeros(1, dtype=np.int64), np.zeros(1))
"""Of a world of one rank: nothing is sent."""


def polygon(x: NDArray[np.int64], y: NDArray[np.float64], at: NDArray[np.int64]) -> NDArray[np.float64]:
    """Straight lines through the points (x, y), x rising; the first and the last go on."""
    if len(x) == 1:
        return np.full(at.shape, y[0])
    right = np.clip(x.searchsorted(at), 1, len(x) - 1)
    x0, y0 = x[right - 1], y[right - 1]
    line: NDArray[np.float64] = y0 + (y[right] - y0) * (at - x0) / (x[right] - x0)
    return line


def tables_by_world_size(timings: Sequence[Timing]) -> Mapping[int, Table]:
    """A table for each world size, the smallest first; the median where a size was measured more than once."""
    tables = {}
    for world_size, group in groupby(
        sorted(timings, key=attrgetter("world_size", "size_bytes")), attrgetter("world_size")
    ):
        rows = list(group)
        times = {size: median_high(row.ns for row in same) for size, same in groupby(rows, attrgetter("size_bytes"))}
        tables[world_size] = Table(
            np.array(list(times), dtype=np.int64),
            np.array(list(times.values()), dtype=np.float64),
            median(row.spread for row in rows),
        )
    return tables
