"""Fabric: everything that the cost of a collective depends on, and what it costs the processor to run one.

A cost comes from a measured table where there is one for the world size (interpolated between sizes, because
a straight line through all of them is off by 12-35 % across protocol switches), else from alpha and beta.
"""

import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Self

from pydantic import Field, ValidationError, model_validator

from reference.files import write_whole
from reference.records import Record, first_problem

from .nccl_tests import read_log
from .processor import Linear, Processor

NS_PER_S = 1_000_000_000
CONCURRENCY = {"gloo": 2, "nccl": 1}
"""Collectives of one process group that the backend runs at a time: Gloo has two threads, NCCL one stream."""


class Timing(Record):
    """A measured collective: all ranks of `world_size` moved `size_bytes` each in `ns`."""

    world_size: int = Field(ge=1)
    size_bytes: int = Field(ge=0)
    ns: int = Field(ge=0)


class AlphaBeta(Record):
    """A ring of equal links: latency of one hop, and the rate of the slowest link."""

    alpha_ns: int = Field(ge=0)
    bytes_per_s: float = Field(gt=0, allow_inf_nan=False)

    def all_reduce_ns(self, size_bytes: int, world_size: int) -> int:
        """2 (n - 1) steps that each pass on one n-th of the message (Patarasu and Yuan 2009)."""
        steps = 2 * (world_size - 1)
        return steps * self.alpha_ns + round(steps * size_bytes * NS_PER_S / (world_size * self.bytes_per_s))


class Sharing(Record):
    """How much longer a collective of `size_bytes` takes when another of its size runs beside it."""

    size_bytes: int = Field(ge=0)
    factor: float = Field(ge=0.5, le=4.0, allow_inf_nan=False)


class Fabric(Record, strict=False):
    """What collectives cost; see the module's docstring."""

    all_reduce: tuple[Timing, ...] = ()
    broadcast: tuple[Timing, ...] = ()
    alpha_beta: AlphaBeta | None = None
    concurrency: int = Field(default=1, ge=1, description="collectives that run at the same time")
    sharing: tuple[Sharing, ...] = Field(default=(), description="with two at a time; empty: no slow-down")
    processor: Processor = Processor()
    source: str = Field(default="", description="where the figures come from: machine, versions, data set")

    @model_validator(mode="after")
    def _has_costs(self) -> Self:
        if not self.all_reduce and self.alpha_beta is None:
            raise ValueError("all_reduce: expected measured times, or alpha_beta in their place; got neither")
        return self

    @classmethod
    def from_table(cls, rows: Iterable[tuple[int, int, int]], *, concurrency: int = 1, source: str = "") -> Self:
        """From measured rows `(world_size, size_bytes, ns)`, in any order.

        Raises:
            ValueError: No row, or a negative or non-integer entry.
        """
        return cls._checked(
            all_reduce=[{"world_size": n, "size_bytes": size, "ns": ns} for n, size, ns in rows],
            concurrency=concurrency,
            source=source,
        )

    @classmethod
    def from_nccl_tests(cls, *paths: str | os.PathLike[str]) -> Self:
        """From logs of nccl-tests' `all_reduce_perf`, one or more world sizes; one collective at a time, as NCCL.

        Raises:
            ValueError: A log that cannot be used; the message names it.
        """
        rows = [row for path in paths for row in read_log(path)]
        return cls.from_table(rows, concurrency=CONCURRENCY["nccl"], source=", ".join(map(str, paths)))

    @classmethod
    def from_alpha_beta(cls, alpha_ns: int, bytes_per_s: float, *, concurrency: int = 1, source: str = "") -> Self:
        """From the latency of a hop and the rate of a link; a ring at every world size."""
        ring = {"alpha_ns": alpha_ns, "bytes_per_s": bytes_per_s}
        return cls._checked(alpha_beta=ring, concurrency=concurrency, source=source)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a calibration file that `save` wrote.

        Raises:
            ValueError: The file is missing, not JSON or inconsistent; the message names file, field, reason.
        """
        try:
            return cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: cannot be read: {error.strerror or error}; run `ddplab calibrate`") from None
        except ValidationError as error:
            raise ValueError(
                f"{path}: not a fabric file: {first_problem(error)}; run `ddplab calibrate` again"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        write_whole(path, (self.model_dump_json(indent=1) + "\n").encode())

    @property
    def world_sizes(self) -> list[int]:
        """World sizes that were measured."""
        return sorted(self._tables)

    def all_reduce_ns(self, size_bytes: int, world_size: int) -> int:
        """Nanoseconds of an all-reduce of `size_bytes` over `world_size` ranks that has the fabric to itself.

        Raises:
            ValueError: No table for that world size, and no alpha-beta either.
        """
        if world_size == 1:
            return 0
        if world_size in self._tables:
            return _interpolate(self._tables[world_size], size_bytes)
        if self.alpha_beta is not None:
            return self.alpha_beta.all_reduce_ns(size_bytes, world_size)
        raise ValueError(
            f"world_size: all-reduce was measured for {self.world_sizes} ranks, not for {world_size}; "
            f"measure it (ddplab calibrate --world-size {world_size}), or use Fabric.from_alpha_beta"
        )

    def broadcast_ns(self, size_bytes: int, world_size: int) -> int:
        """Nanoseconds of a broadcast; where none was measured, those of an all-reduce, which bound it from above."""
        if world_size > 1 and world_size in self._broadcasts:
            return _interpolate(self._broadcasts[world_size], size_bytes)
        return self.all_reduce_ns(size_bytes, world_size)

    def sharing_factor(self, size_bytes: int, running: int) -> float:
        """How much longer a collective takes while `running` of them run, itself included."""
        if running == 1 or not self.sharing:
            return 1.0
        points = [(row.size_bytes, row.factor) for row in sorted(self.sharing, key=attrgetter("size_bytes"))]
        two = _line(points, min(max(size_bytes, points[0][0]), points[-1][0]))
        return max(1.0, 1.0 + (two - 1.0) * (running - 1))

    def without_what_a_ddp_trace_holds(self) -> Self:
        """For a trace that was recorded under data parallelism: its computation was slowed, and copied, already."""
        update = {"pack": Linear(), "launch_ns": 0, "compute_slowdown": 1.0}
        return self.model_copy(update={"processor": self.processor.model_copy(update=update)})

    @cached_property
    def _tables(self) -> dict[int, list[tuple[int, int]]]:
        return _by_world_size(self.all_reduce)

    @cached_property
    def _broadcasts(self) -> dict[int, list[tuple[int, int]]]:
        return _by_world_size(self.broadcast)

    @classmethod
    def _checked(cls, **fields: object) -> Self:
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ValueError(f"fabric: {first_problem(error)}") from None


def _by_world_size(timings: Sequence[Timing]) -> dict[int, list[tuple[int, int]]]:
    """Sorted `(size_bytes, ns)` by world size; the median where a size was measured more than once."""
    tables = {}
    ordered = sorted(timings, key=attrgetter("world_size", "size_bytes", "ns"))
    for world_size, rows in groupby(ordered, key=attrgetter("world_size")):
        sizes = groupby(rows, key=attrgetter("size_bytes"))
        tables[world_size] = [(size, _middle([row.ns for row in same])) for size, same in sizes]
    return tables


def _middle(ordered: list[int]) -> int:
    return ordered[len(ordered) // 2]


def _interpolate(table: list[tuple[int, int]], size_bytes: int) -> int:
    """Straight lines between neighbours; below the smallest size its time.

    Above the largest the last line goes on; where that does not rise, or there is none, time grows as bytes do.
    """
    largest, ns = table[-1]
    if size_bytes <= table[0][0]:
        return table[0][1]
    if size_bytes > largest and (len(table) == 1 or table[-2][1] >= ns):
        return round(ns * size_bytes / largest) if largest else ns
    return round(_line(table, size_bytes))


def _line(points: Sequence[tuple[int, float]], x: int) -> float:
    """The polygon through `points` at x, its last piece continued."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_left(points, x, key=lambda point: point[0]), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
