"""Timing: measures durations and collectives, and summarises repeated measurements."""

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from math import sqrt
from operator import sub, truediv
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from simulator.fabric import Linear
from simulator.fabric.uncertainty import NORMAL_HALF_BAND

clock_ns = time.perf_counter_ns
"""Nanoseconds since an arbitrary moment that is the same for all processes of a machine."""


def time_ns(action: Callable[..., object], *arguments: object) -> int:
    """Return the nanoseconds that one call of `action(*arguments)` takes."""
    start = clock_ns()
    action(*arguments)
    return clock_ns() - start


def meet() -> None:
    """Let all ranks meet, by a small all-reduce: after Gloo's barrier, ranks can go on up to 10 ms apart."""
    dist.all_reduce(torch.ones(1))


def of_slowest_rank(times_ns: Sequence[int], group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """Return the largest value of each entry over all ranks of a group (None: all); equal on all of them."""
    slowest = torch.tensor(times_ns)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return tuple(int(ns) for ns in slowest)


@dataclass
class TimedCollective:
    """When one collective was called on this rank, and when this rank had the result; None: not yet."""

    issued_ns: int
    done_ns: int | None = None
    _finished: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def finish(self) -> None:
        """Set the end to the current time."""
        self.done_ns = clock_ns()
        self._finished.set()

    def wait(self) -> int:
        """Block until `finish` has been called; return the end."""
        if self.done_ns is None:
            self._finished.wait()
        assert self.done_ns is not None
        return self.done_ns


@contextmanager
def timed_collectives(*names: str) -> Iterator[list[TimedCollective]]:
    """Time all calls of these functions of `torch.distributed` within the block; yield a list of them in call order.

    Only calls that look up the function in the module are timed (`dist.all_reduce`). The end of a collective is set
    in a callback of its future. Other callbacks of that future may run earlier, on another thread, so call
    `TimedCollective.wait` before reading an end.
    """
    calls: list[TimedCollective] = []
    timed: dict[str, Any] = {name: _timed(getattr(dist, name), calls) for name in names}
    with mock.patch.multiple(dist, **timed):
        yield calls


def _timed(collective: Callable[..., Any], calls: list[TimedCollective]) -> Callable[..., Any]:
    @wraps(collective)
    def timed(*args: Any, **kwargs: Any) -> Any:
        call = TimedCollective(clock_ns())
        calls.append(call)
        work = collective(*args, **kwargs)
        if work is None:  # the call was synchronous
            call.finish()
        else:
            work.get_future().add_done_callback(lambda _: call.finish())
        return work

    return timed


# Summaries of repeated measurements

OUTLIER = 2.0
"""A measurement above this multiple of the median counts as an outlier."""
BAND_OF_QUARTILES = NORMAL_HALF_BAND / (2 * 0.6745)
"""Half-width of the middle 90 % of a normal distribution, as a multiple of its interquartile range."""


def median_ns(samples: Iterable[float]) -> int:
    """Return the median, in whole nanoseconds."""
    return round(statistics.median(samples))


def count_outliers(samples: Sequence[float]) -> int:
    """Return the number of samples above `OUTLIER` times the median."""
    return sum(sample > OUTLIER * statistics.median(samples) for sample in samples)


def relative_spread(samples: Sequence[float]) -> float:
    """Return the half-width of the band that contains 90 % of such samples, as a fraction of their median.

    A single extreme sample of seven does not affect the quartiles, from which it is computed. For normally
    distributed samples, all above 0, the result is unbiased from three samples on; for one sample it is 0.
    """
    return _half_band(samples) / statistics.median(samples)


def half_band_of_median(samples: Sequence[float]) -> float:
    """Return the half-width of the band that contains 90 % of the medians of as many samples, in their unit."""
    return _half_band(samples) / sqrt(len(samples))


def _half_band(samples: Sequence[float]) -> float:
    lower, upper = np.quantile(samples, [0.25, 0.75], method="normal_unbiased")
    return float(BAND_OF_QUARTILES * (upper - lower))


def fit_linear(samples: Mapping[int, Sequence[float]]) -> Linear:
    """Fit a nonnegative fixed cost and cost per byte to the medians by size, with the least relative squared error.

    Without samples, the operation never occurred and costs nothing.
    """
    if not samples:
        return Linear()
    sizes = np.array(list(samples), dtype=float)
    times = np.maximum(1.0, [statistics.median(of_size) for of_size in samples.values()])
    rows = np.column_stack([1 / times, sizes / times])
    (fixed, per_byte), _residual = nnls(rows, np.ones(len(times)))
    return Linear(fixed_ns=float(fixed), ns_per_byte=float(per_byte))


class ContentionTimes(NamedTuple):
    """Nanoseconds of one activity on one rank, alone and while another activity ran; one list per round."""

    alone: list[list[int]]
    contended: list[list[int]]


def slowdown_factor(by_rank: Sequence[ContentionTimes]) -> tuple[float, float]:
    """Return the time under contention as a multiple of the time alone, at least 1, and its 90 % error band.

    The band is half its width, as a fraction of the factor. Each round gives one factor, because the machine's speed
    hardly changes within a round; the result is their median.
    """
    factors = _by_round(by_rank, truediv)
    middle = statistics.median(factors)
    return max(1.0, middle), half_band_of_median(factors) / middle


def added_ns_by_round(by_rank: Sequence[ContentionTimes]) -> list[float]:
    """Return the nanoseconds that contention adds, one value per round."""
    return _by_round(by_rank, sub)


def _by_round(by_rank: Sequence[ContentionTimes], compare: Callable[[float, float], float]) -> list[float]:
    """Compare contended times with times alone; ranks are averaged, because each waits for the others."""
    compared = [[compare(fmean(two), fmean(one)) for one, two in zip(*rank, strict=True)] for rank in by_rank]
    return [fmean(of_ranks) for of_ranks in zip(*compared, strict=True)]
