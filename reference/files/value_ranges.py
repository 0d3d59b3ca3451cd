"""Quantities: the range of every time, size, count and factor that a file or an option may give, in one place.

No training run leaves these ranges. Beyond them, sums of 64-bit integers would wrap around silently.
"""

from typing import Annotated

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field

YEAR_NS = 366 * 24 * 3600 * 1_000_000_000
EXABYTE = 10**18
MILLION = 1_000_000
LARGEST = 2**62 - 1
"""Largest integer in results; the sum of two fits 64 bits."""

Moment = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]  # ns on a clock that starts within 146 years, as Unix time
Nanoseconds = Annotated[int, Field(ge=0, le=YEAR_NS)]  # a duration
FractionalNanoseconds = Annotated[float, Field(ge=0, le=YEAR_NS, allow_inf_nan=False)]  # not yet rounded
NanosecondsPerByte = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=EXABYTE)]
BytesPerS = Annotated[float, Field(ge=1, le=EXABYTE, allow_inf_nan=False)]
Rank = Annotated[int, Field(ge=0, lt=MILLION)]
WorldSize = Annotated[int, Field(ge=1, le=MILLION)]
Flops = Annotated[int, Field(ge=0, le=10**24)]  # of an iteration
FlopsPerS = Annotated[float, Field(ge=1, le=10**24, allow_inf_nan=False)]
Batch = Annotated[int, Field(ge=1, le=10**12)]  # samples; rows of tables and points are many
Count = Annotated[int, Field(ge=1, le=MILLION)]  # repetitions, members, batches and the like
Iterations = Annotated[int, Field(ge=1, le=10_000)]  # to simulate one by one, each of which takes milliseconds
CycleLength = Annotated[int, Field(ge=1, le=1000)]  # iterations, of which only the last averages gradients
InParallel = Annotated[int, Field(ge=1, le=100)]  # collectives, or process groups, in use at the same time
SlowdownFactor = Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False)]  # a duration over one never longer
Multiple = Annotated[float, Field(ge=1 / MILLION, le=MILLION, allow_inf_nan=False)]  # a quantity over another
RelativeError = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]  # half a band over the value in its middle


def as_int64(numbers: ArrayLike) -> NDArray[np.int64]:
    """Round to 64-bit integers; raises ValueError for NaN and beyond `LARGEST`, where numpy would wrap around."""
    rounded = np.rint(np.asarray(numbers, np.float64))
    if (wrong := rounded[~(np.abs(rounded) < 2.0**62)]).size:
        limits = "expected times of at most 146 years and sizes of at most 4 EiB"
        raise ValueError(f"{limits}, got {wrong.flat[0]:.3g} ns or bytes")
    return rounded.astype(np.int64)
