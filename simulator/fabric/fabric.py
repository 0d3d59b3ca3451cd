"""Fabric: everything that the cost of a collective depends on; fabrics are made, merged, read and saved here.

A cost comes from the table measured at the world size; without one, from a table extrapolated from other world sizes
if `extrapolate` is set; or else from the links of the topology.
"""

import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationInfo, field_validator, model_validator

from ...reference.files.reading import Schema, read_schema, read_text
from ...reference.files.value_ranges import YEAR_NS, InParallel, Multiple, SlowdownFactor, as_int64
from ...reference.files.writing import write_atomically
from ...reference.trace import VERSION_FIELD
from .algorithms import CONCURRENCY, LATEST, AlgorithmCosts, AlgorithmSetting, Library
from .cost_curves import CostCurves, errors_beyond
from .link_sharing import LinkShare, Sharing, measured_share
from .measured_tables import CostCurve, Segment, Sizes, Table, Timing, segments, tables_by_world_size
from .nccl_tests import read_log
from .processor_costs import Processor
from .topology import Topology, load_topology

NOT_A_TRACE = "expected a fabric file, got a trace; traces are arguments without an option"
OF_NCCL_TESTS = re.compile('"out_of_place"|"busBw"')
"""In JSON of nccl-tests and of rccl-tests."""
DISAGREEING = 0.3
"""Spread of repeated all-reduces from which a sentence names it."""
LARGE_MESSAGE = 2**26
"""Bytes from which the time of a message is for its bytes."""
OUT_OF_ORDER = 2.5
"""Multiple of the time that described links let expect from which their measurement is called out of order. Of 16
published systems, one pair of nodes is above it, at 2.8 (NVIDIA/nccl-tests issue 290)."""
CHECK_LINKS = (
    "usual causes are GPUs that share a network card, no GPUDirect RDMA, and a switch that drops packets; run "
    "`NCCL_DEBUG=INFO all_reduce_perf -b 1G -e 1G` on each pair of nodes"
)
USUAL_LATENCY = (
    "the latency between nodes seems not to be measured with NCCL: published ones are 9 to 111 us by transport (EFA, "
    "InfiniBand, RoCE, Slingshot, TCPXO), which ranges contain; run `all_reduce_perf -b 8 -e 8` on two nodes, and "
    "give half of its time as the latency"
)
"""What is said of a latency that is NCCL's default, or less than any published; figures as in `catalogue.yaml`."""
SOCKETS = (
    "a network of 10 to 50 Gbit/s may be Ethernet, of which NCCL's sockets reach 46 to 96 % in published tests; "
    "ranges contain this; run `all_reduce_perf -b 1G -e 1G` on two nodes, and give its rate"
)
LINK_SIZES = 2 ** np.arange(31)
"""Message sizes in bytes at which segments are fitted to the costs of described links: powers of two up to 1 GiB."""


class Fabric(Schema, strict=False):
    """Everything that the cost of a collective depends on; the fields are those of a fabric file.

    Make one with `from_table`, `from_nccl_tests`, `from_topology`, `from_alpha_beta`, `load` or `merged`.
    """

    all_reduce: tuple[Timing, ...] = ()
    """measured all-reduces; from nccl-tests or `ddplab calibrate`"""
    broadcast: tuple[Timing, ...] = ()
    """measured broadcasts; from `ddplab calibrate`"""
    topology: Topology | None = None
    """links, for world sizes that were not measured; from the machine's data sheet"""
    library: Library = "nccl"
    """collective library, for described links and extrapolated tables, a name; from the backend"""
    algorithm: AlgorithmSetting = "library"
    """all-reduce algorithm on described links, a name (`library`: the cheapest that the library has); from the
    settings of the library"""
    nccl_version: str = LATEST
    """NCCL's version, for described links, such as 2.21.5; from the log or torch.cuda.nccl.version()"""
    extrapolate: bool = False
    """whether tables are extrapolated to world sizes that were not measured, yes or no; chosen by the user"""
    slow_link: SlowdownFactor = 1.0
    """time of a byte on the slowest rank's link as a multiple of the others'; from a pairwise test"""
    scale: Multiple = 1.0
    """cost of every collective, as a multiple; chosen by the user"""
    concurrency: InParallel = Field(default=None, validate_default=True)
    """collectives of a process group that run at a time, a count (None: NCCL's 1 or Gloo's 2); from the backend"""
    sharing: tuple[Sharing, ...] = ()
    """slow-down of two collectives at a time, factors (empty: they share the bandwidth); from `ddplab calibrate`"""
    processor: Processor = Processor()
    """processor costs of data parallelism, nanoseconds and factors; from `ddplab calibrate`"""
    source: str = ""
    """where the figures come from: machine, versions, data set; written by the user"""

    @field_validator("nccl_version")
    @classmethod
    def _is_a_version(cls, given: str) -> str:
        if not re.fullmatch(r"\d{1,3}\.\d{1,3}(\.\d{1,3})?", given, flags=re.ASCII):
            raise ValueError(f"expected a version of NCCL such as 2.21.5, got {reprlib.repr(given)}")
        return given

    @field_validator("concurrency", mode="before")
    @classmethod
    def _default_to_the_librarys(cls, given: object, info: ValidationInfo) -> object:
        return CONCURRENCY.get(info.data.get("library", "nccl")) if given is None else given

    @model_validator(mode="after")
    def _has_costs(self) -> Self:
        if not self.all_reduce and self.topology is None:
            raise ValueError("all_reduce: expected measured times or a topology, got neither")
        if self.topology is None and self.algorithm != "library":
            raise ValueError(
                f"algorithm: expected a topology for {self.algorithm}, got measured tables alone, which have "
                "the algorithm of the measurement; leave algorithm out"
            )
        levels = () if self.topology is None else self.topology.levels
        if self.algorithm == "in_network" and not any(level.reduces for level in levels):
            raise ValueError("algorithm: expected a topology with a level that reduces for in_network, got none")
        return self

    @classmethod
    def from_table(
        cls, rows: Iterable[tuple[int, int, int]], *, concurrency: int | None = None, source: str = ""
    ) -> Self:
        """Make a fabric from measured rows `(world_size, size_bytes, ns)`, in any order.

        Raises:
            ValueError: There is no row, or an entry is negative or not an integer.
        """
        timings = [{"world_size": ranks, "size_bytes": size, "ns": ns} for ranks, size, ns in rows]
        return cls._checked(all_reduce=timings, concurrency=concurrency, source=source)

    @classmethod
    def from_nccl_tests(cls, *paths: str | os.PathLike[str]) -> Self:
        """Make a fabric from logs of nccl-tests' `all_reduce_perf`; collectives run one at a time, as in NCCL.

        Args:
            paths: Logs, or `40:file.log` for a log of 40 ranks that does not list them.

        Raises:
            ValueError: A log cannot be used; the message names the file and, for a damaged line, its number.
        """
        logs = [read_log(path) for path in paths]
        source = ", ".join(map(str, paths))
        if others := dict.fromkeys(other for log in logs for other in log.others):
            source += f" (without its rows of {', '.join(others)})"
        return cls.from_table([row for log in logs for row in log.rows], source=source)

    @classmethod
    def from_topology(
        cls,
        topology: Topology | str | os.PathLike[str],
        *,
        library: Library = "nccl",
        algorithm: AlgorithmSetting = "library",
        concurrency: int | None = None,
    ) -> Self:
        """Make a fabric from described links, or a YAML file of them, on which a collective library runs.

        The algorithm is that of all-reduces (`library`: the cheapest that the library has), and the concurrency the
        number of collectives that run at the same time (None: as many as the library runs).

        Raises:
            ValueError: The file cannot be used, or the algorithm cannot run on the links.
        """
        links = topology if isinstance(topology, Topology) else load_topology(topology)
        return cls._checked(
            topology=links, library=library, algorithm=algorithm, concurrency=concurrency, source=links.source
        )

    @classmethod
    def from_alpha_beta(
        cls, alpha_ns: int, bytes_per_s: float, *, concurrency: int | None = None, source: str = ""
    ) -> Self:
        """Make a fabric from the latency of a hop and the rate of a link; all-reduces use a ring at every world size.

        Raises:
            ValueError: The latency is negative, or the rate is not positive.
        """
        link = {"name": "link", "latency_ns": alpha_ns, "bytes_per_s": bytes_per_s}
        return cls._checked(topology={"levels": [link]}, algorithm="ring", concurrency=concurrency, source=source)

    @classmethod
    def merged(cls, *fabrics: Self) -> Self:
        """Combine fabrics, such as calibrations of several world sizes and links for the others.

        The result has the measured tables of all fabrics, the topology of the fabric that has one, and the other
        fields of the first, such as extrapolate. The library is that of the tables, and `processor`, `sharing` and
        `concurrency` are those of the first fabric that has them. `source` lists all sources.

        Raises:
            ValueError: Two fabrics measured the same world size, two have a topology, or they contradict each other
                in scale, slow_link, library or concurrency; the message names them by position and source.
        """
        _check_mergeable(fabrics)
        update = {
            name: getattr(fabric, name)
            for name in ("processor", "sharing", "concurrency", "topology")
            for fabric in reversed(fabrics)  # the last one counts
            if name in fabric.model_fields_set and getattr(fabric, name)
        } | {
            "library": next((fabric.library for fabric in fabrics if fabric.all_reduce), fabrics[0].library),
            "all_reduce": tuple(row for fabric in fabrics for row in fabric.all_reduce),
            "broadcast": tuple(row for fabric in fabrics for row in fabric.broadcast),
            "source": "; ".join(dict.fromkeys(fabric.source for fabric in fabrics if fabric.source)),
        }
        return fabrics[0].model_copy(update=update)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a topology (`.yaml`, `.yml`), results of nccl-tests (`.log`, `.txt`, `.csv`, JSON) or a fabric file.

        A log may be given as `40:file.log`, see `from_nccl_tests`.

        Raises:
            ValueError: The file is missing, malformed or inconsistent; the message names file, field and reason.
        """
        ending = Path(path).suffix.lower()
        if ending in (".yaml", ".yml"):
            return cls.from_topology(path)
        if ending in (".log", ".txt", ".csv") or (ending == ".json" and OF_NCCL_TESTS.search(read_text(path))):
            return cls.from_nccl_tests(path)
        return read_schema(
            cls, path, what="a fabric file", cure="run `ddplab calibrate`", mistaken=(VERSION_FIELD, NOT_A_TRACE)
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a fabric file, as JSON."""
        # Left out, a default concurrency still follows the library after loading, and processor costs are unknown.
        follows = {"concurrency", "processor"} - self.model_fields_set
        write_atomically(path, (self.model_dump_json(indent=1, exclude=follows) + "\n").encode())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy as pydantic does, but derive cached costs and a default concurrency from the updated fields."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        if "concurrency" not in copied.model_fields_set:
            copied.__dict__["concurrency"] = CONCURRENCY[copied.library]
        return copied

    @property
    def world_sizes(self) -> list[int]:
        """World sizes for which all-reduces were measured, in ascending order."""
        return list(self._curves.all_reduces)

    def all_reduce_ns(self, size_bytes: int, world_size: int) -> int:
        """Return the nanoseconds of an all-reduce on `world_size` ranks while no other collective runs.

        Raises:
            ValueError: The world size was not measured, and can neither be extrapolated nor computed from links.
        """
        return int(self.all_reduce_costs_ns(np.array([size_bytes]), world_size)[0])

    def all_reduce_costs_ns(self, sizes_bytes: Sizes, world_size: int) -> NDArray[np.int64]:
        """Return the nanoseconds of all-reduces of several sizes; shape [sizes]."""
        return self._costs_ns(self._curves.all_reduce(world_size), sizes_bytes)

    def broadcast_ns(self, size_bytes: int, world_size: int) -> int:
        """Return the nanoseconds of a broadcast: measured, computed from links, or else those of an all-reduce.

        Raises:
            ValueError: As `all_reduce_ns`.
        """
        return int(self._costs_ns(self._curves.broadcast(world_size), np.array([size_bytes]))[0])

    def all_gather_costs_ns(self, sizes_bytes: Sizes, world_size: int) -> NDArray[np.int64]:
        """Return the nanoseconds of all-gathers to which each rank contributes `sizes_bytes`; shape [sizes].

        A ring all-gather has n - 1 steps that each send one rank's contribution, which is half of a ring all-reduce
        of all contributions.
        """
        return self._costs_ns(self._curves.all_gather(world_size), world_size * sizes_bytes.astype(np.float64)) // 2

    def segments(self, world_size: int) -> tuple[Segment, ...]:
        """Return the cost of all-reduces by message size as straight lines, each with a latency and a time per byte.

        A measured or extrapolated table is fitted at its own sizes, with about one line for each protocol of the
        library. Described links are fitted at powers of two from 1 byte to 1 GiB; a ring is exactly one line.

        Returns:
            Segments in ascending order of `from_bytes`; each is valid up to the next.

        Raises:
            ValueError: As `all_reduce_ns`.
        """
        curve = self._curves.all_reduce(world_size)
        sizes = curve.sizes_bytes if isinstance(curve, Table) else LINK_SIZES
        return segments(Table(sizes, self._adjusted_ns(curve, sizes)))

    def origin(self, world_size: int) -> str:
        """Return the source of the costs: "measured", "extrapolated", "described", or "none" for one rank."""
        return self._curves.origin(world_size)

    def assumed(self, sizes_bytes: Sizes, world_size: int) -> tuple[str, ...]:
        """Return sentences on what is not measured of all-reduces of these sizes, and on repeats that disagree."""
        curve = self._curves.all_reduce(world_size)
        if isinstance(curve, AlgorithmCosts):
            unknown = (
                (self._curves.has_usual_latency, USUAL_LATENCY),
                (self._curves.doublings_beyond_a_connection, SOCKETS),
            )
            return tuple(sentence for is_unknown, sentence in unknown if is_unknown(world_size))
        if not isinstance(curve, Table) or world_size == 1:
            return ()
        sentences, is_measured = list[str](), self.origin(world_size) == "measured"
        if self._curves.crosses(world_size):
            sentences.append(
                f"the links beyond {max(self.world_sizes)} ranks were not measured: all-reduces on {world_size} "
                "ranks are as uncertain as those of the described links alone"
            )
        if is_measured and curve.spread > DISAGREEING:
            sentences.append(
                f"repeated all-reduces on {world_size} ranks differ by up to {1 + curve.spread:.3g} times from their "
                "median, which counts: measure again on a machine that does nothing else"
            )
        first, last = curve.sizes_bytes[[0, -1]].tolist()
        if is_measured and last >= LARGE_MESSAGE and curve.beyond is not None:
            times = float(curve.ns[-1] / curve.beyond.costs_ns(curve.sizes_bytes[-1:])[0])
            if times > OUT_OF_ORDER:
                sentences.append(
                    f"all-reduces of {in_words(last)} on {world_size} ranks take {times:.2g} times as long as the "
                    f"described links let expect, as if these were out of order: {CHECK_LINKS}"
                )
        beyond = {"smaller": (sizes_bytes < first).any(), "larger": (sizes_bytes > last).any()}
        if which := " and ".join(name for name, some in beyond.items() if some):
            known = f"{'measured' if is_measured else 'extrapolated'} from {in_words(first)} to {in_words(last)}"
            how = "take the time by the described links, times the factor that joins it to the table"
            if curve.beyond is None:
                how = (
                    "follow the first or last line of the table, with a wide error; describe the links in a YAML file"
                )
            sentences.append(f"all-reduces on {world_size} ranks were {known}; {which} messages {how}")
        return tuple(sentences)

    def link_share(self, size_bytes: int, world_size: int) -> LinkShare:
        """Return how a collective shares the link with others that run at the same time.

        Without measurements (`sharing`), all take equally much of its bandwidth, and the latency is unchanged.
        """
        if self.sharing:
            return measured_share(self.sharing, size_bytes)
        curve = self._curves.all_reduce(world_size)
        if isinstance(curve, AlgorithmCosts):
            cost = curve.cheapest(size_bytes)[1]  # the library chooses without regard to other collectives
            alone, shared = self._costs_ns(cost, size_bytes * np.array([1.0, 2.0]))
        else:
            latency, alone = self._costs_ns(curve, np.array([0, size_bytes]))
            shared = alone + max(0, alone - latency)
        return LinkShare(float(shared / alone) if alone else 1.0)

    def relative_errors(self, sizes_bytes: Sizes, world_size: int) -> NDArray[np.float64]:
        """Return the relative errors of collectives, `faster` and `slower`, by size; shape [2, sizes].

        Nine in ten costs lie between the cost divided by 1 + faster and the cost times 1 + slower.
        """
        return self._curves.relative_errors(sizes_bytes, world_size)

    def errors_beyond_tables(self, sizes_bytes: Sizes, world_size: int) -> NDArray[np.float64]:
        """Return the part of each of `relative_errors` that comes from sizes beyond those of a measured table."""
        curve = self._curves.all_reduce(world_size)
        return errors_beyond(curve, sizes_bytes) if isinstance(curve, Table) else np.zeros(sizes_bytes.shape)

    def iteration_spread(self, world_size: int) -> float:
        """Return the half-width of the 90 % interval of iterations, a fraction; 0 if no training run was measured."""
        return self.processor.iteration_spread if self.origin(world_size) == "measured" else 0.0

    def with_links(self, *, rates: float = 1.0, latencies: float = 1.0) -> Self:
        """Return a copy whose links send `rates` times as many bytes a second, with `latencies` times the latency.

        In a measured table, the latency is that of the fitted segment of small messages; the rest is for the bytes.
        """
        tables = {}
        for name in ("all_reduce", "broadcast"):
            timings: tuple[Timing, ...] = getattr(self, name)
            latency_ns = {n: segments(table)[0].alpha_ns for n, table in tables_by_world_size(timings).items()}
            changed = []
            for row in timings:
                fixed_ns = min(row.ns, latency_ns[row.world_size])
                sent_ns = row.ns - fixed_ns
                added_ns = fixed_ns * latencies - fixed_ns + sent_ns / rates - sent_ns
                changed.append(row.model_copy(update={"ns": row.ns + round(added_ns)}))
            tables[name] = tuple(changed)
        topology = self.topology and self.topology.with_links(rates=rates, latencies=latencies)
        return self.model_copy(update={**tables, "topology": topology})

    def with_processor(self, **changed: object) -> Self:
        """Return a copy with these fields of `processor` changed."""
        return self.model_copy(update={"processor": self.processor.model_copy(update=changed)})

    def _costs_ns(self, curve: CostCurve, sizes_bytes: Sizes) -> NDArray[np.int64]:
        costs_ns = self._adjusted_ns(curve, sizes_bytes)
        if costs_ns.size and not costs_ns.max() <= YEAR_NS:
            raise ValueError(
                f"fabric: expected collectives of at most a year, got {costs_ns.max():.3g} ns for "
                f"{sizes_bytes[costs_ns.argmax()]:.0f} bytes; check the rates, latencies and `scale`"
            )
        return as_int64(costs_ns)

    def _adjusted_ns(self, curve: CostCurve, sizes_bytes: Sizes) -> NDArray[np.float64]:
        """Apply `scale` and `slow_link`: every collective uses the slowest link, which slows bytes, not latency."""
        costs = curve.costs_ns(sizes_bytes)
        if self.slow_link > 1:
            empty = curve.costs_ns(np.zeros(1, dtype=np.int64))
            costs = costs + (self.slow_link - 1) * np.maximum(costs - empty, 0)
        return self.scale * costs

    @cached_property
    def _curves(self) -> CostCurves:
        return CostCurves(self)

    @classmethod
    def _checked(cls, **fields: object) -> Self:
        """Make a fabric from the fields that are not None."""
        try:
            return cls(**{name: value for name, value in fields.items() if value is not None})
        except ValueError as error:
            raise ValueError(f"fabric: {error}") from None


def in_words(size_bytes: int) -> str:
    """Return a size with its unit, with four digits, however small or large it is."""
    power = min(max(0, size_bytes.bit_length() - 1) // 10, 3)
    return f"{size_bytes / 1024**power:.4g} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


# Checks for merging


def _check_mergeable(fabrics: Sequence[Fabric]) -> None:
    if not fabrics:
        raise ValueError("fabrics: expected at least one to merge, got none")
    alike: dict[str, tuple[object, str]] = {}
    measured: dict[int, str] = {}
    described = ""
    for position, fabric in enumerate(fabrics):
        if not isinstance(fabric, Fabric):
            raise ValueError(f"fabrics[{position}]: expected a Fabric, got {reprlib.repr(fabric)}")
        name = f"fabrics[{position}]" + (f" ({fabric.source})" if fabric.source else "")
        given: dict[str, object] = {"scale": fabric.scale, "slow_link": fabric.slow_link}
        if fabric.all_reduce or fabric.library != "nccl":  # links of no stated library take that of the tables
            given["library"] = fabric.library
        if fabric.all_reduce or "concurrency" in fabric.model_fields_set:  # otherwise it follows the library
            given["concurrency"] = fabric.concurrency
        for field, seen in given.items():
            expected, before = alike.setdefault(field, (seen, name))
            if seen != expected:
                raise ValueError(
                    f"{name}: {field}: expected {expected} as in {before}, got {seen}; leave one out, or correct it"
                )
        for world_size in sorted({row.world_size for row in (*fabric.all_reduce, *fabric.broadcast)}):
            if (before := measured.setdefault(world_size, name)) != name:
                raise ValueError(
                    f"{name}: expected world sizes that no other fabric measured, got {world_size}, which {before} "
                    "measured too; leave one of the two out"
                )
        if fabric.topology is not None:
            if described:
                raise ValueError(
                    f"{name}: topology: expected none, because {described} describes links already, got another; "
                    "leave one of the two out"
                )
            described = name
