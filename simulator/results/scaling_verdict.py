"""Verdict: what a prediction means for a buyer, in sentences.

How much of the GPUs' time becomes training, what takes the rest, how fast the network must be for a given efficiency,
and which other settings are as fast within the intervals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from ..fabric.algorithms import sent_share
from ..workload.compute_times import LEAST_RECORDED

TARGET = 0.9
"""The efficiency for which the network is asked."""
FASTEST_NETWORK, SLOWEST_NETWORK = 1e-3, 1e3
"""Range of the factors on the time of every collective that is searched."""
SHOWN_SHARE = 0.1
"""Least part of the interval's squared width that is worth a word."""
CALIBRATE = "run `ddplab calibrate` on the GPUs"
TOLERANCE = 0.005
"""Relative tolerance of a factor that is found."""


@dataclass(frozen=True)
class NetworkNeed:
    """How fast the network must be for the target efficiency."""

    target: float
    factor: float | None
    """Largest factor on the time of every collective with which the target is reached; above 1 the network may be
    slower. None: not even a network of infinite speed suffices."""
    bus_gb_per_s: float
    """Bus bandwidth of an all-reduce of the largest bucket, in 10**9 bytes per second, as predicted; defined as in
    nccl-tests: 2 (n - 1) / n times bytes over time."""
    largest_bucket_bytes: int

    @property
    def needed_gb_per_s(self) -> float | None:
        """The bus bandwidth that is needed."""
        return None if self.factor is None else self.bus_gb_per_s / self.factor

    def sentence(self) -> str:
        """Return the need as a sentence."""
        bucket = f"for the largest bucket ({self.largest_bucket_bytes / 2**20:.1f} MB)"
        if self.factor is None:
            return (
                f"no network suffices for {self.target:.0%}: copies, launches, slow-downs or slow ranks alone take "
                "more than the rest"
            )
        if self.factor >= SLOWEST_NETWORK:
            slower = f"{SLOWEST_NETWORK:.0f} times slower"
            return f"the network hardly matters: {self.target:.0%} would remain on one that is {slower}"
        needed = f"{self.needed_gb_per_s:.3g} GB/s of bus bandwidth {bucket} instead of {self.bus_gb_per_s:.3g}"
        if self.factor >= 1:
            return f"{self.target:.0%} would remain if collectives took {self.factor:.3g} times as long: {needed}"
        return f"{self.target:.0%} needs collectives {1 / self.factor:.3g} times as fast: {needed}"


def network_need(
    efficiency_at: Callable[[float], float],
    *,
    bucket_bytes: Sequence[int],
    all_reduce_ns: Callable[[int], int],
    world_size: int,
    target: float = TARGET,
) -> NetworkNeed:
    """Find how fast the network must be.

    Args:
        efficiency_at: Efficiency if every collective takes this many times as long; it falls as the factor grows.
        bucket_bytes: Bytes of each bucket.
        all_reduce_ns: Nanoseconds of an all-reduce of that many bytes, alone.
        world_size: Number of ranks.
        target: Efficiency to reach, from 0 to 1.
    """
    largest = max(bucket_bytes, default=0)
    time_ns = max(1, all_reduce_ns(largest))
    bus = sent_share(world_size) * largest / time_ns
    if efficiency_at(FASTEST_NETWORK) < target:
        return NetworkNeed(target, None, bus, largest)
    if efficiency_at(SLOWEST_NETWORK) >= target:
        return NetworkNeed(target, SLOWEST_NETWORK, bus, largest)
    reached, missed = log(FASTEST_NETWORK), log(SLOWEST_NETWORK)
    while missed - reached > TOLERANCE:
        middle = (reached + missed) / 2
        if efficiency_at(exp(middle)) >= target:
            reached = middle
        else:
            missed = middle
    return NetworkNeed(target, exp(reached), bus, largest)


NARROWER = {
    "collectives": "measure `all_reduce_perf -b 1M -e 64M` on as many GPUs and give its log as --fabric",
    "device speeds": "record on several GPUs",
    "slowest rank": f"record {LEAST_RECORDED} iterations or more, on several GPUs",
    "compute times": "measure a step on one GPU, or its parts, and give them to `ddplab synthesize`",
    "iterations": "record more iterations on a quiet machine",
    "copies": CALIBRATE,
    "launches": CALIBRATE,
    "slow-downs": CALIBRATE,
    "unexplained": "measure an iteration on a few GPUs",
}
"""How the interval becomes narrower, by what makes it wide."""


def width_sentence(shares: Mapping[str, float]) -> str:
    """Say what makes an interval wide, and what to do about it; "" if nothing does.

    Args:
        shares: See `Prediction.shares_of_width`.
    """
    causes = [f"{cause} ({share:.0%})" for cause, share in shares.items() if share >= SHOWN_SHARE]
    if not causes:
        return ""
    cure = NARROWER[next(iter(shares))]
    return f"the width of the interval comes from {', '.join(causes)}; to narrow it, {cure}"


def counted(buckets: Sequence[int], total: int, noun: str = "") -> str:
    """Return bucket indices as a count with their range, such as `3 of 35 buckets (2-4)` with that noun."""
    count = f"{len(buckets)} of {total} {noun}".rstrip()
    if not buckets:
        return count
    first, last = min(buckets), max(buckets)
    return f"{count} ({first if first == last else f'{first}-{last}'})"
