"""Topology: nested levels of links, the levels that a world size uses, and topology files in YAML.

A topology file::

    source: data sheet of the machine
    levels:
      nvlink: {members: 8, latency_us: 2.0, gb_per_s: 300}
      nic:    {of: nvlink, latency_us: 6.0, gb_per_s: 50}
    in_network: [nic]

Each level joins `members` groups of the level named by `of`; the level without `of` joins ranks. The outermost level
may omit `members` and then joins as many groups as needed. 1 GB is 10^9 bytes. Where direct links join the members
instead of a switch, the rate depends on how many take part: `gb_per_s: {2: 25, 4: 100, other: 150}`.
"""

import os
from collections.abc import Callable, Mapping
from math import inf, prod
from typing import Annotated, Any, Self

from pydantic import Field, PlainSerializer, WrapValidator, model_validator

from ...reference.files.reading import Schema, one_line_errors, parse_yaml, read_text
from ...reference.files.value_ranges import YEAR_NS, BytesPerS, Count, Nanoseconds

OTHER = "other"
GbPerS = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]


class Level(Schema):
    """Equal links, each from one member to a switch that joins all members.

    A member of the innermost level is a rank. A member of a higher level is a whole group of the level below, with
    the total rate of its links: a node with eight network cards has the rate of all eight.
    """

    name: str = Field(min_length=1)  #: name of the level, such as nvlink or nic, no unit; chosen by the user
    members: Count | None = None  #: members joined, a count (None: as many as needed); from the machine's data sheet
    latency_ns: Nanoseconds
    """time of an empty message to another member, nanoseconds; half a measured ping-pong, with NCCL that of a hop
    with Simple: 3,400 over NVLink; between nodes 14,000 and half of what 8 bytes on two nodes take above 25,000"""
    bytes_per_s: BytesPerS
    """rate at which one member sends to the others while it receives as much, bytes per second; from a measured large
    message, or the data sheet (a two-way rate halved), whose peak is 6-25 % too high"""
    bytes_per_s_by_members: dict[Annotated[int, Field(strict=False)], BytesPerS] = Field(default={})
    """other rates where fewer members take part, as on direct links without a switch, bytes per second by the number
    of members in use; from the machine's plan of links"""
    reduces: bool = False  #: whether its switches reduce (SHARP, NVLS), yes or no; from the switch's data sheet
    latency_is_usual: bool = False  #: whether the latency is that of similar links, yes or no; from the catalogue
    wait: float | None = None
    """how many times as long as over InfiniBand the pieces of a message wait for the first one (`BEYOND_THE_MODEL`),
    no unit (None: not known); from the catalogue"""

    @property
    def size(self) -> int:
        """Members in use; 1 for a level that joins as many as needed."""
        return self.members or 1

    @property
    def ns_per_byte(self) -> float:
        """Nanoseconds per byte on a member's links while all `members` are in use."""
        return 1e9 / self.bytes_per_s_by_members.get(self.size, self.bytes_per_s)

    def one_way(self) -> Self:
        """Return the level without what all-reduces on two nodes save, whose trees send a byte once, rings twice."""
        rates = {members: min(rate, self.bytes_per_s) for members, rate in self.bytes_per_s_by_members.items()}
        return self.model_copy(update={"bytes_per_s_by_members": rates})


class Topology(Schema, strict=False):
    """Levels of links, innermost first: the first level joins ranks, each further one groups of the previous."""

    levels: tuple[Level, ...] = Field(min_length=1, max_length=16)
    """levels of links, innermost first, no unit; from the machine's data sheet"""
    source: str = ""

    @model_validator(mode="after")
    def _inner_levels_are_bounded(self) -> Self:
        for level in self.levels[:-1]:
            if level.members is None:
                raise ValueError(
                    f"levels.{level.name}.members: expected a count, got none; only the outermost level may omit it"
                )
        return self

    @property
    def capacity(self) -> float:
        """Largest world size; infinite if the outermost level joins as many groups as needed."""
        return prod(level.members or inf for level in self.levels)

    def with_links(self, *, rates: float, latencies: float) -> Self:
        """Return a copy whose links send `rates` times as many bytes a second, with `latencies` times the latency."""
        levels = []
        for level in self.levels:
            by_members = {members: rate * rates for members, rate in level.bytes_per_s_by_members.items()}
            changed = {"latency_ns": round(level.latency_ns * latencies), "bytes_per_s": level.bytes_per_s * rates}
            levels.append(level.model_copy(update={**changed, "bytes_per_s_by_members": by_members}))
        return self.model_copy(update={"levels": tuple(levels)})

    def in_use(self, world_size: int) -> tuple[Level, ...]:
        """Return the levels with the members that `world_size` ranks use; groups are filled one after the other.

        If all ranks fit into one group of a level, the levels above it have one member.

        Raises:
            ValueError: The topology joins fewer ranks, or the last group of a level would be partly filled.
        """
        if world_size > self.capacity:
            raise ValueError(f"world_size: expected at most {self.capacity} ranks ({self}), got {world_size}")
        levels, groups = [], world_size
        for level in self.levels:
            members = min(groups, level.members or groups)
            if groups % members:
                filled = world_size // groups * members
                raise ValueError(
                    f"world_size: expected a multiple of {filled} above {filled} ranks, the size of a group of level "
                    f"{level.name} ({self}), got {world_size}"
                )
            levels.append(level.model_copy(update={"members": members}))
            groups //= members
        return tuple(levels)

    def __str__(self) -> str:
        return " of ".join(f"{level.name} x {level.members or 'any number'}" for level in reversed(self.levels))


def _by_members(given: object, rate: Callable[[object], float]) -> float | dict[int | str, float]:
    """Accept rates by the number of members in use in place of one rate."""
    if not isinstance(given, dict):
        return rate(given)
    if OTHER not in given or not all(key == OTHER or str(key).isdecimal() for key in given):
        raise ValueError(f"expected rates by the number of members, and for {OTHER!r}")
    return {key if key == OTHER else int(key): rate(value) for key, value in given.items()}


ADVICE = "write levels as in docs/predict.md, such as `nvlink: {members: 8, latency_us: 3, gb_per_s: 200}`"


class LevelEntry(Schema):
    """A level in a topology file."""

    of: str | None = None
    """level whose groups this level joins, a name (None: it joins ranks); from the machine's plan"""
    members: Count | None = None
    """groups or ranks joined, a count (None, outermost only: as many as needed); from the data sheet"""
    latency_us: float = Field(ge=0, le=YEAR_NS / 1000, allow_inf_nan=False)
    """time of an empty message, microseconds; half a measured ping-pong, with NCCL that of a hop with Simple: 3.4
    over NVLink; between nodes 14 and half of what 8 bytes on two nodes take above 25, such as 16.6 over InfiniBand,
    36 over the EFA of a p5, 91 over that of a p4d, 63 over TCPXO"""
    gb_per_s: Annotated[GbPerS, WrapValidator(_by_members), PlainSerializer(lambda rates: rates)]
    """rate at which one member sends while it receives as much, 10^9 bytes per second, an eighth of its Gbit/s; from
    a large message, or the data sheet (a two-way rate halved), whose peak is 6-25 % too high; on direct links without
    a switch, rates by the number of members in use, and `other`"""

    @model_validator(mode="before")
    @classmethod
    def _in_bytes(cls, given: object) -> object:
        """Take `gbit_per_s` in place of `gb_per_s`."""
        if not isinstance(given, dict) or not isinstance(given.get("gbit_per_s"), int | float):
            return given
        if "gb_per_s" in given:
            raise ValueError("expected gb_per_s (bytes) or gbit_per_s (bits), got both")
        others = {name: value for name, value in given.items() if name != "gbit_per_s"}
        return others | {"gb_per_s": given["gbit_per_s"] / 8}


class TopologyFile(Schema):
    """The fields of a topology file."""

    source: str = ""
    """where the figures come from, such as a data sheet's title, no unit; written by the user"""
    levels: dict[str, LevelEntry] = Field(min_length=1, max_length=16)
    """levels by name, in any order, no unit; from the machine's plan"""
    in_network: list[str] = Field(default=[])
    """names of levels whose switches reduce (SHARP, NVLS), no unit; from the switch's data sheet"""


def load_topology(path: str | os.PathLike[str]) -> Topology:
    """Read a topology file.

    Raises:
        ValueError: The file is missing, is not YAML or describes no hierarchy; the message names file, field, reason.
    """
    problem = ""
    try:
        text = read_text(path)
        problem = f"{path}: not YAML: "
        written = parse_yaml(text)
        problem = f"{path}: not a topology: "
        with one_line_errors():
            return topology_of(TopologyFile.model_validate(written))
    except ValueError as error:
        raise ValueError(f"{problem}{error}; {ADVICE}") from None


def topology_of(written: TopologyFile) -> Topology:
    """Convert the contents of a file to a topology.

    Raises:
        ValueError: The levels do not form a single chain.
    """
    for name in written.in_network:
        if name not in written.levels:
            raise ValueError(f"in_network: expected names of levels ({', '.join(written.levels)}), got {name}")
    levels = []
    for name, entry in _inside_out(written.levels).items():
        given: Any = entry.gb_per_s if isinstance(entry.gb_per_s, dict) else {OTHER: entry.gb_per_s}
        rates = {members: float(round(rate * 1e9)) for members, rate in given.items()}
        level = Level(
            name=name,
            members=entry.members,
            latency_ns=round(entry.latency_us * 1000),
            bytes_per_s=rates.pop(OTHER),
            bytes_per_s_by_members=rates,
            reduces=name in written.in_network,
        )
        levels.append(level)
    return Topology(levels=tuple(levels), source=written.source)


def _inside_out(levels: Mapping[str, LevelEntry]) -> dict[str, LevelEntry]:
    """Return the levels by name, innermost first; a level that is in no chain is a ValueError."""
    above: dict[str | None, str] = {}
    for name, entry in levels.items():
        if entry.of is not None and entry.of not in levels:
            raise ValueError(f"levels.{name}.of: expected the name of a level ({', '.join(levels)}), got {entry.of}")
        if entry.of in above:
            inner, first = "ranks (no `of`)" if entry.of is None else entry.of, above[entry.of]
            raise ValueError(
                f"levels.{name}.of: expected one level at most with each `of`, got both {first} and {name} of {inner}"
            )
        above[entry.of] = name
    chain: dict[str, LevelEntry] = {}
    outer: str | None = None
    while (outer := above.get(outer)) is not None:
        chain[outer] = levels[outer]
    for name in levels:
        if name not in chain:
            raise ValueError(f"levels.{name}.of: expected a chain that ends at a level without `of`, got a cycle")
    return chain
