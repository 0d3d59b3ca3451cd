"""Tune: fast buckets for a recorded model on a fabric.

The search starts from the buckets of single caps and of known rules, so the plan is never slower than any of them.
`improve` improves the best of these, and `predict` gives the times. `lower_bound` limits the gain of all others.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from math import ceil, floor, inf, log2, log10, sqrt
from operator import itemgetter
from typing import Unpack

import numpy as np
from pydantic import InstanceOf

from ...reference.bucketing import MIB, BucketAssignment
from ...reference.trace import BucketLayout, Trace
from ..argument_checks import Ranks, Stragglers, checked
from ..cost_terms import assumed_with_effect, origins
from ..fabric import Fabric, Segment
from ..fabric.measured_tables import segment_at
from ..inputs_with_default_costs import Inputs, complete
from ..prediction import System
from ..schedule.policy import Policy, PolicySettings
from ..schedule.schedule import buckets_of
from ..workload.variation import RECORDED, Variation
from .bucket_plan import DEFAULT, GIVEN, RULE, Baseline, BucketPlan
from .lower_bound import ROUNDING_NS, lower_bound_ns
from .plan_times import CapRule, Objective, PartitionCosts, PlanTimes, partition_costs, with_plan

CAPS = 48
"""Single caps that are tried first, evenly spaced in logarithms; then as many that make different buckets, from the
largest one on, and around the best one."""
IMPROVED = 2
"""Plans with the shortest times by the recurrence that are improved by it."""
EVALUATIONS = 400
"""Plans of which each improvement may compute the recurrence."""
CHECKED = 6
"""Plans with the shortest times by the recurrence whose times are then computed as `predict` does."""


@checked
def tune(
    trace: InstanceOf[Trace],
    fabric: InstanceOf[Fabric],
    *,
    world_size: Ranks,
    objective: Objective = "median",
    cap_rule: CapRule = "reaches the cap",
    policy: InstanceOf[Policy] | None = None,
    variation: InstanceOf[Variation] = RECORDED,
    stragglers: Stragglers = (),
    assume: bool = True,
    **settings: Unpack[PolicySettings],
) -> BucketPlan:
    """Search for the buckets with the shortest predicted iteration.

    The other arguments are those of `predict`. The search replaces caps, plan and order of the policy; if it has caps
    or a plan, the plan that is found is compared with those in place of torch's default.

    `objective` is what should be short: the "median", "mean", "p95" or "p99" of the iterations, or "worst_case", the
    median with all costs of collectives, copies, launches and slow-downs at the upper ends of their bands. `cap_rule`
    is the reducer's rule for which the best single cap is given: torch's "reaches the cap", or "at most the cap".

    Raises:
        ValueError: As for `predict`, or modules (grouping="module") or an iteration before the steady ones are to be
            tuned.
        TypeError: A keyword argument is not a field of `Policy`.
    """
    inputs = complete(
        trace, fabric, policy=policy, variation=variation, stragglers=stragglers, assume=assume, settings=settings
    )
    return tuned(inputs, world_size, objective, cap_rule)


def tuned(
    inputs: Inputs, world_size: int, objective: Objective = "median", cap_rule: CapRule = "reaches the cap"
) -> BucketPlan:
    """Do as `tune`, with complete inputs."""
    policy = inputs.policy
    if policy.grouping == "module":
        raise ValueError("grouping: expected 'buckets', because FSDP2's modules are no buckets to tune, got 'module'")
    if policy.phase != "steady":
        raise ValueError(f"phase: expected 'steady', the iterations that buckets are tuned for, got {policy.phase!r}")
    times = PlanTimes(inputs.with_policy(plan=None, order="ready"), world_size, objective)
    fields = ("bucket_cap_mb", "bucket_cap_mb_list", "plan")
    is_given = any(getattr(policy, name) != Policy.model_fields[name].default for name in fields)
    present = as_layout(buckets_of(policy, times.recorded)) if is_given else None
    search = Search(partition_costs(times), cap_rule, present)
    best = search.run()
    today, system = present or search.rules[DEFAULT], System(inputs)
    plans = best, today, search.rules[RULE]
    if world_size == 1:  # there are no collectives
        others = (with_plan(inputs, plan) for plan in search.rules.values())
        inputs = inputs._replace(assumed=assumed_with_effect(inputs, origins(inputs, world_size, *others)))
    chosen, default, by_rule = (system.at(world_size, with_plan(inputs, plan)) for plan in plans)
    iteration_ns = times.value_ns(best)
    timed = [(name, len(plan), times.value_ns(plan)) for name, plan in search.rules.items()]
    return BucketPlan(
        model=inputs.trace.workload.model,
        parameters=tuple(one.name for one in inputs.trace.workload.parameters),
        world_size=world_size,
        objective=objective,
        buckets=best,
        bucket_cap_mb_list=caps_of(best, times),
        iteration_ns=iteration_ns,
        interval_ns=chosen.interval_ns,
        lower_bound_ns=min(iteration_ns, lower_bound_ns(search.costs)),
        keep_default=best == today or default.compare(chosen).is_tie,
        cap_rule=cap_rule,
        best_cap_mb=search.best_cap_mb,
        best_cap_ns=times.value_ns(search.by_cap(search.best_cap_mb)),
        rule_caps_mb=search.rule_caps_mb,
        rule_ties=by_rule.compare(chosen).is_tie,
        baselines=tuple(
            Baseline(name=name, iteration_ns=ns, buckets=buckets, regret=ns / max(1, iteration_ns) - 1)
            for name, buckets, ns in sorted(timed, key=itemgetter(2))
        ),
        assumed=chosen.assumed,
    )


def caps_of(plan: BucketLayout, times: PlanTimes) -> tuple[float, ...] | None:
    """Return the caps in MiB with which the reducer closes exactly these buckets; None if no list does.

    A bucket closes when it reaches its cap, so its own size is its cap.
    """
    sizes = times.trace.sizes_bytes
    caps = tuple(sum(sizes[index] for index in bucket) / MIB for bucket in plan)
    closed = buckets_of(times.policy.model_copy(update={"bucket_cap_mb_list": caps}), times.recorded)
    return caps if list(map(sorted, closed)) == list(map(sorted, plan)) else None


def roundest_mb(above_bytes: int, cap_bytes: int) -> float:
    """Return the number of MiB with the fewest decimals that is at most the cap, and above the other size."""
    for decimals in range(12):
        cap_mb: float = floor(cap_bytes / MIB * 10**decimals) / 10**decimals
        if int(cap_mb * MIB) > above_bytes:
            return cap_mb
    return cap_bytes / MIB


def rounded_up(value: float) -> float:
    """Return the next number with three digits; the value is above zero."""
    decimals = 2 - floor(log10(value))
    return ceil(value * 10.0**decimals) / 10.0**decimals


class Search:
    """The candidates of one search, and the best of them; `costs` are those of the deciding iterations."""

    def __init__(self, costs: PartitionCosts, cap_rule: CapRule, given: BucketLayout | None) -> None:
        self.times, self.costs, self._cap_rule = costs.times, costs, cap_rule
        self._sizes = [costs.parameters[index].size_bytes for index in costs.order]
        few = self._ranked_caps_mb()[:CHECKED]
        best = round(MIB * min(few, key=lambda cap: self.times.value_ns(self.by_cap(cap))))
        (below,) = distinct_caps(self._cap_rule, self._sizes, 2, start=best)[1:] or [0]
        self.best_cap_mb = roundest_mb(below, best)
        # The plan of each known rule, by name.
        self.rules = self._known_rules() | {"best single cap": self.by_cap(self.best_cap_mb)}
        self.rules |= {} if given is None else {GIVEN: given}
        self._by_caps = [self.by_cap(cap) for cap in few]

    def _ranked_caps_mb(self) -> list[float]:
        """Return caps in MiB in the order of their times by the recurrence."""
        total, smallest = sum(self._sizes), min((size for size in self._sizes if size), default=1)
        grid = np.geomspace(max(smallest, total), smallest, CAPS).astype(int).tolist()
        distinct = partial(distinct_caps, self._cap_rule, self._sizes, CAPS)
        ns = {int(cap): self.costs.value_ns(self.by_cap(cap / MIB)) for cap in {*grid, *distinct()}}
        ranked = sorted(ns, key=lambda cap: (ns[cap], -cap))
        above = max(0, grid.index(min(grid, key=lambda cap: abs(cap - ranked[0]))) - 1)
        ns |= {cap: self.costs.value_ns(self.by_cap(cap / MIB)) for cap in distinct(start=grid[above])}
        return [cap / MIB for cap in sorted(ns, key=lambda cap: (ns[cap], -cap))]

    def by_cap(self, cap_mb: float) -> BucketLayout:
        """Return the buckets of one cap by the reducer's rule."""
        if self._cap_rule == "at most the cap":
            return self._cut(closed_by(self._cap_rule, self._sizes, cap_mb * MIB))
        return self.assigned(bucket_cap_mb=cap_mb)

    def assigned(self, **caps: float | tuple[float, ...] | None) -> BucketLayout:
        """Return the buckets that torch's class assigns with these fields of the policy; by default, its caps."""
        none = {"bucket_cap_mb": None, "bucket_cap_mb_list": None}
        return as_layout(buckets_of(self.times.policy.model_copy(update=none | caps), self.times.recorded))

    def _known_rules(self) -> dict[str, BucketLayout]:
        costs, fabric, total = self.costs, self.times.fabric, sum(self._sizes)
        sent = np.array([costs.message_bytes[0].sum(), MIB], np.int64)
        every_ns, mib_ns = self.times.collectives_ns("all_reduce", sent).tolist()
        caps = caps_of_three_times(total, every_ns, mib_ns, float(np.median(costs.computed_ns)))
        self.rule_caps_mb = tuple(rounded_up(cap / MIB) for cap in caps)
        line = segment_at(fabric.segments(self.times.world_size), total / 8)
        ready_ns = np.maximum.accumulate(np.median(costs.ready_ns, axis=0)[list(costs.order)]).tolist()
        at_most = partial(closed_by, "at most the cap", self._sizes)
        return {
            DEFAULT: self.assigned(),
            RULE: self.assigned(bucket_cap_mb_list=self.rule_caps_mb),
            "one bucket": self.assigned(bucket_cap_mb=total / MIB),
            "each gradient alone": self._cut([1] * len(self._sizes)),
            "inductor's cap": self._cut(at_most(saturating_cap_bytes(line))),
            "square root of latency, size and rate": self._cut(at_most(square_root_cap_bytes(line, total))),
            "MG-WFBP": self._cut(merged_gradients(line, self._sizes, ready_ns)),
        }

    def _cut(self, counts: Sequence[int]) -> BucketLayout:
        """Return buckets of so many gradients in ready order, cut further where gradients of unequal kinds meet."""
        order, kinds = self.costs.order, self.costs.kinds
        changes = (place for place, (a, b) in enumerate(pairwise(order), start=1) if kinds[a] != kinds[b])
        return tuple(order[start:end] for start, end in pairwise(sorted({0, *accumulate(counts), *changes})))

    def run(self) -> BucketLayout:
        """Return the best plan that is found."""
        costs, times = self.costs, self.times
        ranked = self._ranked({*self.rules.values(), *self._by_caps})
        improved = [improve(plan, costs, costs.value_ns, EVALUATIONS) for plan in ranked[:IMPROVED]]
        few = set(self._ranked({*improved, *ranked})[:CHECKED])
        most_ns = min(map(times.value_ns, few)) + ROUNDING_NS
        few |= {plan for plan in self.rules.values() if costs.value_ns(plan) <= most_ns}  # no iteration is shorter
        best = min(sorted(few, key=len), key=times.value_ns)
        cells = len(times.deciding_cycles) * len(times.sampler.ranks)
        return improve(best, costs, times.value_ns, max(8, min(60, 400 // cells)))  # few if each takes long

    def _ranked(self, plans: Collection[BucketLayout]) -> list[BucketLayout]:
        """Return plans by their times by the recurrence, those with fewer buckets first."""
        return sorted(plans, key=lambda plan: (self.costs.value_ns(plan), len(plan)))


# Known rules: buckets as reducers and papers choose them, for comparison with the best ones
#
# Each rule is a function of the sizes in ready order and of a line for the cost of an all-reduce, and returns the
# number of gradients in each bucket. None of them looks at copies, launches or slow-downs.

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

    The largest of at most `most` caps comes first. Only gradients without bytes may join another bucket in between.
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


def caps_of_three_times(total_bytes: int, every_ns: float, mib_ns: float, computation_ns: float) -> tuple[float, ...]:
    """Return caps in bytes by docs/bucket_size.md: one, or a list in which each is twice the one before.

    A bucket counts as two all-reduces of 1 MiB, the factor with the least regret in validation/bucket_cap_study.py.
    Of B equal buckets, one overlaps with nothing: the last, if computation lasts longer than communication, and
    otherwise the first. So B buckets expose about `2 B mib_ns + shorter_ns / B`, which is least at the cap below. If
    communication lasts longer, growing buckets start it early and let it wait for nothing.

    All gradients have `total_bytes`; one all-reduce of so many takes `every_ns`, one of 1 MiB `mib_ns`, and an
    iteration without communication `computation_ns`.
    """
    shorter_ns = min(every_ns, computation_ns)
    if shorter_ns <= 2 * mib_ns:
        return (max(1.0, total_bytes),)
    cap = max(1.0, total_bytes * sqrt(2 * mib_ns / shorter_ns))
    if every_ns <= computation_ns:
        return (cap,)
    count = ceil(log2(2 * total_bytes / cap + 1))  # cap / 2 * (2 ** count - 1) is at least the total
    return tuple(cap / 2 * 2**number for number in range(count))


def merged_gradients(line: Segment, sizes_bytes: Sequence[int], ready_ns: Sequence[float]) -> list[int]:
    """Merge a gradient with the next one if waiting for that one costs less than the latency that the merge saves.

    MG-WFBP (Shi, Chu and Li 2019, "MG-WFBP: Efficient Data Communication for Distributed Synchronous SGD Algorithms",
    INFOCOM, Algorithm 1): l is merged with l - 1 if that is ready before l could start plus one latency. Sizes and
    ready times are in ready order.
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


# Local search

STEPS = (1, 2, 4, 8, 16, 32)
"""By how many gradients a border between two buckets moves."""


def improve(
    plan: BucketLayout, costs: PartitionCosts, value_ns: Callable[[BucketLayout], float], evaluations: int
) -> BucketLayout:
    """Return the plan after changes that make `value_ns`, or at equal value the number of buckets, smaller.

    Stops when no change does, or after so many evaluations. Which parameters may share a bucket is in `costs`.
    """
    best, tried = (value_ns(plan), len(plan)), {plan}
    while True:
        for changed in _neighbours(plan, costs):
            if changed in tried:
                continue
            if evaluations <= 0:
                return plan
            evaluations -= 1
            tried.add(changed)
            value = value_ns(changed), len(changed)
            if value < best:
                plan, best = changed, value
                break
        else:
            return plan


def _neighbours(plan: BucketLayout, costs: PartitionCosts) -> Iterator[BucketLayout]:
    """Return plans in which two successive buckets are merged, one is split, or a border has moved."""
    kinds = costs.kinds
    pairs = [(n, a, b) for n, (a, b) in enumerate(pairwise(plan)) if kinds[a[0]] == kinds[b[0]]]
    for number, one, other in pairs:
        yield (*plan[:number], one + other, *plan[number + 2 :])
    for number, bucket in enumerate(plan):
        if len(bucket) > 1:
            sizes = list(accumulate(costs.parameters[index].size_bytes for index in bucket))
            half = next(place for place, size in enumerate(sizes, start=1) if 2 * size >= sizes[-1])
            for edge in {1, min(half, len(bucket) - 1), len(bucket) - 1}:
                yield (*plan[:number], bucket[:edge], bucket[edge:], *plan[number + 1 :])
    for number, one, other in pairs:
        both = one + other
        for step in STEPS:
            for edge in (len(one) - step, len(one) + step):
                if 0 < edge < len(both):
                    yield (*plan[:number], both[:edge], both[edge:], *plan[number + 2 :])


def as_layout(buckets: BucketAssignment) -> BucketLayout:
    """Return buckets as tuples, which are hashable."""
    return tuple(map(tuple, buckets))
