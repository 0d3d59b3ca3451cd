"""Sharing: collectives that run beside each other slow each other down."""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
from pydantic import Field

from reference.records import Record

from .tables import polygon


class Sharing(Record):
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
