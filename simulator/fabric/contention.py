"""Contention: collectives and computation that run at the same time slow each other down."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import Field

from reference.schema import Schema

from .tables import polygon

Factor = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]
Error = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class Contention(Schema):
    """How many times as long both take while ranks compute and `running` collectives are in flight.

    A collective's factor is on its time beside as many others while nobody computes.
    """

    size_bytes: int = Field(default=0, ge=0, description="message of one rank, bytes; chosen in the calibration")
    running: int = Field(default=1, ge=1, description="collectives in flight, a count; chosen in the calibration")
    compute: Factor = Field(
        default=1.0, description="of computation, a factor on its time alone; from `ddplab calibrate`"
    )
    collective: Factor = Field(
        default=1.0, description="of a collective, a factor on its time alone; from `ddplab calibrate`"
    )
    compute_error: Error = Field(
        default=0.0,
        description="half-width of the band that holds 90 % of repeated measurements of `compute`, a fraction of it; "
        "from `ddplab calibrate`, 0 where they were not kept",
    )
    collective_error: Error = Field(
        default=0.0,
        description="half-width of the band that holds 90 % of repeated measurements of `collective`, a fraction of "
        "it; from `ddplab calibrate`, 0 where they were not kept",
    )

    def moved(self, widths: float) -> Self:
        """With factors that are `widths` half-widths of their bands above the measured ones, never below 1."""
        compute = max(1.0, self.compute * (1 + widths * self.compute_error))
        collective = max(1.0, self.collective * (1 + widths * self.collective_error))
        return self.model_copy(update={"compute": compute, "collective": collective})


class Slowdowns(NamedTuple):
    """Factors by collective and by how many are in flight, from one on."""

    compute: tuple[tuple[float, ...], ...]
    collective: tuple[tuple[float, ...], ...]


def slowdowns_of(rows: Sequence[Contention], sizes_bytes: Sequence[int], most: int) -> Slowdowns | None:
    """What messages of these sizes and computation do to each other with up to `most` in flight; None: nothing.

    Between measured sizes on a line, beyond them as at the nearest. Where a number in flight was not measured, as
    with the next smaller one that was, or with the smallest.
    """
    if all(row.compute == row.collective == 1 for row in rows):
        return None
    measured = sorted({row.running for row in rows})
    compute, collective = np.empty((2, len(sizes_bytes), most))
    for running in range(1, most + 1):
        known = max((number for number in measured if number <= running), default=measured[0])
        alike = sorted((row for row in rows if row.running == known), key=attrgetter("size_bytes"))
        at = np.array([row.size_bytes for row in alike])
        sizes = np.clip(np.array(sizes_bytes), at[0], at[-1])
        compute[:, running - 1] = polygon(at, np.array([row.compute for row in alike]), sizes)
        collective[:, running - 1] = polygon(at, np.array([row.collective for row in alike]), sizes)
    return Slowdowns(tuple(map(tuple, compute.tolist())), tuple(map(tuple, collective.tolist())))


class Sharing(Schema):
    """How much longer a collective of `size_bytes` takes when another of its size runs beside it."""

    size_bytes: int = Field(ge=0, description="message of one rank, bytes; chosen in the calibration")
    factor: float = Field(
        ge=0.5,
        le=4.0,
        allow_inf_nan=False,
        description="time with two at a time as a multiple of the time alone; measured by the calibration",
    )


def measured_factor(rows: Sequence[Sharing], size_bytes: int, running: int) -> float:
    """The factor with `running` at a time; between measured sizes on a line, beyond them as at the nearest."""
    ordered = sorted(rows, key=attrgetter("size_bytes"))
    sizes = np.array([row.size_bytes for row in ordered])
    factors = np.array([row.factor for row in ordered])
    two = float(polygon(sizes, factors, np.clip(np.array([size_bytes]), sizes[0], sizes[-1]))[0])
    return max(1.0, 1.0 + (two - 1.0) * (running - 1))
