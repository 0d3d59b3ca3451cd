"""Limits: what lengthens an iteration most, and how far one thing must improve for a given efficiency.

Where measured iterations are far from the model, or all-reduces were measured of far larger messages only, neither
limits nor needs follow from it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from math import ceil, exp, log
from typing import NamedTuple

import numpy as np

from ...reference.bucketing import DEFAULT_BUCKET_CAP_MB
from ..cost_terms import SLOW_RANKS, TERMS, leave_out
from ..engines.closed_form import latencies_ns
from ..fabric.algorithms import sent_share
from ..fabric.fabric import in_words
from ..inputs_with_default_costs import Inputs
from ..predicted_iteration import Prediction
from ..prediction import System
from ..schedule.comm_hook_messages import named_hook
from ..tuning.plan_times import with_plan
from ..tuning.tune import tuned

TARGET = 0.9
"""The efficiency for which the network is asked."""
SLOWEST_LINKS, FASTEST_LINKS = 1e-3, 1e3
"""Range of the multiples of the links' rates that is searched."""
RATE_TOLERANCE = 0.005
"""Relative tolerance of a multiple of the rates that is found."""
NETWORK = ("rate", "latency")
BUCKETS = ("last bucket", "first bucket")
MOST_OF_IT = 0.8
"""Part of the time lost to the network above which the first or the last bucket alone is the limit."""
MOST_BEYOND = 1.0
"""Relative error of a message beyond a measured table up to which its cost still tells what limits an iteration."""
NEGLIGIBLE = 0.01
"""Part of an iteration below which computation is the limit."""
TOLERANCE = 0.02
"""Relative tolerance of a needed improvement; predictions are less certain."""
MOST_BATCH = MOST_ACCUMULATED = 64
"""Largest multiple of the batch, and most accumulated iterations, that are tried."""
HOOKS = ("bf16", "power_sgd:4")
ACCUMULATED = 4

CURES: Mapping[str, Callable[[Inputs], Inputs]] = {
    "rate": lambda inputs: inputs._replace(fabric=inputs.fabric.with_links(rates=FASTEST_LINKS)),
    "latency": lambda inputs: inputs._replace(fabric=inputs.fabric.with_links(latencies=1 / FASTEST_LINKS)),
    "copies": TERMS["copies"].without,
    "launches and stalls": lambda inputs: leave_out(["launches", "stalls"], inputs),
    "slow-downs": TERMS["slow_downs"].without,
    "stragglers": lambda inputs: leave_out(SLOW_RANKS, inputs),
}
"""What may limit an iteration, and the inputs of a prediction without it."""


class Change(NamedTuple):
    """Another setting of the reducer or the script."""

    name: str
    iteration_ns: int
    is_tie: bool  #: whether errors of the costs may explain the difference; see `Comparison.is_tie`


class NetworkNeed(NamedTuple):
    """How fast the links must be for an efficiency."""

    target: float  #: the efficiency, from 0 to 1
    multiple: float | None
    """Least multiple of the links' rates with which the target is reached; latencies stay. None: not even links of
    infinite rate suffice, or it does not follow from the model."""
    message_bytes: int  #: the largest message of a bucket, after the comm hook
    bus_gb_per_s: float  #: bus bandwidth of this message today, in 10**9 bytes per second, as nccl-tests define it
    needed_gb_per_s: float | None  #: the same with the rates that are needed, or None

    @property
    def links(self) -> str:
        """The links that are needed, in words."""
        return (
            f"links {self.multiple:.3g} times as fast: {self.needed_gb_per_s:.3g} GB/s of bus bandwidth for the "
            f"largest message ({in_words(self.message_bytes)}) instead of {self.bus_gb_per_s:.3g}"
        )

    def sentence(self) -> str:
        """Return the need as a sentence."""
        if self.multiple is None:
            return (
                f"no rate of the links suffices for {self.target:.0%}: latencies, copies, launches, slow-downs or "
                "slow ranks alone take more than the rest"
            )
        if self.multiple <= SLOWEST_LINKS:
            slower = f"links {1 / SLOWEST_LINKS:.0f} times slower"
            return f"the network hardly matters: {self.target:.0%} would remain on {slower}"
        return f"{self.target:.0%} {'would remain with' if self.multiple <= 1 else 'needs'} {self.links}"


class Needs(NamedTuple):
    """How far one thing alone must change for the target efficiency; None: no change of it suffices."""

    rate: NetworkNeed | None  #: the need of faster links; None: one GPU has no network
    latency: float | None  #: largest multiple of the latencies that suffices
    batch: float | None  #: least multiple of the batch per GPU, from 1 to `MOST_BATCH`
    accumulated: int | None  #: least number of iterations per synchronisation, at most `MOST_ACCUMULATED`


class Limits:
    """The limits of a system on one number of GPUs."""

    def __init__(self, system: System, world_size: int) -> None:
        self.system, self.world_size = system, world_size

    @cached_property
    def why_unknown(self) -> str:
        """Why limits and needs do not follow from the model, in words; empty if they do."""
        if self.now.contradictions:
            return "the model does not explain the measured iterations"
        fabric, size = self.system.inputs.fabric, np.array([self.message_bytes])
        if self.world_size > 1 and fabric.errors_beyond_tables(size, self.world_size)[0] > MOST_BEYOND:
            return f"no all-reduce near {in_words(self.message_bytes)}, the largest message, was measured"
        return ""

    @property
    def message_bytes(self) -> int:
        """Bytes of the message of a bucket that sends most."""
        return _largest_message(self.now)[0]

    @cached_property
    def saved_ns(self) -> dict[str, int]:
        """Nanoseconds by which an iteration would be shorter without each possible limit alone.

        Times overlap, so the sum is not the time that data parallelism adds. Without the `last bucket`, its
        all-reduce takes no time; without the `first bucket`, that bucket holds one gradient and is launched at once.
        Empty: what limits the iteration does not follow from the model.
        """
        if self.why_unknown:
            return {}
        saved = {name: self._saved_by(cure(self.system.inputs)) for name, cure in CURES.items()}
        return saved | {"first bucket": self._saved_by_first(), "last bucket": self._saved_by_last()}

    @property
    def limit(self) -> str:
        """The possible limit without which the iteration would be shortest.

        Where this is the network, and one bucket alone causes `MOST_OF_IT`, that bucket. "computation" if nothing
        takes more than `NEGLIGIBLE` of the iteration; "unexplained" if measured iterations are far from the model;
        "unknown" if the messages of its buckets are far below those that were measured.
        """
        if self.why_unknown:
            return "unexplained" if self.now.contradictions else "unknown"
        saved = self.saved_ns
        largest = max(CURES, key=lambda name: saved[name])
        if saved[largest] <= NEGLIGIBLE * self.now.iteration_ns:
            return "computation"
        if largest in NETWORK:
            return next((name for name in BUCKETS if saved[name] >= MOST_OF_IT * saved[largest]), largest)
        return largest

    def needed_rate(self, target: float = TARGET) -> NetworkNeed:
        """Return how fast the links must be for this efficiency, from 0 to 1."""
        best = None
        if not self.why_unknown:
            best = least_multiple(lambda multiple: self._with_links(rates=multiple).efficiency, target)
        needed = None if best is None else _largest_message(self._with_links(rates=best))[1]
        return NetworkNeed(target, best, *_largest_message(self.now), needed)

    def needs(self, target: float) -> Needs:
        """Return how far one thing alone must change for this efficiency, from 0 to 1."""
        has_network = self.world_size > 1
        rate = self.needed_rate(target) if has_network else None
        if self.why_unknown:
            return Needs(rate, None, None, None)

        def with_speed(multiple: float) -> float:  # of empty messages
            return self._with_links(latencies=1 / multiple).efficiency

        speed = least_multiple(with_speed, target, tolerance=TOLERANCE) if has_network else None
        return Needs(rate, speed and 1 / speed, self._needed_batch(target), self._needed_accumulation(target))

    def changes(self) -> list[Change]:
        """Return what other bucket caps, comm hooks and accumulation would give, the fastest first."""
        inputs, policy = self.system.inputs, self.system.inputs.policy
        is_sparse = any(one.sparse for one in inputs.trace.workload.parameters)  # which none of `HOOKS` supports
        hooks = () if policy.hook.name != "none" or policy.grouping == "module" or is_sparse else HOOKS
        others = {f"hook {hook}": inputs.with_policy(hook=named_hook(hook)) for hook in hooks}
        if policy.sync_every == 1:
            others[f"accumulate {ACCUMULATED}"] = inputs.with_policy(sync_every=ACCUMULATED)
        changed = {"best buckets": self.best_buckets()}
        changed |= {name: self.system.at(self.world_size, one) for name, one in others.items()}
        found = [Change(name, one.iteration_ns, self.now.compare(one).is_tie) for name, one in changed.items()]
        return sorted(found, key=lambda one: one.iteration_ns)

    def best_buckets(self) -> Prediction:
        """Return the prediction with the buckets that `tune` finds; today's where nothing can be tuned."""
        inputs = self.system.inputs
        if inputs.policy.grouping == "module" or inputs.policy.phase != "steady":
            return self.now
        other = self.system.at(self.world_size, with_plan(inputs, tuned(inputs, self.world_size).buckets))
        return min(self.now, other, key=lambda one: one.iteration_ns)

    @property
    def now(self) -> Prediction:
        """The prediction whose limits these are."""
        return self.system.at(self.world_size)

    def _with_links(self, **multiples: float) -> Prediction:
        inputs = self.system.inputs
        return self.system.at(self.world_size, inputs._replace(fabric=inputs.fabric.with_links(**multiples)))

    def _saved_by(self, changed: Inputs) -> int:
        return max(0, self.now.iteration_ns - self.system.at(self.world_size, changed).iteration_ns)

    def _saved_by_first(self) -> int:
        inputs, policy = self.system.inputs, self.system.inputs.policy
        if policy.overruled or policy.bucket_cap_mb_list is not None or self.world_size == 1:
            return 0
        least_mb, cap_mb = min(1, *inputs.trace.sizes_bytes) / 2**20, policy.bucket_cap_mb
        caps_mb = (least_mb, DEFAULT_BUCKET_CAP_MB if cap_mb is None else cap_mb)
        return self._saved_by(inputs.with_policy(bucket_cap_mb_list=caps_mb))

    def _saved_by_last(self) -> int:
        engine_input = self.now.timeline.engine_input
        collectives = engine_input.schedule.collectives
        last = max((one.bucket for one in collectives if one.bucket is not None), default=None)
        if last is None or self.world_size == 1:
            return 0
        free = [0 if one.bucket == last else 1 for one in collectives]
        without = replace(engine_input, cost_ns=engine_input.cost_ns * free)
        saved_ns = int(latencies_ns(engine_input)) - int(latencies_ns(without))
        return max(0, saved_ns // self.system.inputs.policy.sync_every)

    def _needed_batch(self, target: float) -> float | None:
        system = self.system

        def with_batch(multiple: float) -> float:
            trace = system.inputs.trace if multiple == 1 else system.with_batch(multiple)
            if trace is None:
                return 0.0
            return system.at(self.world_size, system.inputs._replace(trace=trace)).efficiency

        return least_multiple(with_batch, target, enough=MOST_BATCH, least=1.0, tolerance=TOLERANCE)

    def _needed_accumulation(self, target: float) -> int | None:
        """Return the need from cycles of one and of two iterations: each further one adds the same time."""
        inputs, now = self.system.inputs, self.now
        if inputs.policy.sync_every > 1 or now.efficiency >= target:
            return inputs.policy.sync_every if now.efficiency >= target else None
        two = self.system.at(self.world_size, inputs.with_policy(sync_every=2))
        local_ns = 2 * two.iteration_ns - now.iteration_ns
        room_ns = now.efficiency * now.iteration_ns / target - local_ns
        if room_ns <= 0:
            return None
        count = ceil((now.iteration_ns - local_ns) / room_ns)
        return count if count <= MOST_ACCUMULATED else None


def least_multiple(
    efficiency_at: Callable[[float], float],
    target: float,
    *,
    enough: float = FASTEST_LINKS,
    least: float = SLOWEST_LINKS,
    tolerance: float = RATE_TOLERANCE,
) -> float | None:
    """Return the least multiple, of `least` (at most 1) to `enough`, that reaches a target; None if none does.

    Times grow almost in proportion to the inverse of the multiple, between kinks, and so does the inverse of an
    efficiency. In these terms false position, with the rule of Anderson and Bjorck for kinks, takes few predictions.

    `efficiency_at` returns the efficiency, from 0 to 1, with a multiple, with which it grows; `tolerance` is the
    relative error of the result.
    """

    def excess(multiple: float) -> float:  # of the time; 0 or less: the target is reached
        return target / max(1e-9, efficiency_at(multiple)) - 1

    reached, missed = (1.0, least) if excess(1.0) <= 0 else (enough, 1.0)
    lack, spare = excess(missed), excess(reached)
    if lack <= 0:
        return least
    if spare > 0:
        return None
    last = 0.0
    while (width := log(reached / missed)) > tolerance:
        multiple = (lack - spare) / (lack / reached - spare / missed)
        margin = exp(min(0.9 * tolerance, width / 2))  # a hit must leave a narrow bracket, not a narrow side of it
        multiple = min(max(multiple, missed * margin), reached / margin)
        over = excess(multiple)
        if over > 0:
            spare *= _weight(over, lack) if last > 0 else 1
            missed, lack = multiple, over
        else:
            lack *= _weight(over, spare) if last < 0 else 1
            reached, spare = multiple, over
        last = over or -1.0
    return reached


def _weight(now: float, before: float) -> float:
    """Return what an end that stays a second time counts (Anderson and Bjorck, 1973)."""
    return 1 - now / before if abs(now) < abs(before) else 0.5


def _largest_message(prediction: Prediction) -> tuple[int, float]:
    """Return bytes and bus bandwidth, in 10**9 bytes per second, of the message of a bucket that sends most."""
    engine_input = prediction.timeline.engine_input
    world_size = len(engine_input.represented_by)
    sent = [(0.0, 0, 1)]
    for one, ns in zip(engine_input.schedule.collectives, engine_input.cost_ns.tolist(), strict=True):
        if one.bucket is not None:
            share = world_size - 1 if one.transport == "all_gather" else sent_share(world_size)
            sent.append((share * one.size_bytes, one.size_bytes, max(1, ns)))
    sent_bytes, size_bytes, ns = max(sent)
    return size_bytes, sent_bytes / ns
