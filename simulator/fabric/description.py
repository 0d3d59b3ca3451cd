"""Description: all that is known of a fabric, field by field, and where it is read from."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from reference.files import write_whole
from reference.records import Record, first_problem, read_record

from .libraries import CONCURRENCY, Choice, Library
from .nccl_tests import read_log
from .processor import Processor
from .sharing import Sharing
from .tables import Timing
from .topology import Topology
from .topology_file import load_topology


class Description(Record, strict=False):
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
        return read_record(cls, path, what="a fabric file", cure="run `ddplab calibrate`")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        follows = {"concurrency"} - self.model_fields_set  # written down, it would no longer follow the library
        write_whole(path, (self.model_dump_json(indent=1, exclude=follows) + "\n").encode())

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
