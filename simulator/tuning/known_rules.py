"""Known rules: buckets as reducers and papers choose them, for comparison with the best ones.

Each rule is a function of the sizes in ready order and of a line for the cost of an all-reduce, and returns the
number of gradients in each bucket. None of them looks at copies, launches or slow-downs.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf, sqrt
from typing import Literal

from ...reference.bucketing import MIB
from ..fabric import Segment

CapRule = Literal["reaches the cap", "at most the cap"]
"""When a bucket is closed: when it has reached the cap, as in torch, or before it would exceed the cap, as in the
reducers of Stanford's CS336 and in torch's inductor."""
INDUCTOR_MIB = (10.0, 500.0)
"""Limits of `saturating_cap_bytes`, in MiB: `pre_bucketing_fsdp_collectives_min_bucket_cap_mb` and `..._max_...`."""


def closed_by(rule: CapRule, sizes_bytes: Sequence[int], cap_bytes: float) -> list[int]:
    """Return the number of gradients in each bucket, walking the sizes; a gradient is never split."""
    counts: list[int] = []
    filled = 0
    for size in sizes_bytes:
        is_full = filled >= cap_bytes if rule == "reaches the cap" else filled + size > cap_bytes
        if is_full or not counts:
            counts.append(0)
            filled = 0
        counts[-1] += 1
        filled += size
    return counts


def distinct_caps(rule: CapRule, sizes_bytes: Sequence[int], most: int, start: int | None = None) -> list[int]:
    """Return the largest cap in bytes of each way in which the rule can fill buckets, from `start` or one bucket on.

    The largest cap comes first; there are at most `most`. Only gradients without bytes may join another bucket at
    caps in between.
    """
    ends = list(accumulate(sizes_bytes, initial=0))
    caps: list[int] = []
    cap = max(1, ends[-1] if start is None else start)
    while cap > 0 and len(caps) < most:
        caps.append(cap)
        first, splits = 0, 0  # the largest cap at which some bucket loses a gradient
        while first < len(sizes_bytes):
            if rule == "reaches the cap":
                end = min(len(sizes_bytes), bisect_left(ends, ends[first] + cap, first + 1))
                splits = max(splits, ends[end - 1] - ends[first])
            else:
                end = max(first + 1, bisect_right(ends, ends[first] + cap) - 1)
                splits = max(splits, (ends[end] - ends[first] - 1) * (end > first + 1))
            first = end
        cap = splits
    return caps


def saturating_cap_bytes(line: Segment, efficiency: float = 0.9) -> float:
    """Return the size at which an all-reduce has this part of the network's rate, within `INDUCTOR_MIB`.

    The cap of inductor for FSDP in torch 2.13: `compute_pre_bucket_cap_mb` in torch/_inductor/fx_passes/fsdp.py, with
    `compute_min_saturation_bytes` of torch/_inductor/comm_analysis.py. Buckets hold at most the cap.
    """
    least, most = (mib * MIB for mib in INDUCTOR_MIB)
    if not line.ns_per_byte:
        return least
    return min(most, max(least, efficiency / (1 - efficiency) * line.alpha_ns / line.ns_per_byte))


def square_root_cap_bytes(line: Segment, total_bytes: int) -> float:
    """Return the bucket size that minimises `latency * buckets + rate * bucket size`.

    The overhead beyond an ideal overlap is the latency of every bucket and the last bucket, which cannot overlap: the
    model of Stanford's CS336, assignment 2 (2025), problem ddp_bucketed_benchmarking. Buckets hold at most the cap.
    """
    return sqrt(line.alpha_ns * total_bytes / line.ns_per_byte) if line.ns_per_byte else inf


def merged_gradients(line: Segment, sizes_bytes: Sequence[int], ready_ns: Sequence[float]) -> list[int]:
    """Merge a gradient with the next one if waiting for that one costs less than the latency that the merge saves.

    MG-WFBP (Shi, Chu and Li 2019, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms",
    INFOCOM, Algorithm 1): l is merged with l - 1 if that is ready before l could start plus one latency.

    Args:
        line: Cost of an all-reduce.
        sizes_bytes: Sizes in ready order.
        ready_ns: When each gradient is ready, in the same order.
    """
    counts = [1]
    free, filled = 0.0, sizes_bytes[0]
    for place in range(1, len(sizes_bytes)):
        start = max(free, ready_ns[place - 1])
        if ready_ns[place] < start + line.alpha_ns:
            counts[-1] += 1
            filled += sizes_bytes[place]
        else:
            free = start + line.alpha_ns + line.ns_per_byte * filled
            counts.append(1)
            filled = sizes_bytes[place]
    return counts
