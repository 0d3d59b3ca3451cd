"""Paired timing of two actions, which alternate; every other pair runs in reverse order."""

import statistics
import time
from collections.abc import Callable

import torch.distributed as dist

WARM_UP = 3  # the rebuild, and the first touch of every buffer

Pairs = list[tuple[float, float]]
"""Seconds of the first and of the second action, pair by pair."""


def time_pairs(first: Callable[[], None], second: Callable[[], None], pairs: int) -> Pairs:
    """Time both actions alternately on all ranks, so that a slow phase of the machine affects both."""
    times = []
    for number in range(WARM_UP + pairs):
        swap = number % 2
        actions = (second, first) if swap else (first, second)
        measured = [time_once(action) for action in actions]
        times.append((measured[swap], measured[1 - swap]))
    return times[WARM_UP:]


def header(first: str, second: str) -> str:
    """Column titles for `row`."""
    ratio = f"{first}/{second}"
    return f"{'model':22} {first + ' ms':>12} {second + ' ms':>12} {ratio:>12} {'quartiles':>13} {'pairs':>6}"


def row(name: str, pairs: Pairs) -> str:
    """One line: medians of both actions, median and quartiles of their ratio."""
    a, b = (statistics.median(side) * 1e3 for side in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([first / second for first, second in pairs], n=4)
    return f"{name:22} {a:12.1f} {b:12.1f} {middle:12.3f} {low:6.3f}-{high:.3f} {len(pairs):6}"


def time_once(action: Callable[[], None]) -> float:
    """Seconds that an action takes on this rank, after a barrier."""
    dist.barrier()
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
