"""Plan times: the iteration time of any buckets, as `predict` computes it, without interval and timeline."""

from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np

from ...reference.files.value_ranges import as_int64
from ...reference.trace import BucketLayout
from ..engines.closed_form import latencies_ns, solve
from ..fabric import Fabric, LinkShare
from ..predicted_iteration import place_of_median
from ..prediction import CELLS
from ..prediction_inputs import Inputs
from ..schedule.comm_hook_messages import Transport
from ..schedule.schedule import Compute, build_schedule
from ..step_costs import ScheduleCosts, charged_fabric, price_schedule, rebucketed
from ..workload.compute_times import CycleTimes, Floats, IterationSampler, Nanoseconds, RecordedModel, recorded_model

Objective = Literal["median", "mean", "p95", "p99", "worst_case"]
"""What should be short: the median, mean, 95th or 99th percentile of the iterations, or the median iteration with all
costs of communication at the upper end of their error bands."""
FORWARD = Compute("forward")
QUANTILES = {"p95": 0.95, "p99": 0.99}


class PlanTimes:
    """Iteration times of one model on one fabric, for any buckets.

    Args:
        inputs: Complete inputs of predictions; the buckets that their policy gives are not used.
        world_size: Number of ranks.
        objective: What `value_ns` returns.

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
            dearer = as_int64(costs.untimed.cost_ns * (1 + costs.relative_errors))
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
        width = max(sampler.parameters, len(costs.untimed.schedule.instructions))
        at_a_time = max(1, CELLS // (len(sampler.ranks) * width))
        batches = [
            latencies_ns(costs.engine_input(sampler, sampler.draw(cycles[first : first + at_a_time])))
            for first in range(0, len(cycles), at_a_time)
        ]
        self._known[plan] = np.concatenate(batches)
        return self._known[plan]

    def value_ns(self, plan: BucketLayout) -> int:
        """Return the objective with these buckets; equal to that of `predict`."""
        return self.deciding_ns(self.cycles_ns(plan))

    def _deciding(self) -> tuple[list[int], bool]:
        distinct, place = self.sampler.distinct()
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
        samples, place = cycles_ns / self.policy.sync_every, self.sampler.distinct()[1]
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
            return as_int64(costs_ns * (1 + self.fabric.relative_errors(sizes_bytes, self.world_size)))
        return costs_ns

    def forward_starts_ns(self, plan: BucketLayout) -> tuple[CycleTimes, Nanoseconds]:
        """Return the `deciding_cycles`, and when each rank starts its last forward pass if nothing is slowed down.

        Returns:
            The cycles, and the starts; shape [cycles, simulated ranks].
        """
        sampler = self._sampler(self.changed[0])
        times = sampler.draw(self.deciding_cycles)
        costs = self.costs(plan)
        engine_input = costs.engine_input(sampler, times)
        schedule = engine_input.schedule
        first = replace(schedule, instructions=schedule.instructions[: schedule.instructions.index(FORWARD) + 1])
        shares = (LinkShare(),) * len(schedule.collectives)
        timeline = solve(replace(engine_input, schedule=first, sharing=shares, slow_down=1.0))
        return times, timeline.end_ns[..., -1] - engine_input.duration_ns[..., schedule.steps.index(FORWARD)]


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
