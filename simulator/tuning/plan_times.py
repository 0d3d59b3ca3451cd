"""Plan times: the iteration time of any buckets, as `predict` computes it, and by a recurrence that is faster."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import Literal, cast

import numpy as np

from ...reference.bucketing import rebuild_order
from ...reference.files.value_ranges import as_int64
from ...reference.trace import BucketLayout, Parameter
from ..engines.closed_form import latencies_ns, solve
from ..fabric import Fabric, LinkShare
from ..inputs_with_default_costs import Inputs
from ..predicted_iteration import place_of_median
from ..schedule.comm_hook_messages import (
    CommHook,
    HalfPrecision,
    Message,
    PowerSGD,
    Quantized,
    Transport,
    gradient_bytes,
)
from ..schedule.schedule import Compute, LaunchCollective, build_schedule
from ..step_costs import ScheduleCosts, charged_fabric, price_schedule, rebucketed
from ..workload.compute_times import (
    CELLS,
    CycleTimes,
    Floats,
    IterationSampler,
    Nanoseconds,
    RecordedModel,
    recorded_model,
)

Objective = Literal["median", "mean", "p95", "p99", "worst_case"]
"""What should be short: the median, mean, 95th or 99th percentile of the iterations, or the median iteration with all
costs of communication at the upper end of their error bands."""
CapRule = Literal["reaches the cap", "at most the cap"]
"""When a bucket is closed: when it has reached the cap, as in torch, or before it would exceed the cap, as in the
reducers of Stanford's CS336 and in torch's inductor."""
FORWARD, STEP = Compute("forward"), Compute("step")
QUANTILES = {"p95": 0.95, "p99": 0.99}


class PlanTimes:
    """Iteration times of one model on one fabric, for any buckets: `value_ns` returns the `objective`.

    The buckets that the policy of `inputs` gives are not used.

    Attributes:
        deciding_cycles: Cycles that decide the objective: all distinct ones or, if they are ordered, one or two.
        is_ordered: Whether the cycles are ordered: a slower one is later in every moment. With constant speeds, and
            with slow-downs by which overlap never loses time, a slower cycle is then slower with any buckets, so that
            the cycle in the middle is the median with any buckets.
    """

    def __init__(self, inputs: Inputs, world_size: int, objective: Objective) -> None:
        self.trace, self.world_size, self.policy, self.objective = inputs.trace, world_size, inputs.policy, objective
        self.fabric = _at_upper_ends(inputs.fabric) if objective == "worst_case" else inputs.fabric
        self.recorded = recorded_model(inputs.trace, **inputs.policy.recorded_as(world_size))
        self._how = world_size, inputs.variation, inputs.stragglers
        self.sampler = self._sampler(self.recorded)
        self._distinct = self.sampler.distinct()
        self.deciding_cycles, self.is_ordered = self._deciding()
        self._known: dict[BucketLayout, Nanoseconds] = {}

    def _sampler(self, model: RecordedModel) -> IterationSampler:
        return IterationSampler(
            model.compute_times,
            *self._how,
            sync_every=self.policy.sync_every,
            compute_bounds=self.trace.workload.compute_bounds,
        )

    @cached_property
    def changed(self) -> tuple[RecordedModel, Fabric]:
        """The model and the costs to charge for other buckets than the recorded ones."""
        return rebucketed(self.trace, self.recorded, self.fabric, [[]])

    def costs(self, plan: BucketLayout) -> ScheduleCosts:
        """Return the costs of an iteration with these buckets.

        Raises:
            ValueError: The buckets are no plan for this model; see `buckets_of`.
        """
        policy = self.policy.model_copy(update={"plan": plan, "order": "ready"})
        charged = charged_fabric(self.fabric, self.recorded, plan)
        schedule = build_schedule(policy, self.recorded, world_size=self.world_size)
        costs = price_schedule(schedule, charged, policy, self.world_size)
        if self.objective == "worst_case":
            _, slower = costs.relative_errors
            dearer = as_int64(costs.untimed.cost_ns * (1 + slower))
            costs = replace(costs, untimed=replace(costs.untimed, cost_ns=dearer))
        return costs

    def cycles_ns(self, plan: BucketLayout) -> Nanoseconds:
        """Return the duration of each of the `deciding_cycles`; parameter indices by bucket, in launch order."""
        if plan in self._known:
            return self._known[plan]
        costs, sampler, cycles = self.costs(plan), self.sampler, self.deciding_cycles
        if self.recorded.has_communication:
            model, _ = rebucketed(self.trace, self.recorded, self.fabric, plan)
            sampler = self._sampler(model)
        batches = [
            latencies_ns(costs.engine_input(sampler, drawn))
            for drawn in sampler.in_batches(cycles, len(costs.untimed.schedule.instructions))
        ]
        self._known[plan] = np.concatenate(batches)
        return self._known[plan]

    def value_ns(self, plan: BucketLayout) -> int:
        """Return the objective with these buckets; equal to that of `predict`."""
        return self.deciding_ns(self.cycles_ns(plan))

    def _deciding(self) -> tuple[list[int], bool]:
        distinct, place = self._distinct
        every: list[int] = distinct.tolist()
        moments_in_all = len(every) * len(self.sampler.ranks) * self.sampler.parameters
        is_monotone = self.fabric.processor.slow_down == 1 or self.fabric.concurrency == 1  # later is never shorter
        if self.objective == "mean" or not is_monotone or moments_in_all > CELLS:
            return every, False
        times = self.sampler.draw(every)
        parts = times.ready_ns, times.backward_end_ns, times.step_ns, times.before_ns
        moments = np.concatenate([ns.reshape(len(every), -1) for ns in parts], axis=-1)
        order = moments.sum(axis=-1, dtype=float).argsort(kind="stable")
        if (np.diff(moments[order], axis=0) < 0).any() or times.unused.any():
            return every, False
        by_duration = np.sort(order.argsort()[place])  # of all cycles, each as its place in `order`
        middle = [len(by_duration) // 2]
        if self.objective in QUANTILES:
            level = QUANTILES[self.objective] * (len(by_duration) - 1)
            middle = [int(np.floor(level)), int(np.ceil(level))]
        return [every[order[by_duration[one]]] for one in middle], True

    def deciding_ns(self, cycles_ns: Floats | Nanoseconds) -> int:
        """Return the objective of these durations of the `deciding_cycles`, per iteration."""
        samples, place = cycles_ns / self.policy.sync_every, self._distinct[1]
        level = QUANTILES.get(self.objective)
        if self.is_ordered:
            between = 0.0 if level is None else level * (len(place) - 1) % 1
            return int(as_int64(np.interp(between, [0, 1], samples[[0, -1]])))
        samples = samples[place]
        if self.objective == "mean":
            return int(as_int64(samples.mean()))
        return int(as_int64(samples[place_of_median(samples)] if level is None else np.quantile(samples, level)))

    def collectives_ns(self, transport: Transport, sizes_bytes: Nanoseconds) -> Nanoseconds:
        """Return the duration of collectives of these sizes, alone and undisturbed; shape [sizes]."""
        price = self.fabric.all_gather_costs_ns if transport == "all_gather" else self.fabric.all_reduce_costs_ns
        costs_ns = price(sizes_bytes, self.world_size)
        if self.objective == "worst_case":
            _, slower = self.fabric.relative_errors(sizes_bytes, self.world_size)
            return as_int64(costs_ns * (1 + slower))
        return costs_ns

    def forward_starts_ns(self, plan: BucketLayout) -> tuple[CycleTimes, Nanoseconds]:
        """Return the `deciding_cycles`, and when each rank starts its last forward pass if nothing is slowed down.

        The starts have the shape [cycles, simulated ranks].
        """
        sampler = self._sampler(self.changed[0])
        times = sampler.draw(self.deciding_cycles)
        engine_input = self.costs(plan).engine_input(sampler, times)
        schedule = engine_input.schedule
        first = replace(schedule, instructions=schedule.instructions[: schedule.instructions.index(FORWARD) + 1])
        shares = (LinkShare(),) * len(schedule.collectives)
        timeline = solve(replace(engine_input, schedule=first, sharing=shares, slow_down=1.0))
        return times, timeline.end_ns[..., -1] - engine_input.duration_ns[..., schedule.steps.index(FORWARD)]

    def updates_ns(self, plan: BucketLayout) -> float:
        """Return how long the broadcasts of updated parameters (`Policy.zero`) take at least after the last step."""
        untimed, processor = self.costs(plan).untimed, self.changed[1].processor
        after = untimed.schedule.instructions[untimed.schedule.instructions.index(STEP) :]
        sent_ns = untimed.cost_ns[[one.collective for one in after if isinstance(one, LaunchCollective)]]
        first_ns = processor.launch_ns if len(sent_ns) and not self.recorded.has_communication else 0
        return float(first_ns + (sent_ns.sum() if self.fabric.concurrency == 1 else sent_ns.max(initial=0)))


def with_plan(inputs: Inputs, plan: BucketLayout) -> Inputs:
    """Return the inputs with these buckets in place of caps."""
    return inputs.with_policy(plan=plan, order="ready")


def _at_upper_ends(fabric: Fabric) -> Fabric:
    """Return the fabric with the costs of steps and the slow-downs at the upper end of their error bands."""
    processor = fabric.processor.slowed(1)
    copies, launches = 1 + processor.copy_error, 1 + processor.launch_error
    return fabric.with_processor(
        slow_down=processor.slow_down,
        pack=processor.pack.times(copies),
        copy_out=processor.copy_out.times(copies),
        launch_ns=round(processor.launch_ns * launches),
        stall_ns=round(processor.stall_ns * launches),
    )


# Partition costs: all that the buckets of one iteration decide, and the recurrence that gives its end
#
# With one queue and constant speeds, bucket k, which ends at position j of the order, is launched at `L_k =
# ready(j) + packed(j) + k * launch`, where `ready(j)` is when the slowest rank has the first j gradients. Its
# all-reduce ends at `D_k = max(L_k, D_{k-1}) + cost_k`. The iteration ends when the slowest rank has computed,
# packed, launched and copied everything, or at the largest `D_k` plus the copies of bucket k and all after it.
#
# While a collective of cost C runs, computing that takes s times as long loses `(1 - 1 / s) * C`. `W_k` is the sum
# of these delays; they postpone later launches and the end of computing. With slow-downs the recurrence is a
# lower bound of the event replay (`lower_bound` has the argument), and exact as long as no collective outlasts the
# computing beside it. Collectives that share the link count with the part of the link's time that they take.


@dataclass(frozen=True, kw_only=True, eq=False)
class PartitionCosts:
    """Costs of iterations for any buckets, in nanoseconds and bytes."""

    times: PlanTimes  #: prices collectives
    order: tuple[int, ...]  #: parameter indices in the order in which contiguous buckets are cut from them
    ready_ns: Floats  #: when the slowest rank has each gradient; shape [cycles, parameters]
    pack_ns: Floats  #: copying each gradient into its bucket, and the part of compression that grows with its bytes
    copy_ns: Floats  #: copying each average out, likewise
    shared_ns: Floats
    """What both copies cost a gradient in a bucket with others, and are not in the two before; shape [2, parameters].
    Only where a gradient alone is not copied."""
    launch_ns: float  #: computing that each bucket costs
    unpack_ns: float  #: decompression that each bucket costs, without the part for its bytes
    computed_ns: Floats
    """End of the iteration on the slowest rank without communication, packing, launches, copies; shape [cycles]."""
    step_ns: Floats  #: longest time after the backward pass of a rank, with `PlanTimes.updates_ns`; shape [cycles]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """By parameter index."""
        return self.times.recorded.parameters

    @cached_property
    def kinds(self) -> list[tuple[str, int]]:
        """By parameter index: parameters of unequal kinds are in unequal buckets."""
        return [(one.dtype, index if one.sparse else -1) for index, one in enumerate(self.parameters)]

    @cached_property
    def messages(self) -> list[Message | None]:
        """The message of each gradient alone, by parameter index."""
        policy = self.times.policy
        return [policy.hook.message([one], policy.sparse_density) for one in self.parameters]

    @cached_property
    def message_bytes(self) -> Floats:
        """Bytes of first and second messages of each gradient alone; shape [2, parameters]."""
        pairs = [(0, 0) if one is None else (one.first_bytes, one.second_bytes or 0) for one in self.messages]
        return np.array(pairs, float).reshape(-1, 2).T

    def link_of_buckets_ns(self, members: Sequence[Sequence[int]]) -> Floats:
        """Return the time of the link that each bucket takes, undisturbed; shape [buckets]."""
        policy = self.times.policy
        if type(policy.hook) is CommHook and not any(one.sparse for one in self.parameters):  # the usual case, faster
            starts = np.cumsum([0, *map(len, members[:-1])])
            sizes_bytes = self.message_bytes[0][np.fromiter(chain.from_iterable(members), np.int64)]
            return self.link_ns("all_reduce", as_int64(np.add.reduceat(sizes_bytes, starts)))
        costs: Floats = np.zeros(len(members))
        rows: dict[Transport, list[tuple[int, int]]] = {}
        for place, bucket in enumerate(members):
            message = policy.hook.message([self.parameters[index] for index in bucket], policy.sparse_density)
            if message is not None:
                some = rows.setdefault(message.transport, [])
                some.append((place, message.first_bytes))
                if message.second_bytes is not None:
                    some.append((place, message.second_bytes))
        for transport, sent in rows.items():
            places, sizes = np.array(sent, np.int64).T
            np.add.at(costs, places, self.link_ns(transport, sizes))
        return costs

    def link_ns(self, transport: Transport, sizes_bytes: Nanoseconds) -> Floats:
        """Return how long the link is busy with messages of these sizes; shape [sizes].

        Of collectives that run at the same time and share the link, each counts with the least part of its time
        alone that it can take of the link; see `busy_share`.
        """
        costs = self.times.collectives_ns(transport, sizes_bytes).astype(float)
        return costs * self.busy_share(sizes_bytes) if self.times.fabric.concurrency > 1 else costs

    def busy_share(self, sizes_bytes: Nanoseconds) -> Floats:
        """Return, by size, a part of each collective's cost such that these parts never overlap.

        If r collectives of equal weight run, each takes f(r) = 1 + (x - 1) (r - 1) times as long as alone. So with
        parts of at most f(r) / r for every r, they progress at most at the rate of one. f(r) / r is monotone in r.
        With measured weights, a collective counts as one of `Fabric.concurrency`.
        """
        fabric, most = self.times.fabric, self.times.fabric.concurrency
        if any(row.weight != 1 for row in fabric.sharing):
            return np.full(len(sizes_bytes), 1 / most)
        slow = np.array([fabric.link_share(int(size), self.times.world_size).slow_down for size in sizes_bytes])
        shares: Floats = np.minimum(1.0, (1 + np.maximum(0.0, slow - 1) * (most - 1)) / most)
        return shares

    @property
    def lost_share(self) -> float:
        """The computing that a collective delays, as a part of its duration."""
        return 1 - 1 / self.times.changed[1].processor.slow_down

    def recurrence_ns(self, plan: BucketLayout) -> Floats:
        """Return the end of each cycle with these buckets by the recurrence; shape [cycles]."""
        members = np.fromiter(chain.from_iterable(plan), np.int64)
        first = np.cumsum([0, *map(len, plan[:-1])])
        full = np.maximum.reduceat(self.ready_ns[:, members], first, axis=-1)
        shared_ns = self.shared_ns[:, members]
        if shared_ns.any():
            shared_ns = shared_ns * [len(bucket) > 1 for bucket in plan for _ in bucket]
        packs = np.add.reduceat(self.pack_ns[members] + shared_ns[0], first)
        launched = np.maximum.accumulate(full, axis=-1) + packs.cumsum()
        launched += self.launch_ns * np.arange(1, len(plan) + 1)
        copies = np.add.reduceat(self.copy_ns[members] + shared_ns[1], first) + self.unpack_ns
        still = copies[::-1].cumsum()[::-1]
        link = self.link_of_buckets_ns(plan)
        busy, delay = link.cumsum(), (link * self.lost_share).cumsum()
        # `D_k` is the largest `L_j` with its delay, plus the costs of j to k, over all j up to k.
        waits = launched + (delay - link * self.lost_share) - (busy - link)
        done = np.maximum.accumulate(waits, axis=-1) + busy
        last = (done + still).max(axis=-1)
        computed = self.computed_ns + packs.sum() + self.launch_ns * len(plan) + still[0] + delay[-1]
        ends: Floats = np.maximum(computed, last + self.step_ns)
        return ends

    def value_ns(self, plan: BucketLayout) -> int:
        """Return the objective by the recurrence."""
        return self.times.deciding_ns(self.recurrence_ns(plan))


def partition_costs(times: PlanTimes) -> PartitionCosts:
    """Return the costs of the cycles of iterations that decide the objective."""
    policy, (model, fabric) = times.policy, times.changed
    processor = fabric.processor
    hook = policy.hook.charged(processor.hooks, times.world_size)
    count = len(model.parameters)
    alone = tuple((index,) for index in range(count))
    (drawn, start_ns), updates_ns = times.forward_starts_ns(alone), times.updates_ns(alone)
    search_ns = round(processor.search_ns_per_parameter * count) if policy.graph_may_change else 0
    before_ns = start_ns + search_ns
    sizes = np.array(gradient_bytes(model.parameters, policy.sparse_density), np.int64)
    packs = [processor.pack(size) for size in sizes.tolist()]
    copies = [0 if policy.gradient_as_bucket_view else processor.copy_out(size) for size in sizes.tolist()]
    both_ns = np.array([packs, copies], float)
    shared_ns = np.zeros_like(both_ns) if policy.grouping != "fusion" else both_ns
    packed_ns, copied_ns = both_ns - shared_ns
    compress_ns, copy_ns = hook.compress.ns_per_byte * sizes, copied_ns + hook.decompress.ns_per_byte * sizes
    if policy.skip_all_reduce_unused_params:  # a bucket of such parameters alone is packed and not sent
        compress_ns[list(model.never_used)] = copy_ns[list(model.never_used)] = 0
    launch_ns: float = 0 if model.has_communication else processor.launch_on(times.world_size)
    return PartitionCosts(
        times=times,
        order=tuple(rebuild_order(model.ready_order, count)),
        ready_ns=(drawn.ready_ns + before_ns[..., None]).max(axis=1).astype(float),
        pack_ns=packed_ns + compress_ns,
        copy_ns=copy_ns,
        shared_ns=shared_ns,
        launch_ns=launch_ns + hook.compress.fixed_ns,
        unpack_ns=hook.decompress.fixed_ns,
        computed_ns=(before_ns + drawn.backward_end_ns + drawn.step_ns).max(axis=-1) + updates_ns,
        step_ns=drawn.step_ns.max(axis=-1) + updates_ns,
    )


def least_message_bytes(parameter: Parameter, hook: CommHook) -> float:
    """Return bytes that a gradient adds at least to the messages of any bucket; 0 if nothing is known of the hook."""
    if parameter.sparse:
        return 0.0
    if type(hook) is HalfPrecision:
        return least_message_bytes(parameter.model_copy(update={"size_bytes": 2 * prod(parameter.shape)}), hook.of)
    if type(hook) in (CommHook, PowerSGD):
        message = cast("Message", hook.dense_message([parameter]))
        return message.first_bytes + (message.second_bytes or 0)
    if type(hook) is Quantized:
        return prod(parameter.shape)
    return 0.0


def is_additive(hook: CommHook) -> bool:
    """Whether the message of a bucket is the sum of those of its gradients."""
    if type(hook) is HalfPrecision:
        return is_additive(hook.of)
    return type(hook) in (CommHook, PowerSGD)
