"""Lower bound: an iteration time that no buckets can beat, in any order and of any sizes.

Bucket k of K is launched after everything in the first k buckets is ready and packed, and all collectives from k on
run after that. So with C_l for the time that collective l keeps the link busy, the iteration is at least

    L_k + C_k + ... + C_K.

Computing that a collective slows by a factor s loses r = 1 - 1 / s of its duration. Of the collectives before
k, those that run before L_k delay the launch by this part of their time, and the others keep the link busy later, so
`r * (C_1 + ... + C_{k-1})` is added at least. Likewise a rank with Q nanoseconds of computing takes at least
`Q + r * (C_1 + ... + C_K)`, because during collectives computing progresses at most at 1 / s of its speed.

Let gradient p weigh `w_p` and let `C >= h + w(bucket)` for every possible bucket. What the first k buckets weigh
together, S_k, says when bucket k can be launched at the earliest: `E(S_k)`, when gradients of this weight are ready,
plus the least packing of so much, plus k launches. All inequalities then depend on S_1 <= ... <= S_K alone, and the
best S_k is the largest one that they allow. So the least time for each K is found by bisection. With
`w = b * bytes`, every rate b gives a valid bound, and the largest one counts. For a cost `h + b * bytes` the bound is
low only because it may split gradients; for other costs, `_end_by_cells` has a second bound.
"""

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from ..schedule.comm_hook_messages import Quantized
from ..workload.compute_times import Floats
from .plan_times import PartitionCosts, is_additive, least_message_bytes

RATES = 8
"""Rates that are tried, of those at which the lower convex hull of the costs has its edges."""
SINGLE_COUNTS = 24
"""Numbers of buckets that are bounded one by one; larger ones are bounded in groups."""
CELLS, FEW_CELLS = 400, 100
"""Cells of bytes; fewer if many iterations are bounded."""
FEW_CYCLES = 8
MOST_LAYERS = 40
"""Numbers of buckets that are bounded one by one with cells."""
ROUNDING = 1e-9
"""Relative error of times in the event replay and in this module, and the nanoseconds below."""
ROUNDING_NS = 8


def lower_bound_ns(costs: PartitionCosts) -> int:
    """Return a time that the objective of any partition in any launch order reaches at least."""
    minorants = _minorants(costs)
    cycles = range(len(costs.step_ns))
    curve = _cost_curve(costs)
    cells = CELLS if len(cycles) <= FEW_CYCLES else FEW_CELLS
    ends = np.array(
        [
            max(
                *(_end_of_cycle(costs, cycle, *one) for one in minorants),
                0.0 if curve is None else _end_by_cells(costs, cycle, *curve, cells),
            )
            for cycle in cycles
        ]
    )
    value = costs.times.deciding_ns(np.maximum(0, ends * (1 - ROUNDING) - ROUNDING_NS))
    layout = costs.times.recorded.layout
    return value if layout is None else min(value, costs.times.value_ns(layout))


def _minorants(costs: PartitionCosts) -> list[tuple[Floats, float]]:
    """Return weights of the gradients, shape [parameters], and a constant h, such that no bucket costs less.

    Several pairs, of which each gives a bound.
    """
    hook = costs.times.policy.hook
    weights = np.array([least_message_bytes(one, hook) for one in costs.parameters])
    sent = np.array([message is not None for message in costs.messages])
    dense = np.array([not one.sparse for one in costs.parameters]) & sent
    if not _sent_alone(costs).any():
        return [(np.zeros(len(sent)), 0.0)]
    if costs.times.policy.skip_all_reduce_unused_params:
        weights[list(costs.times.recorded.never_used)] = 0
    alone = costs.link_of_buckets_ns([[index] for index in range(len(sent))])
    known = is_additive(hook) or type(hook) is Quantized
    if not known or not dense.any():
        sizes = np.zeros(1)
        link = np.zeros(1) if dense.any() else np.full(1, alone[sent].min())
    else:
        sizes, link = _sampled(costs, costs.message_bytes[:, dense])
    found = []
    for rate in _rates(sizes, link) if known else [0.0]:
        w = rate * weights
        least = min([float((link - rate * sizes).min()) - 1, *alone[sent & ~dense].tolist()])
        if least >= 0 or not rate:
            least = max(0.0, least)
            w[sent & ~dense] = np.maximum(0, alone[sent & ~dense] - least)
            found.append((w, least))
    return found


def _sampled(costs: PartitionCosts, message_bytes: Floats) -> tuple[Floats, Floats]:
    """Return sizes between the smallest and the largest possible message, and their costs.

    Costs are straight or concave between measured sizes, powers of two and, for gathered messages, these divided by
    the number of ranks; a line below all sampled points is then below all costs.
    """
    times = costs.times
    first = message_bytes[0]
    second = message_bytes[1][message_bytes[1] > 0]
    low, high = min([first.min(), *second]), max(first.sum(), second.sum())
    gathered = type(times.policy.hook) is Quantized
    if gathered:
        high *= 2  # channels are filled up
    measured = np.array([row.size_bytes for row in times.fabric.all_reduce], np.int64)
    knots = np.concatenate([2 ** np.arange(50), measured])
    knots = np.concatenate([knots, knots // times.world_size])
    even = np.geomspace(max(1, low), max(2, high), 256).astype(np.int64)
    sizes = np.unique(np.concatenate([knots - 1, knots, knots + 1, even, [int(low), int(high)]]))
    sizes = sizes[(sizes >= low) & (sizes <= high)]
    return sizes.astype(float), costs.link_ns("all_gather" if gathered else "all_reduce", sizes)


def _rates(sizes: Floats, link: Floats) -> list[float]:
    """Return slopes of the lower convex hull of the costs, in ns per byte: the last, and others spread over it."""
    hull: list[int] = []
    for place in range(len(sizes)):
        while len(hull) > 1:
            a, b = hull[-2:]
            if (link[b] - link[a]) * (sizes[place] - sizes[a]) < (link[place] - link[a]) * (sizes[b] - sizes[a]):
                break
            hull.pop()
        hull.append(place)
    slopes = np.diff(link[hull]) / np.maximum(1, np.diff(sizes[hull]))
    if not len(slopes):
        return [0.0]
    chosen = np.unique(np.linspace(0, len(slopes) - 1, RATES).astype(int))
    return sorted({0.0, *np.maximum(0, slopes[chosen]).tolist()})


def _end_of_cycle(costs: PartitionCosts, cycle: int, weights: Floats, least_ns: float) -> float:
    """Return the bound of one cycle with one pair of weights and constant."""
    lost = costs.lost_share
    total = float(weights.sum())
    reached, readiest = _earliest(costs, cycle, weights)
    reached[-1] = total
    reach, earliest = reached.tolist(), readiest.tolist()
    launch, unpack = map(_rounded_down, (costs.launch_ns, costs.unpack_ns))
    after = float(costs.copy_ns.min() + costs.step_ns[cycle]) + unpack - 1
    computed = float(costs.computed_ns[cycle] + costs.pack_ns.sum() + costs.copy_ns.sum()) + lost * total
    sends = total > 0 or least_ns > 0

    def computing(count: int) -> float:
        return computed + count * (launch + unpack + lost * least_ns)

    def is_enough(slack: float, count: int) -> bool:
        """Whether `count` buckets carry all gradients if bucket k is launched by `slack` plus what came before."""
        carried = 0.0
        for number in range(1, count + 1):
            limit = slack + (1 - lost) * (carried + (number - 1) * least_ns) - number * launch
            place = bisect_right(earliest, limit)
            before, carried = carried, reach[place - 1] if place else 0.0
            if place == len(reach):
                return True
            if carried <= before and (1 - lost) * least_ns <= launch:
                return False  # neither will the next bucket carry more
        return False

    def least_slack(count: int, low: float, high: float) -> tuple[float, float]:
        """Return two values of the slack, at most 1 ns apart: too little for `count` buckets, and enough."""
        while high - low > 1:
            middle = (low + high) / 2
            low, high = (low, middle) if is_enough(middle, count) else (middle, high)
        return low, high

    most = len(reach)
    enough = earliest[-1] + launch + 1
    low, _ = least_slack(most, earliest[0] - total - most * least_ns, enough)
    count, best = 1, np.inf
    if not costs.times.policy.skip_all_reduce_unused_params:
        count = len({kind for kind, is_sent in zip(costs.kinds, _sent(costs), strict=True) if is_sent})
    while count <= most and computing(count) < best and (not sends or low + total + count * least_ns + after < best):
        last = min(most, count if count < SINGLE_COUNTS else count + count // 8)
        chain = 0.0
        if sends:
            slack, enough = least_slack(last, low, enough)
            chain = slack + total + count * least_ns + after
        best = min(best, max(chain, computing(count)))
        count = last + 1
    return float(best)


def _cost_curve(costs: PartitionCosts) -> tuple[Floats, Floats, float] | None:
    """Return possible sizes of messages, their costs, and the highest rate b with `cost >= b * bytes` at all sizes.

    None if the cost of a bucket does not depend on the sum of the bytes of its gradients alone.
    """
    times, seconds = costs.times, costs.message_bytes[1]
    if not is_additive(times.policy.hook) or seconds.any() or times.policy.skip_all_reduce_unused_params:
        return None
    if any(one.sparse for one in costs.parameters) or not costs.message_bytes[0].sum():
        return None
    sizes, link = _sampled(costs, costs.message_bytes)
    some = sizes > 0
    return sizes, link, float((link[some] / sizes[some]).min())


def _end_by_cells(costs: PartitionCosts, cycle: int, sizes: Floats, link: Floats, rate: float, cells: int) -> float:
    """Return the bound of one cycle with the true cost of each size, by dynamic programming over cells of bytes.

    With `h(s) = cost(s) - b * s` for the bytes of one bucket, `D'_k = D_k - b * S_k` obeys

        D'_k >= max(E(S_k) + k * launch - (1 - r) * b * S_{k-1}, D'_{k-1}) + h(S_k - S_{k-1}).

    S_k is known up to its cell, so the least `h` of all sizes that are possible between two cells counts.
    """
    lost, total = costs.lost_share, float(costs.message_bytes[0].sum())
    width = total / cells
    reached, earliest = _earliest(costs, cycle, costs.message_bytes[0])
    starts = np.arange(cells + 1) * width
    starts[-1] = total
    earliest = earliest[np.minimum(reached.searchsorted(starts - 1e-6 * width), len(reached) - 1)]

    excess = link - rate * sizes - 1
    low = sizes.searchsorted(np.maximum(sizes[0], starts - width), side="right") - 1
    high = np.minimum(sizes.searchsorted(starts + width), len(sizes) - 1)
    least = np.array([excess[a : b + 1].min() for a, b in zip(np.maximum(0, low), high, strict=True)])

    launch, unpack = map(_rounded_down, (costs.launch_ns, costs.unpack_ns))
    after = float(costs.copy_ns.min() + costs.step_ns[cycle]) + unpack - 1 + rate * total
    computed = float(costs.computed_ns[cycle] + costs.pack_ns.sum() + costs.copy_ns.sum()) + lost * rate * total
    credit = (1 - lost) * rate * (starts + width)[:, None]
    apart = np.arange(cells + 1)[None, :] - np.arange(cells + 1)[:, None]
    between = np.where(apart >= 0, least[np.abs(apart)], np.inf)
    first = earliest + launch + least

    best, done = np.inf, first
    most = min(MOST_LAYERS, len(reached))
    for count in range(1, most + 1):
        if count > 1:
            done = (np.maximum(earliest[None, :] + count * launch - credit, done[:, None]) + between).min(axis=0)
        best = min(best, max(float(done[-1]) + after, computed + count * (launch + unpack)))
        if computed + (count + 1) * (launch + unpack) >= best:
            return best
    if most == len(reached):
        return best
    done = first.copy()  # of any number of buckets, with the launches of one
    for place in range(1, cells + 1):
        steps = np.maximum(earliest[place] + launch - credit[:place, 0], done[:place]) + between[:place, place]
        done[place] = min(done[place], steps.min())
    return min(best, max(float(done[-1]) + after, computed + (most + 1) * (launch + unpack)))


def _earliest(costs: PartitionCosts, cycle: int, weights: Floats) -> tuple[Floats, Floats]:
    """Return the weight of the gradients up to each one in ready order, and when these can be packed at the earliest.

    All but the last gradient of a bucket are packed before it is ready. Gradients that send nothing are left out,
    because a bucket of them alone sends nothing either.
    """
    order = costs.ready_ns[cycle].argsort(kind="stable")
    order = order[_sent(costs)[order]]
    reached = weights[order].cumsum()
    some = weights > 0
    cheapest = (costs.pack_ns[some] / weights[some]).argsort(kind="stable")
    at, ns = (np.concatenate([[0.0], one[some][cheapest].cumsum()]) for one in (weights, costs.pack_ns))
    packed_ns = np.interp(np.concatenate([[0.0], reached[:-1]]), at, ns)
    return reached, np.maximum.accumulate(costs.ready_ns[cycle][order] + packed_ns)


def _sent(costs: PartitionCosts) -> NDArray[np.bool_]:
    """Whether each gradient alone would be sent; if none would, all count."""
    sent = _sent_alone(costs)
    return sent if sent.any() else ~sent


def _sent_alone(costs: PartitionCosts) -> NDArray[np.bool_]:
    sent = np.array([message is not None for message in costs.messages])
    if costs.times.policy.skip_all_reduce_unused_params:
        sent[list(costs.times.recorded.never_used)] = False
    return sent


def _rounded_down(ns: float) -> float:
    return max(0.0, ns - 0.5) if ns % 1 else ns
