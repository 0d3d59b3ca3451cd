"""Fabric: everything that the cost of a collective depends on, and how fabrics are made, merged, read and saved.

A cost comes from the measured table of the world size if there is one, else from a table extrapolated from other
world sizes if that is allowed, else from described links.
"""

import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from reference.schema import Schema, first_problem, read_schema, write_atomically

from .algorithms import CONCURRENCY, Choice, Library, Offer
from .contention import Sharing, measured_factor
from .cost_curves import Charged, Curve, Curves
from .nccl_tests import read_log
from .processor import Linear, Processor
from .tables import Segment, Table, Timing, segments, tables_by_world_size
from .topology import Topology, load_topology


class Description(Schema, strict=False):
    """The fields of a fabric file."""

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
    algorithm: Choice = Field(
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
        default=None,
        validate_default=True,
        ge=1,
        description="collectives that run at the same time, a count, None: the library's, 1 with NCCL and 2 with "
        "Gloo; from the job's backend",
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

    @field_validator("concurrency", mode="before")
    @classmethod
    def _or_that_of_the_library(cls, given: object, info: ValidationInfo) -> object:
        return CONCURRENCY.get(info.data.get("library", "nccl")) if given is None else given

    @model_validator(mode="after")
    def _has_costs(self) -> Self:
        if not self.all_reduce and self.topology is None:
            raise ValueError("all_reduce: expected measured times, or a topology in their place; got neither")
        return self

    @model_validator(mode="after")
    def _has_links_for_the_algorithm(self) -> Self:
        if self.algorithm == "library":
            return self
        if self.topology is None:
            raise ValueError(
                f"algorithm: expected a topology, on whose links {self.algorithm} would run, got measured tables "
                "alone, which hold whatever algorithm was measured; leave it out"
            )
        if self.algorithm == "in_network" and not any(level.reduces for level in self.topology.levels):
            raise ValueError("algorithm: expected a level of the topology that reduces for in_network, got none")
        return self

    @classmethod
    def from_table(
        cls, rows: Iterable[tuple[int, int, int]], *, concurrency: int | None = None, source: str = ""
    ) -> Self:
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
        return cls.from_table([row for path in paths for row in read_log(path)], source=", ".join(map(str, paths)))

    @classmethod
    def from_topology(
        cls,
        topology: Topology | str | os.PathLike[str],
        *,
        library: Library = "nccl",
        algorithm: Choice = "library",
        concurrency: int | None = None,
    ) -> Self:
        """From described links, or a YAML file of them; as many collectives at a time as the library runs.

        Raises:
            ValueError: A file that cannot be used, or an algorithm that the links do not offer.
        """
        links = topology if isinstance(topology, Topology) else load_topology(topology)
        return cls._checked(
            topology=links, library=library, algorithm=algorithm, concurrency=concurrency, source=links.source
        )

    @classmethod
    def from_alpha_beta(
        cls, alpha_ns: int, bytes_per_s: float, *, concurrency: int | None = None, source: str = ""
    ) -> Self:
        """From the latency of a hop and the rate of a link; a ring at every world size.

        Raises:
            ValueError: A negative latency, or a rate that is not positive.
        """
        link = {"name": "link", "latency_ns": alpha_ns, "bytes_per_s": bytes_per_s}
        return cls._checked(topology={"levels": [link]}, algorithm="ring", concurrency=concurrency, source=source)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a topology (`.yaml`, `.yml`), a log of nccl-tests (`.log`, `.txt`), or what `save` wrote (any other).

        Raises:
            ValueError: The file is missing, malformed or inconsistent; the message names file, field, reason.
        """
        ending = Path(path).suffix.lower()
        if ending in (".yaml", ".yml"):
            return cls.from_topology(path)
        if ending in (".log", ".txt"):
            return cls.from_nccl_tests(path)
        return read_schema(cls, path, what="a fabric file", cure="run `ddplab calibrate`")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        follows = {"concurrency"} - self.model_fields_set  # written down, it would no longer follow the library
        write_atomically(path, (self.model_dump_json(indent=1, exclude=follows) + "\n").encode())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; what follows from other fields follows from the updated ones."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        if "concurrency" not in copied.model_fields_set:
            copied.__dict__["concurrency"] = CONCURRENCY[copied.library]
        return copied

    @classmethod
    def _checked(cls, **fields: object) -> Self:
        """Of the fields that are not None."""
        try:
            return cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise ValueError(f"fabric: {first_problem(error)}") from None


D = TypeVar("D", bound=Description)

ALIKE = ("concurrency", "scale", "slow_link")
"""Fields that change what a table means, so that tables under different ones are no one fabric's."""


def merge(fabrics: Sequence[D]) -> D:
    """The measured tables of all, the topology of the one that has any, and everything else of the first.

    Raises:
        ValueError: None, or two that do not fit together; one line, which names them by place and source.
    """
    if not fabrics:
        raise ValueError("fabrics: expected at least one to merge, got none")
    for number, fabric in enumerate(fabrics):
        if not isinstance(fabric, Description):
            raise ValueError(f"fabrics[{number}]: expected a Fabric, got {reprlib.repr(fabric)}")
    _check_alike(fabrics)
    _check_measured_once(fabrics)
    update = {
        "all_reduce": tuple(row for fabric in fabrics for row in fabric.all_reduce),
        "broadcast": tuple(row for fabric in fabrics for row in fabric.broadcast),
        "topology": _only_topology(fabrics),
        "source": "; ".join(dict.fromkeys(fabric.source for fabric in fabrics if fabric.source)),
    }
    return fabrics[0].model_copy(update=update)


def _check_alike(fabrics: Sequence[Description]) -> None:
    first = _named(fabrics, 0)
    for number, fabric in enumerate(fabrics):
        for name in ALIKE:
            expected, seen = getattr(fabrics[0], name), getattr(fabric, name)
            if seen != expected:
                raise ValueError(f"{_named(fabrics, number)}: {name}: expected {expected}, as of {first}, got {seen}")


def _check_measured_once(fabrics: Sequence[Description]) -> None:
    measured: dict[int, int] = {}
    for number, fabric in enumerate(fabrics):
        for world_size in sorted({row.world_size for row in (*fabric.all_reduce, *fabric.broadcast)}):
            if (before := measured.setdefault(world_size, number)) != number:
                raise ValueError(
                    f"{_named(fabrics, number)}: expected world sizes that no other measured, got {world_size}, "
                    f"which {_named(fabrics, before)} measured too; leave one of them out"
                )


def _only_topology(fabrics: Sequence[Description]) -> Topology | None:
    described = [number for number, fabric in enumerate(fabrics) if fabric.topology is not None]
    if len(described) > 1:
        first, second = (_named(fabrics, number) for number in described[:2])
        raise ValueError(f"{second}: topology: expected links of one fabric, got more, as {first} has some")
    return fabrics[described[0]].topology if described else None


def _named(fabrics: Sequence[Description], number: int) -> str:
    source = fabrics[number].source
    return f"fabrics[{number}] ({source})" if source else f"fabrics[{number}]"


LINK_SIZES = 2 ** np.arange(31)
"""Bytes at which described links are fitted by segments: powers of two up to 1 GiB."""


class Fabric(Description):
    """What collectives cost; see the module's docstring. How one is made and saved: see `Description`."""

    @classmethod
    def merged(cls, *fabrics: Self) -> Self:
        """One fabric out of several, such as logs or calibrations of several world sizes, and links for the others.

        The measured tables are those of all, the topology that of the one that has any, and `source` names all.
        Everything else is the first's: processor, sharing, library, algorithm, extrapolate.

        Raises:
            ValueError: A world size measured in two of them, two topologies, or another concurrency, scale or
                slow_link than the first's; the message names the fabrics by place and source.
        """
        return merge(fabrics)

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
        return self._costs_ns(self._curves.all_reduce(world_size), sizes_bytes)

    def broadcast_ns(self, size_bytes: int, world_size: int) -> int:
        """Nanoseconds of a broadcast, one rank's message to all; measured, or described, or else as an all-reduce.

        Raises:
            ValueError: As `all_reduce_ns`.
        """
        return int(self._costs_ns(self._curves.broadcast(world_size), np.array([size_bytes]))[0])

    def all_gather_costs_ns(self, sizes_bytes: NDArray[np.int64], world_size: int) -> NDArray[np.int64]:
        """Nanoseconds of all-gathers to which each rank gives `sizes_bytes`.

        On a ring n - 1 steps that each pass on one rank's part: half an all-reduce of all parts.
        """
        return self._costs_ns(self._curves.all_gather(world_size), world_size * sizes_bytes) // 2

    def segments(self, world_size: int) -> tuple[Segment, ...]:
        """All-reduces as straight lines, each from a size of message on: latency in ns, and ns a byte.

        A measured or grown table is fitted at its own sizes, one line for each protocol that the library switches
        to. Described links are fitted at powers of two from 1 byte to 1 GiB; a ring is one line exactly.

        Returns:
            Segments by rising `from_bytes`; each holds up to the next one's.

        Raises:
            ValueError: As `all_reduce_ns`.
        """
        curve = self._curves.all_reduce(world_size)
        sizes = curve.sizes_bytes if isinstance(curve, Table) else LINK_SIZES
        return segments(Table(sizes, self._charged(curve).costs_ns(sizes)))

    def origin(self, world_size: int) -> str:
        """Where the costs at a world size come from: "measured", "extrapolated", "described"; "none" of one rank."""
        return self._curves.origin(world_size)

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
            alone, beside = self._costs_ns(cost, np.array([size_bytes, size_bytes * running]))
        else:
            latency, alone = self._costs_ns(curve, np.array([0, size_bytes]))
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
        contention = tuple(
            row.model_copy(update={"compute": 1.0, "compute_error": 0.0}) for row in self.processor.contention
        )
        update = {"pack": Linear(), "launch_ns": 0, "contention": contention}
        return self.model_copy(update={"processor": self.processor.model_copy(update=update)})

    def _costs_ns(self, curve: Curve, sizes_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.rint(self._charged(curve).costs_ns(sizes_bytes)).astype(np.int64)

    def _charged(self, curve: Curve) -> Charged:
        return Charged(curve, self.slow_link, self.scale)

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
