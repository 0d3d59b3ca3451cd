"""Two ways to run an iteration, timed in pairs: interleaved, the order swapped each time."""

import statistics
import time
from collections.abc import Callable

import torch.distributed as dist

WARM_UP = 3  # the rebuild, and the first touch of every buffer

Pairs = list[tuple[float, float]]
"""Seconds of the first way and of the second, pair by pair."""


def time_pairs(first: Callable[[], None], second: Callable[[], None], pairs: int) -> Pairs:
    """Run both in turn on every rank at once; a machine that slows down slows both."""
    times = []
    for number in range(WARM_UP + pairs):
        swap = number % 2
        ways = (second, first) if swap else (first, second)
        measured = [time_once(way) for way in ways]
        times.append((measured[swap], measured[1 - swap]))
    return times[WARM_UP:]


def header(first: str, second: str) -> str:
    """Column titles for `row`."""
    ratio = f"{first}/{second}"
    return f"{'model':22} {first + ' ms':>12} {second + ' ms':>12} {ratio:>12} {'quartiles':>13} {'pairs':>6}"


def row(name: str, pairs: Pairs) -> str:
    """Medians of both ways, median and quartiles of the ratio."""
    a, b = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([first / second for first, second in pairs], n=4)
    return f"{name:22} {a:12.1f} {b:12.1f} {middle:12.3f} {low:6.3f}-{high:.3f} {len(pairs):6}"


def time_once(way: Callable[[], None]) -> float:
    """Seconds, from a moment at which all ranks are there."""
    dist.barrier()
    start = time.perf_counter()
    way()
    return time.perf_counter() - start
