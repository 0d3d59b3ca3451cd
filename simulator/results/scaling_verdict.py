"""Verdict: what a prediction means for a buyer, in sentences.

How much of the GPUs' time becomes training, what takes the rest, how fast the network must be for a given efficiency,
and which other settings are as fast within the intervals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import TYPE_CHECKING

from ..fabric.algorithms import sent_share
from ..workload.compute_times import LEAST_RECORDED

if TYPE_CHECKING:
    from ..predicted_iteration import Prediction

TARGET = 0.9
"""The efficiency for which the network is asked."""
SLOWEST_LINKS, FASTEST_LINKS = 1e-3, 1e3
"""Range of the multiples of the links' rates that is searched."""
SHOWN_SHARE = 0.1
"""Least part of the interval's squared width that is worth a word."""
CALIBRATE = "run `ddplab calibrate` on the GPUs"
TOLERANCE = 0.005
"""Relative tolerance of a multiple that is found."""
FIRST_STEP = 2.0
"""Factor of the search's first step away from today's rates; each further step is the square of the one before."""


@dataclass(frozen=True)
class NetworkNeed:
    """How fast the links must be for the target efficiency.

    Attributes:
        target: The efficiency, from 0 to 1.
        multiple: Least multiple of the links' rates with which a configuration reaches the target; latencies stay.
            None: not even links of infinite rate suffice.
        configuration: Index of that configuration, or of the first one if none reaches the target.
        message_bytes: The largest message of a bucket under that configuration, after its comm hook.
        bus_gb_per_s: Bus bandwidth of this message today, in 10**9 bytes per second; defined as in nccl-tests: bytes
            that a rank sends over time.
        needed_gb_per_s: The same with the rates that are needed, or None.
    """

    target: float
    multiple: float | None
    configuration: int
    message_bytes: int
    bus_gb_per_s: float
    needed_gb_per_s: float | None

    def sentence(self) -> str:
        """Return the need as a sentence."""
        if self.multiple is None:
            return (
                f"no rate of the links suffices for {self.target:.0%}: latencies, copies, launches, slow-downs or "
                "slow ranks alone take more than the rest"
            )
        if self.multiple <= SLOWEST_LINKS:
            return (
                f"the network hardly matters: {self.target:.0%} would remain on links {1 / SLOWEST_LINKS:.0f} times "
                "slower"
            )
        verb = "would remain with" if self.multiple <= 1 else "needs"
        return (
            f"{self.target:.0%} {verb} links {self.multiple:.3g} times as fast: {self.needed_gb_per_s:.3g} GB/s of "
            f"bus bandwidth for the largest message ({self.message_bytes / 2**20:.1f} MB) instead of "
            f"{self.bus_gb_per_s:.3g}"
        )


def network_need(
    predict_at: "Sequence[Callable[[float], Prediction]]", *, target: float = TARGET, tolerance: float = TOLERANCE
) -> NetworkNeed:
    """Find the least rates with which one of several configurations reaches an efficiency.

    Each configuration is asked whether slower links suffice than those that the configurations before it need, so
    most of them cost one prediction.

    Args:
        predict_at: By configuration, the prediction if the links' rates are this multiple of today's; its efficiency
            grows with the multiple. The most efficient configuration should come first.
        target: Efficiency to reach, from 0 to 1.
        tolerance: Relative error of the multiple.
    """
    best: float | None = None
    chosen = 0
    for number, predict_with in enumerate(predict_at):
        limit = FASTEST_LINKS if best is None else best * (1 - tolerance)

        def reaches(multiple: float, predict_with: "Callable[[float], Prediction]" = predict_with) -> bool:
            return predict_with(multiple).efficiency >= target

        if limit < SLOWEST_LINKS or not reaches(limit):
            continue
        best, chosen = least_multiple(reaches, enough=limit, tolerance=tolerance), number
    at = predict_at[chosen]
    message_bytes, bus = _largest_message(at(1.0))
    needed = None if best is None else _largest_message(at(best))[1]
    return NetworkNeed(target, best, chosen, message_bytes, bus, needed)


def least_multiple(
    reaches: Callable[[float], bool], *, enough: float, least: float = SLOWEST_LINKS, tolerance: float = TOLERANCE
) -> float:
    """Return the least multiple that reaches a target, within `tolerance`, given one that does.

    Args:
        reaches: Whether a multiple reaches the target; if one does, so do all larger ones.
        enough: A multiple that does.
        least: Where the search ends.
        tolerance: Relative error of the result.
    """
    missed, reached, step = least, enough, FIRST_STEP
    middle = min(1.0, enough)
    if middle == enough or reaches(middle):
        reached = middle
        while reached > least and reaches(max(least, reached / step)):
            reached, step = max(least, reached / step), step**2
        if reached == least:
            return least
        missed = max(least, reached / step)
    else:
        missed = middle
        while missed * step < enough and not reaches(missed * step):
            missed, step = missed * step, step**2
        reached = min(enough, missed * step)
    while log(reached / missed) > tolerance:
        middle = sqrt(missed * reached)
        if reaches(middle):
            reached = middle
        else:
            missed = middle
    return reached


def _largest_message(prediction: "Prediction") -> tuple[int, float]:
    """Return bytes and bus bandwidth, in 10**9 bytes per second, of the message of a bucket that sends most."""
    engine_input = prediction.timeline.engine_input
    world_size = len(engine_input.ranks if engine_input.represented_by is None else engine_input.represented_by)
    sent = [(0.0, 0, 1)]
    for one, ns in zip(engine_input.schedule.collectives, engine_input.cost_ns.tolist(), strict=True):
        if one.bucket is not None:
            share = world_size - 1 if one.transport == "all_gather" else sent_share(world_size)
            sent.append((share * one.size_bytes, one.size_bytes, max(1, ns)))
    sent_bytes, size_bytes, ns = max(sent)
    return size_bytes, sent_bytes / ns


NARROWER = {
    "collectives": "measure `all_reduce_perf -b 1M -e 64M` on as many GPUs and give its log as the fabric",
    "device speeds": "record on several GPUs",
    "slowest rank": f"record {LEAST_RECORDED} iterations or more, on several GPUs",
    "compute times": "measure a step on one GPU, or its parts: --step-ms of `ddplab synthesize` and `ddplab plan`",
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
