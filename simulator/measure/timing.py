"""Timing: how a duration is measured, and how repeated measurements are summarised."""

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from math import sqrt
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from scipy.optimize import nnls

from ..fabric import Linear

clock_ns = time.perf_counter_ns
"""Nanoseconds since some moment; differences are times."""

OUTLIER = 2.0
"""Times the median: what took longer was disturbed."""

BAND_OF_QUARTILES = 1.645 / (2 * 0.6745)
"""Half-width of a normal distribution's middle 90 %, as a multiple of the distance of its quartiles."""


def time_ns(action: Callable[..., object], *arguments: object) -> int:
    """Nanoseconds that one call takes."""
    start = clock_ns()
    action(*arguments)
    return clock_ns() - start


def median_ns(samples: Iterable[float]) -> int:
    """The median, in whole nanoseconds."""
    return round(statistics.median(samples))


def spread(samples: Sequence[float]) -> float:
    """Half-width of the band that holds 90 % of such samples, as a fraction of their median; 0 of a single one.

    It is taken from the quartiles, which one wild sample of seven does not move; of samples from a normal
    distribution its mean is right also where they are as few as three.

    Args:
        samples: Repeated measurements of one thing, all above 0.
    """
    return _band(samples) / statistics.median(samples)


def band_of_median(samples: Sequence[float]) -> float:
    """Half-width of the band that holds 90 % of medians of so many such samples, in their unit."""
    return _band(samples) / sqrt(len(samples))


def _band(samples: Sequence[float]) -> float:
    lower, upper = np.quantile(samples, [0.25, 0.75], method="normal_unbiased")
    return float(BAND_OF_QUARTILES * (upper - lower))


def outliers(samples: Sequence[float]) -> int:
    """How many took over `OUTLIER` times the median."""
    return sum(taken > OUTLIER * statistics.median(samples) for taken in samples)


def fit(samples: Mapping[int, Sequence[float]]) -> Linear:
    """Fixed and per-byte cost, neither negative, with the least relative error over the sizes' medians.

    Args:
        samples: Nanoseconds by size in bytes. Empty: nothing was to be done, which costs nothing.
    """
    if not samples:
        return Linear()
    sizes = np.array(list(samples), dtype=float)
    times = np.maximum(1.0, [statistics.median(taken) for taken in samples.values()])
    rows = np.column_stack([1 / times, sizes / times])
    (fixed, per_byte), _residual = nnls(rows, np.ones(len(times)))
    return Linear(fixed_ns=float(fixed), ns_per_byte=float(per_byte))


class AloneAndTogether(NamedTuple):
    """Times of one kind of work on one rank, in nanoseconds.

    Attributes:
        alone: By round, nothing else ran.
        together: By round, while other work ran; in between those alone, or right beside them.
    """

    alone: list[list[int]]
    together: list[list[int]]


def slowdown(ranks: Sequence[AloneAndTogether]) -> tuple[float, float]:
    """How many times as long the work takes in company, at least 1, and half of that factor's 90 % band.

    Each round gives a factor, as the machine's speed hardly changes within one. The median counts, and the band is
    that of rounds over the square root of their number. Ranks are averaged: each runs at the pace of the others.
    """
    factors = [[fmean(together) / fmean(alone) for alone, together in zip(*rank, strict=True)] for rank in ranks]
    by_round = [fmean(of_ranks) for of_ranks in zip(*factors, strict=True)]
    middle = statistics.median(by_round)
    return max(1.0, middle), band_of_median(by_round) / middle


def lost_ns(ranks: Sequence[AloneAndTogether]) -> list[float]:
    """By round, how much longer the work takes in company; ranks are averaged."""
    lost = [[fmean(together) - fmean(alone) for alone, together in zip(*rank, strict=True)] for rank in ranks]
    return [fmean(of_ranks) for of_ranks in zip(*lost, strict=True)]


@dataclass
class ObservedCollective:
    """One collective.

    Attributes:
        issued_ns: When it was asked for.
        done_ns: When this rank had its result. None: not yet.
    """

    issued_ns: int
    done_ns: int | None = None
    _told: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def finish(self) -> None:
        """It is done now."""
        self.done_ns = clock_ns()
        self._told.set()

    def wait(self) -> int:
        """Block until it is done, and return when that was."""
        if self.done_ns is None:
            self._told.wait()
        assert self.done_ns is not None
        return self.done_ns


@contextmanager
def observe_collectives(*names: str) -> Iterator[list[ObservedCollective]]:
    """Note every call of these functions of `torch.distributed` within the block, in the order of the calls.

    For code that looks them up when it calls them (`dist.all_reduce`). What follows in a `then` of a collective's
    future may run just before the witness notes its end, on another thread: so call
    `ObservedCollective.wait` before reading that.
    """
    originals = {name: getattr(dist, name) for name in names}
    sightings: list[ObservedCollective] = []
    try:
        for name, original in originals.items():
            setattr(dist, name, _noting(original, sightings))
        yield sightings
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _noting(collective: Callable[..., Any], sightings: list[ObservedCollective]) -> Callable[..., Any]:
    @wraps(collective)
    def noting(*args: Any, **kwargs: Any) -> Any:
        sighting = ObservedCollective(clock_ns())
        sightings.append(sighting)
        work = collective(*args, **kwargs)
        if work is None:  # it was not asynchronous
            sighting.finish()
        else:
            work.get_future().add_done_callback(lambda _: sighting.finish())
        return work

    return noting
