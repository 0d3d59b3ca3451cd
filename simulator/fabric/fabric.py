"""Fabric: everything that the cost of a collective depends on, and what it costs the processor to run one.

A cost comes from a measured table where there is one for the world size, else from a table grown out of the others
where that is asked for, else from described links.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from reference.files import write_whole
from reference.records import Record, first_problem, read_record

from .curves import Curve, Curves
from .libraries import CONCURRENCY, Algorithm, Library, Offer
from .nccl_tests import read_log
from .processor import Linear, Processor
from .sharing import Sharing, measured_factor
from .tables import Timing, tables_by_world_size
from .topology import Topology
from .topology_file import load_topology


class Fabric(Record, strict=False):
    """What collectives cost; see the module's docstring."""

    all_reduce: tuple[Timing, ...] = Field(
        default=(), description="measured all-reduces; from nccl-tests or `ddplab calibrate`"
    )
    broadcast: tuple[Timing, ...] = Field(default=(), description="measured broadcasts; from `ddplab calibrate`")
    topology: Topology | None = Field(
        default=None, description="links, for world sizes without a measured table; from the machine's data sheet"
    )
    library: Library = Field(
        default="nccl",
        description="collective library of described links and of grown tables; from the job's backend",
    )
    algorithm: Literal["library"] | Algorithm = Field(
        default="library",
        description="all-reduce on described links; library: the cheapest that it has; from the job's settings",
    )
    extrapolate: bool = Field(
        default=False,
        description="whether world sizes that were not measured get a grown table, yes or no; the user's",
    )
    slow_link: float = Field(
        default=1.0,
        ge=1,
        allow_inf_nan=False,
        description="time of a byte on the slowest rank's link as a multiple of the others'; from a pairwise test",
    )
    scale: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="factor on the cost of every collective; see `scaled`"
    )
    concurrency: int = Field(
        default=1, ge=1, description="collectives that run at the same time, a count; 2 with Gloo, 1 with NCCL"
    )
    sharing: tuple[Sharing, ...] = Field(
        default=(), description="slow-down with two at a time; from `ddplab calibrate`; empty: tables know none"
    )
    processor: Processor = Field(
        default=Processor(), description="costs to the processor, nanoseconds and factors; from `ddplab calibrate`"
    )
    source: str = Field(
        default="", description="where the figures come from: machine, versions, data set; the user's"
    )

    @model_validator(mode="after")
    def _has_costs(self) -> Self:
        if not self.all_reduce and self.topology is None:
            raise ValueError("all_reduce: expected measured times, or a topology in their place; got neither")
        if (
            self.algorithm == "in_network"
            and self.topology
            and not any(level.reduces for level in self.topology.levels)
        ):
            raise ValueError("algorithm: expected a level of the topology that reduces for in_network, got none")
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
    def from_topology(
        cls,
        topology: Topology | str | os.PathLike[str],
        *,
        library: Library = "nccl",
        algorithm: Literal["library"] | Algorithm = "library",
        concurrency: int | None = None,
    ) -> Self:
        """From described links, or a YAML file of them; as many collectives at a time as the library runs.

        Raises:
            ValueError: A file that cannot be used, or an algorithm that the links do not offer.
        """
        links = topology if isinstance(topology, Topology) else load_topology(topology)
        at_a_time = CONCURRENCY.get(library, 1) if concurrency is None else concurrency
        return cls._checked(
            topology=links, library=library, algorithm=algorithm, concurrency=at_a_time, source=links.source
        )

    @classmethod
    def from_alpha_beta(cls, alpha_ns: int, bytes_per_s: float, *, concurrency: int = 1, source: str = "") -> Self:
        """From the latency of a hop and the rate of a link; a ring at every world size.

        Raises:
            ValueError: A negative latency, or a rate that is not positive.
        """
        link = {"name": "link", "latency_ns": alpha_ns, "bytes_per_s": bytes_per_s}
        return cls._checked(topology={"levels": [link]}, algorithm="ring", concurrency=concurrency, source=source)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a calibration file that `save` wrote, or a topology file (`.yaml`, `.yml`).

        Raises:
            ValueError: The file is missing, malformed or inconsistent; the message names file, field, reason.
        """
        if Path(path).suffix.lower() in (".yaml", ".yml"):
            return cls.from_topology(path)
        return read_record(cls, path, what="a fabric file", cure="run `ddplab calibrate`")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        write_whole(path, (self.model_dump_json(indent=1) + "\n").encode())

    @property
    def world_sizes(self) -> list[int]:
        """World sizes that were measured."""
        return list(self._curves.all_reduces)

    def all_reduce_ns(self, size_bytes: int, world_size: int) -> int:
        """Nanoseconds of an all-reduce of `size_bytes` over `world_size` ranks that has the fabric to itself.

        Raises:
            ValueError: The world size was not measured and may not be grown, or the topology does not fit it.
        """
        return int(self.all_reduce_costs_ns(np.array([size_bytes]), world_size)[0])

    def all_reduce_costs_ns(self, sizes_bytes: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
        """`all_reduce_ns` of many sizes at once: nanoseconds, in the order of `sizes_bytes`."""
        return self._charged(self._curves.all_reduce(world_size), sizes_bytes)

    def broadcast_ns(self, size_bytes: int, world_size: int) -> int:
        """Nanoseconds of a broadcast, one rank's message to all; measured, or described, or else as an all-reduce.

        Raises:
            ValueError: As `all_reduce_ns`.
        """
        return int(self._charged(self._curves.broadcast(world_size), np.array([size_bytes]))[0])

    def all_gather_costs_ns(self, sizes_bytes: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
        """Nanoseconds of all-gathers to which each rank gives `sizes_bytes`.

        On a ring n - 1 steps that each pass on one rank's part: half an all-reduce of all parts.
        """
        return self._charged(self._curves.all_gather(world_size), world_size * sizes_bytes) // 2

    def algorithm_for(self, size_bytes: int, world_size: int) -> str:
        """Which all-reduce algorithm a size gets on described links; else "measured", "extrapolated" or "none"."""
        curve = self._curves.all_reduce(world_size)
        return curve.choice(size_bytes)[0] if isinstance(curve, Offer) else self._curves.origin(world_size)

    def sharing_factor(self, size_bytes: int, running: int, world_size: int) -> float:
        """How much longer a collective takes while `running` of them run, itself included.

        As measured where it was; else collectives share the bytes a second of their link, not the latency; of a table
        that is the time of its smallest size.
        """
        if running == 1:
            return 1.0
        if self.sharing:
            return measured_factor(self.sharing, size_bytes, running)
        curve = self._curves.all_reduce(world_size)
        if isinstance(curve, Offer):
            cost = curve.choice(size_bytes)[1]  # the library chooses before it knows what else runs
            alone, beside = self._charged(cost, np.array([size_bytes, size_bytes * running]))
        else:
            latency, alone = self._charged(curve, np.array([0, size_bytes]))
            beside = alone + (running - 1) * max(0, alone - latency)
        return float(beside / alone) if alone else 1.0

    def relative_error(self, world_size: int) -> float:
        """Half-width of the band that holds a collective's cost nine times in ten, as a fraction of the cost."""
        return self._curves.relative_error(world_size)

    def scaled(self, factor: float) -> Self:
        """The same fabric with every collective `factor` times as long.

        Raises:
            ValueError: A factor that is not positive.
        """
        if not 0 < factor < float("inf"):
            raise ValueError(f"factor: expected a positive number, got {factor}")
        return self.model_copy(update={"scale": self.scale * factor})

    def without_what_a_ddp_trace_holds(self) -> Self:
        """For a trace that was recorded under data parallelism: its computation was slowed, and copied, already."""
        update = {"pack": Linear(), "launch_ns": 0, "compute_slowdown": 1.0, "compute_slowdown_error": 0.0}
        return self.model_copy(update={"processor": self.processor.model_copy(update=update)})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; the copy prepares its costs anew, because they may follow from what was updated."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    def _charged(self, curve: Curve, sizes_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """A curve's costs with what the whole fabric adds: each collective passes the slowest link."""
        costs = curve.costs_ns(sizes_bytes)
        if self.slow_link > 1:
            empty = curve.costs_ns(np.zeros(1, dtype=np.int64))
            costs = costs + (self.slow_link - 1) * np.maximum(costs - empty, 0)
        return np.rint(self.scale * costs).astype(np.int64)

    @cached_property
    def _curves(self) -> Curves:
        return Curves(
            all_reduces=tables_by_world_size(self.all_reduce),
            broadcasts=tables_by_world_size(self.broadcast),
            topology=self.topology,
            library=self.library,
            algorithm=self.algorithm,
            extrapolate=self.extrapolate,
        )

    @classmethod
    def _checked(cls, **fields: object) -> Self:
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ValueError(f"fabric: {first_problem(error)}") from None
