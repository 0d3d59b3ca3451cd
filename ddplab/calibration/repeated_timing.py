"""Timing: measures durations and collectives, and summarises repeated measurements.

Durations on a GPU are those between two CUDA events on the current stream; see
`ddplab.reference.recording.device_clock`.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from math import comb, sqrt
from statistics import fmean
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from ..reference.launch import rank_device, spans_nodes
from ..reference.recording.device_clock import Clock, Reading, clock_of, nanoseconds
from ..simulator.fabric import Linear
from ..simulator.fabric.cost_curves import BAND, NORMAL_HALF_BAND

_ahead_of_rank_0_ns = 0  # by how much this machine's clock is ahead of rank 0's; see `share_clock`


def clock_ns() -> int:
    """Return nanoseconds since an arbitrary moment that is the same for all ranks; see `share_clock`."""
    return time.perf_counter_ns() - _ahead_of_rank_0_ns


EXCHANGES = 20
"""Exchanges of messages from which the distance of two clocks is found."""


def share_clock(rank: int, world_size: int) -> None:
    """Let `clock_ns` be rank 0's clock on all ranks; does nothing if all of them are on one machine.

    Machines have clocks that differ and drift apart, by microseconds in a second, so call it again before each
    measurement. Of several exchanges with rank 0, the fastest counts: the other machine has read its clock in the
    middle of it, to half of its time (Cristian 1989).
    """
    if not spans_nodes():
        return
    group, reading = _messages(dist.group.WORLD), torch.zeros(1, dtype=torch.int64)
    for other in range(1, world_size):
        if rank not in (0, other):
            continue
        exchanges = []
        for _ in range(EXCHANGES):
            if rank == 0:
                dist.recv(reading, other, group)
                reading[0] = time.perf_counter_ns()
                dist.send(reading, other, group)
            else:
                start = time.perf_counter_ns()
                dist.send(reading, 0, group)
                dist.recv(reading, 0, group)
                end = time.perf_counter_ns()
                exchanges.append((end - start, (start + end) // 2 - int(reading)))
        if rank:
            global _ahead_of_rank_0_ns
            _, _ahead_of_rank_0_ns = min(exchanges)


@cache
def _messages(_world: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return a group of the world's ranks whose messages stay on the host, which lasts as long as the world."""
    return None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")


def let_host_lead(milliseconds: float = 3.0) -> None:
    """Keep a GPU busy, so that what the host launches next waits for the GPU, as in steady training.

    An idle GPU would wait for the host between two kernels, and the times of launches would be measured with theirs.
    """
    if rank_device().type == "cuda":
        torch.cuda._sleep(round(milliseconds * GPU_CYCLES_PER_MS))


GPU_CYCLES_PER_MS = 2_000_000
"""At least as many as GPUs have: up to 2 GHz."""


def time_ns(action: Callable[..., object], *arguments: object) -> int:
    """Return the nanoseconds that one call of `action(*arguments)` takes on the device of this rank.

    Of a GPU these are the nanoseconds of its kernels, not those of their launches by the host; see `let_host_lead`.
    """
    let_host_lead()
    start = read_clock()
    action(*arguments)
    start_ns, end_ns = in_ns(start, read_clock())
    return end_ns - start_ns


def read_clock() -> Reading:
    """Read the clock of this rank's device: `clock_ns`, or an event of the GPU, which costs no wait."""
    return _clock(rank_device()).now()


def in_ns(*readings: Reading) -> tuple[int, ...]:
    """Return the times of readings, as of `clock_ns`; waits until the GPU has reached them."""
    _clock(rank_device()).settle(wait=True)
    return tuple(ns for ns in map(nanoseconds, readings) if ns is not None)


@cache
def _clock(device: torch.device) -> Clock:
    return clock_of(device, lambda: clock_ns())


def meet() -> None:
    """Let all ranks meet, by a small all-reduce: after Gloo's barrier, ranks can go on up to 10 ms apart.

    GPUs meet in their current streams, and their hosts need not.
    """
    dist.all_reduce(torch.ones(1, device=rank_device()))


def of_slowest_rank(times_ns: Sequence[int], group: dist.ProcessGroup | None = None) -> tuple[int, ...]:
    """Return the largest value of each entry over all ranks of a group (None: all); equal on all of them."""
    slowest = torch.tensor(times_ns, device="cpu" if dist.get_backend(group) == "gloo" else rank_device())
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return tuple(map(int, slowest.tolist()))


@dataclass
class TimedCollective:
    """When one collective was called on this rank, and when this rank had the result."""

    issued: Reading
    done: Future[Reading] = field(default_factory=Future)

    @property
    def issued_ns(self) -> int:
        """When it was called; waits until the GPU has reached this moment."""
        return in_ns(self.issued)[0]

    def finish(self) -> None:
        """Set the end to the current time; with NCCL, callbacks are called early, on a stream that waits."""
        self.done.set_result(read_clock())

    def wait(self) -> int:
        """Block until `finish` has been called; return the end."""
        return in_ns(self.done.result())[0]


@contextmanager
def timed_collectives(*names: str) -> Iterator[list[TimedCollective]]:
    """Time all calls of these functions of `torch.distributed` within the block; yield a list of them in call order.

    Only calls that look up the function in the module are timed (`dist.all_reduce`). The end of a collective is set
    in a callback of its future. Other callbacks of that future may run earlier, on another thread, so call
    `TimedCollective.wait` before reading an end.
    """
    calls: list[TimedCollective] = []

    def timed(collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = TimedCollective(read_clock())
        calls.append(call)
        work = collective(*args, **kwargs)
        if work is None:  # the call was synchronous
            call.finish()
        else:
            work.get_future().add_done_callback(lambda _: call.finish())
        return work

    replaced: dict[str, Any] = {name: partial(timed, getattr(dist, name)) for name in names}
    with mock.patch.multiple(dist, **replaced):
        yield calls


# Summaries of repeated measurements

BAND_OF_QUARTILES = NORMAL_HALF_BAND / (2 * 0.6745)
"""Half-width of the middle 90 % of a normal distribution, as a multiple of its interquartile range."""
MOST_SPREAD = 100
"""Limit of `RelativeError`, the type of a spread in files."""


def median_ns(samples: Iterable[float]) -> int:
    """Return the median, in whole nanoseconds."""
    return round(statistics.median(samples))


def relative_spread(samples: Sequence[float]) -> float:
    """Return the half-width of the band that contains 90 % of such samples, as a fraction of their median.

    A single extreme sample of seven does not affect the quartiles, from which it is computed. For normally
    distributed samples, all above 0, the result is unbiased from three samples on; for one sample it is 0.

    Raises:
        ValueError: The samples differ more than a fabric may say, as on a machine that does something else.
    """
    spread = _half_band(samples) / statistics.median(samples)
    if spread > MOST_SPREAD:
        raise ValueError(
            f"repeated times: expected a spread of at most {MOST_SPREAD} times the median, got {spread:.0f} times; "
            "the machine is too busy to measure anything; try again when nothing else runs"
        )
    return spread


def interval_of_median(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the narrowest pair of samples that encloses the median of their distribution with at least 90 %.

    Holds for independent samples of any continuous distribution: the number of them below its median is binomial
    (David and Nagaraja, "Order Statistics", 2003, section 7.1). None for fewer than 5 samples, which reach 87.5 %.
    """
    ordered, count, left_out = sorted(samples), len(samples), 0
    while sum(comb(count, below) for below in range(left_out + 1, count - left_out)) >= BAND * 2**count:
        left_out += 1
    return (float(ordered[left_out - 1]), float(ordered[-left_out])) if left_out else None


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
    rows, ones = np.column_stack([1 / times, sizes / times]), np.ones(len(times))
    fits = [part * (rows @ part).sum() / ((rows @ part) ** 2).sum() for part in np.eye(2)]  # one cost alone
    fits = [np.linalg.lstsq(rows, ones)[0], *fits] if len(times) > 1 else fits[1:]
    fixed, per_byte = min((fit for fit in fits if min(fit) >= 0), key=lambda fit: ((rows @ fit - 1) ** 2).sum())
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
    # Ranks are averaged, because each waits for the others.
    ratios = [[fmean(two) / fmean(one) for one, two in zip(*rank, strict=True)] for rank in by_rank]
    factors = [fmean(of_ranks) for of_ranks in zip(*ratios, strict=True)]
    middle = statistics.median(factors)
    return max(1.0, middle), _half_band(factors) / sqrt(len(factors)) / middle
