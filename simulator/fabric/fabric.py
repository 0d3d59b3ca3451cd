"""Fabric: everything that the cost of a collective depends on, and what it costs the processor to run one.

A cost comes from a measured table where there is one for the world size, else from a table grown out of the others
where that is asked for, else from described links.
"""

from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .curves import Charged, Curve, Curves
from .description import Description
from .libraries import Offer
from .merging import merge
from .processor import Linear
from .segments import Segment, segments
from .sharing import measured_factor
from .tables import Table, tables_by_world_size

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
