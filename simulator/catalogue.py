"""Catalogue: devices and nodes by name, each figure with its source and date; the data are in `catalogue.yaml`.

A node is a machine with several GPUs. Its links become a topology: the rate by the data sheet, times the part of it
that a large all-reduce reaches. This part comes from a measured log of the system, or else from similar systems.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, StringConstraints, model_validator

from ..reference.files.reading import Schema, one_line_errors, parse_yaml, read_text
from ..reference.files.value_ranges import Count
from .fabric import Fabric, Level, Processor, Topology
from .fabric.topology import GbPerS

FILE = Path(__file__).with_name("catalogue.yaml")

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
LinkKind = Literal["nvlink", "network"]
"""A kind of link."""
Share = Annotated[str, StringConstraints(pattern=r"^\d+ of \d+$")]
Positive = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]


class Source(Schema):
    """Where figures come from."""

    title: str = Field(min_length=1)  #: title of a data sheet or page, or repository and file
    date: Annotated[str, StringConstraints(pattern=r"^20\d\d(-[01]\d)?$")]
    """Year, or year and month, of publication; if the source has none, when it was read."""


class _Figure(Schema):
    """A figure, which `str` writes with its unit."""

    source: str


class Memory(_Figure):
    """Bandwidth of a device's memory, 10^9 bytes per second, and its size as its name has it, in GiB."""

    gb_per_s: GbPerS
    gib: Positive | None = None

    def __str__(self) -> str:
        return f"{self.gb_per_s:g} GB/s" + (f", {self.gib:g} GiB" if self.gib else "")


class Peaks(_Figure):
    """Dense peak rates of matrix products by precision, 10^12 floating-point operations per second."""

    tflops: dict[Precision, Positive] = Field(min_length=1)

    def __str__(self) -> str:
        return ", ".join(f"{precision} {rate:g}" for precision, rate in self.tflops.items()) + " TFLOPS"


class MeasuredCosts(_Figure):
    """Costs of data parallelism that were measured on a device; the fields that are set replace the default ones."""

    processor: Processor

    def __str__(self) -> str:
        pack = self.processor.pack
        return (
            f"a copy {pack.fixed_ns / 1e3:g} us and {2 / pack.ns_per_byte:,.0f} GB/s, a launch "
            f"{self.processor.launch_ns / 1e3:g} us, beside collectives {self.processor.slow_down - 1:.0%} longer"
        )


class Rate(_Figure):
    """Rate at which one member sends while it receives as much: 10^9 bytes, or 10^9 bits, per second."""

    gb_per_s: GbPerS | None = None
    gbit_per_s: GbPerS | None = None

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        if (self.gb_per_s is None) == (self.gbit_per_s is None):
            raise ValueError("expected gb_per_s or gbit_per_s, got both or neither")
        return self

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes per second."""
        return 1e9 * (self.gb_per_s or 0) + 1e9 / 8 * (self.gbit_per_s or 0)

    def __str__(self) -> str:
        return f"{self.gbit_per_s:g} Gbit/s" if self.gb_per_s is None else f"{self.gb_per_s:g} GB/s"


class Reached(_Figure):
    """Part of the rate that a large all-reduce reaches, as nccl-tests' bus bandwidth over the rate."""

    part: Annotated[float, Field(gt=0, le=2)]

    def __str__(self) -> str:
        return f"{self.part:.3g} of the rate"


class Latency(_Figure):
    """Time of a hop of NCCL's ring with Simple, microseconds."""

    us: Positive
    wait: Positive | None = 1.0  #: `Level.wait` of the transport

    def __str__(self) -> str:
        wait = "not known" if self.wait is None else f"{self.wait:g} times InfiniBand's"
        return f"{self.us:g} us" + ("" if self.wait == 1 else f", wait {wait}")


class Link(Schema):
    """Links of one level."""

    members: Count | None = None  #: members joined; None, outermost only: as many as needed
    rate: Rate  #: of one member, by the data sheet
    reached: Reached  #: part of the rate that is reached while all members take part
    reached_by_members: dict[int, Reached] = Field(default={})  #: the same where fewer take part
    latency: Latency | None = None  #: None: that of the kind of link
    reduces: bool = False  #: whether its switches reduce; `rate` and `reached` are those without that

    def bytes_per_s(self, reached: Reached) -> float:
        """Return the rate that is reached, in whole bytes per second, as in topology files."""
        return float(round(self.rate.bytes_per_s * reached.part))


class DeviceEntry(Schema):
    """A device."""

    product: str  #: its full name
    pattern: str  #: matches whole words of the name that a driver gives to the device, in lower case
    memory: Memory
    peaks: Peaks | None = None  #: None: not in the catalogue, so the device is known by its memory only
    costs: MeasuredCosts | None = None  #: None: not measured


class Node(Schema):
    """A node."""

    product: str  #: its full name
    device: str  #: name of its devices
    links: dict[LinkKind, Link] = Field(min_length=1)  #: by kind, innermost first
    inside: dict[Literal["all_reduces", "iterations"], Share] = Field(default={})
    """How many of the measured times of the system, or of nodes of the same build, lie in the 90 % interval of the
    prediction, such as "10 of 12": all-reduces of 256 KiB and more, and iterations. Empty: none are known."""


class Catalogue(Schema):
    """The contents of `catalogue.yaml`; a figure without a listed source, or a source without figure, is an error."""

    sources: dict[str, Source]  #: by key
    latencies: dict[LinkKind, Latency]  #: by kind of link
    devices: dict[Name, DeviceEntry]  #: by name; the order is that in which patterns are tried
    nodes: dict[Name, Node]  #: by name

    @model_validator(mode="after")
    def _refers_to_what_there_is(self) -> Self:
        if wrong := sorted({figure.source for _, figure in _figures(self)} ^ self.sources.keys()):
            raise ValueError(f"sources: expected one for each figure, and none else, got too many or few: {wrong}")
        for name, node in self.nodes.items():
            if node.device not in self.devices:
                raise ValueError(f"nodes.{name}.device: expected the name of a device, got {node.device}")
        return self

    def figures(self, name: str) -> dict[str, tuple[str, Source]]:
        """Return the figures of a device or a node by field: the value with its unit, and its source.

        Raises:
            ValueError: There is no such entry.
        """
        entry: Schema | None = self.nodes.get(name) or self.devices.get(name)
        if entry is None:
            raise ValueError(unknown("name", name, [*self.nodes, *self.devices]))
        found = dict(_figures(entry))
        if isinstance(entry, Node):
            found = {f"links.{kind}.latency": self.latencies[kind] for kind in entry.links} | found
        return {field: (str(figure), self.sources[figure.source]) for field, figure in found.items()}

    def topology(self, name: str, *, network: Rate | None = None) -> Topology:
        """Return the links of a node, as many nodes as needed.

        `network`: another rate of the network, of which the same part is reached, maybe over another transport.

        Raises:
            ValueError: There is no such node, or it has no network of which to change the rate.
        """
        if name not in self.nodes:
            raise ValueError(unknown("node", name, self.nodes))
        links = dict(self.nodes[name].links)
        if network is not None:
            if "network" not in links:
                raise ValueError(f"network: expected a node with a network between nodes, got {name}")
            if network.bytes_per_s != links["network"].rate.bytes_per_s:
                links["network"] = links["network"].model_copy(update={"rate": network})
        levels = tuple(
            Level(
                name=kind,
                members=link.members,
                latency_ns=round(1000 * (link.latency or self.latencies[kind]).us),
                bytes_per_s=link.bytes_per_s(link.reached),
                bytes_per_s_by_members={n: link.bytes_per_s(part) for n, part in link.reached_by_members.items()},
                reduces=link.reduces,
                latency_is_usual=link.rate is network,
                wait=link.latency.wait if link.latency else None,
            )
            for kind, link in links.items()
        )
        return Topology(levels=levels, source=self._source_of(name, links))

    def node_like(self, name: str) -> str | None:
        """Return the only node whose name and product have all words of this name, such as p4d.24xlarge, or None."""
        words = _words(name)
        alike = [one for one, entry in self.nodes.items() if words and words <= _words(f"{one} {entry.product}")]
        return name if name in self.nodes else alike[0] if len(alike) == 1 else None

    def node_of(self, name: str) -> str | None:
        """Return the node that is meant, or the first that has the device of this name; None: there is none."""
        node, device = self.node_like(name), self.bare_device(name)
        return node or next((key for key, one in self.nodes.items() if one.device == device), None)

    def bare_device(self, name: str) -> str | None:
        """Return the device that is meant, without a precision: a100-40gb for A100-bf16; or None."""
        found = self.device_like(name) or ""
        return next((one for one in (found, found.rpartition("-")[0]) if one in self.devices), None)

    def device_like(self, name: str) -> str | None:
        """Return the device that is meant, with a precision if it is named: a100-40gb-bf16 for A100-bf16; or None.

        The first that a driver may call by this name, or that of a node.
        """
        if name in self.devices:
            return name
        short = name.lower().removeprefix("nvidia ")
        bare, _, precision = short.rpartition("-")
        if bare and precision in get_args(Precision):
            found = self.device_like(bare)
            return found and f"{found}-{precision}"
        matches = (one for one, entry in self.devices.items() if re.fullmatch(entry.pattern, short))
        node = self.node_like(name)
        return next(matches, None) or (node and self.nodes[node].device)

    def _source_of(self, name: str, links: Mapping[LinkKind, Link]) -> str:
        words = ", ".join(
            f"{kind} {link.rate}, of which {link.reached.part:.3g} is reached" for kind, link in links.items()
        )
        node = self.nodes[name]
        shares = node.inside.items() if links == node.links else ()
        inside = "".join(f"; {what.replace('_', '-')} inside the interval: {share}" for what, share in shares)
        return f"{node.product}: {words}{inside} (sources: `ddplab show {name}`)"


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))


def _figures(value: object, path: str = "") -> Iterator[tuple[str, _Figure]]:
    """Yield all figures in a value, each with the dotted path of its field."""
    if isinstance(value, _Figure):
        yield path, value
        return
    parts: Any = dict(value) if isinstance(value, Schema) else value
    if isinstance(parts, dict):
        for key, part in parts.items():
            yield from _figures(part, f"{path}.{key}" if path else str(key))


@cache
def read_catalogue() -> Catalogue:
    """Read the catalogue; once, when it is first needed."""
    with one_line_errors():
        return Catalogue.model_validate_json(json.dumps(parse_yaml(read_text(FILE))))  # YAML has lists for tuples


def unknown(what: str, name: str, names: Collection[str], others: str = "") -> str:
    """Describe a name that is not in the catalogue, in one line that lists near matches.

    `what`: what the name should be of, such as "device"; `others`: what else is accepted, such as "a file or".
    """
    short = name.lower()
    first, nodes = short.partition(".")[0], read_catalogue().nodes
    words = {one: _words(f"{one} {nodes[one].product if one in nodes else ''}") for one in names}
    near = [one for one in names if short and (one.startswith(short) or short.startswith(one) or short in words[one])]
    near += get_close_matches(short, names, n=5, cutoff=0.6)
    near += [one for one in names if first and get_close_matches(first, words[one], n=1, cutoff=0.75)]
    hint = f"; did you mean {' or '.join(list(dict.fromkeys(near))[:5])}?" if near else ""
    if re.search(r"(fp|f|int)[48]$", short):
        hint = "; rates in 8 or 4 bits are not known: name 16 bits, such as h100-bf16, and give a measured --step-ms"
    return f"{what}: expected {others} a name that `ddplab show` lists, got {name!r}{hint}".replace("  ", " ", 1)


def load_fabric(path: str | os.PathLike[str]) -> Fabric:
    """Read a fabric from a file, as `Fabric.load`, or make that of a node from its name, or from that of its GPU.

    A file of that name counts more than the catalogue.

    Raises:
        ValueError: The file cannot be used, or there is neither such a file nor such a node.
    """
    name, listed = os.fspath(path), read_catalogue()
    node = listed.node_of(name)
    is_a_path = os.sep in name or ":" in name or Path(name).suffix
    if os.path.lexists(name) or (is_a_path and node is None):
        return Fabric.load(path)
    if node is None:
        raise ValueError(unknown("fabric", name, listed.nodes, others="a file or"))
    return Fabric.from_topology(listed.topology(node))


RESCALED_FROM = ", rescaled from "
"""In the name of the device of a rescaled trace, between its new device and its old one."""


def entry_of(device_name: str) -> DeviceEntry | None:
    """Return the entry of the GPU that its driver calls so, such as NVIDIA A100-SXM4-80GB; None: not a known GPU."""
    name, devices = device_name.partition(RESCALED_FROM)[0].lower(), read_catalogue().devices.values()
    return next((one for one in devices if re.search(rf"\b(?:{one.pattern})\b", name)), None)
