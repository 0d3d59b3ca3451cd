"""Prediction: the iteration time of a recorded model for other buckets, bucket orders, networks and world sizes."""

from functools import partial
from typing import Any

from pydantic import InstanceOf

from ..reference.trace import Trace
from .argument_checks import Batches, Measured, Ranks, Stragglers, checked
from .engines.closed_form import Engine, simulate
from .fabric import Fabric
from .interval import simulate_many
from .predicted_iteration import Prediction
from .schedule.policy import Policy
from .schedule.schedule import buckets_of, build_join_end, build_schedule
from .step_costs import counted_as_free, price_collectives, price_schedule, rebucketed
from .workload.compute_times import IterationSampler, recorded_model
from .workload.default_gpu_costs import completed
from .workload.variation import RECORDED, Variation


@checked
def predict(
    trace: InstanceOf[Trace],
    fabric: InstanceOf[Fabric],
    *,
    world_size: Ranks,
    policy: InstanceOf[Policy] | None = None,
    variation: InstanceOf[Variation] = RECORDED,
    stragglers: Stragglers = (),
    inputs: Batches | None = None,
    measured: Measured | None = None,
    assume: bool = True,
    engine: Engine = "auto",
    **settings: Any,
) -> Prediction:
    """Predict the time of a training iteration.

    Args:
        trace: Recorded iterations, preferably of a plain module without communication. The times of a trace recorded
            with communication already include packing, broadcasts of buffers, the launches of its buckets and the
            slow-down of computation, so these costs are not added again; see `rebucketed` for other buckets. If the
            trace has fewer ranks than `world_size`, the recorded ranks are repeated in turn.
        fabric: Costs of collectives, and processor costs.
        world_size: Number of ranks.
        policy: Settings of the reducer and how the training script uses it. None: given by `settings`.
        variation: How the simulated iterations are generated from the recorded ones.
        stragglers: Slow ranks. (A slow link is a setting of the fabric: `slow_link`.)
        inputs: Number of batches of each rank under Join; the simulated iterations are then those of one epoch.
        measured: Median iteration times that were measured with these settings on other numbers of ranks, in
            nanoseconds. They correct and narrow the prediction; see `Prediction.anchors`.
        assume: Whether costs of a GPU that the fabric and the variation do not have take their usual values, see
            `assume_gpu`. False: they count as zero.
        engine: "events", the event replay, which defines the result; "closed_form", which gives the same result
            faster but requires constant speeds; or "auto", the closed form where it applies, else the event replay.
        settings: Fields of `Policy`, as an alternative to `policy`: bucket_cap_mb (None, as in torch: 25, and 1 for
            the first bucket), bucket_cap_mb_list, plan, grouping="buckets", reduce_dtype, order="ready",
            broadcast_buffers=True, find_unused_parameters, static_graph, skip_all_reduce_unused_params,
            gradient_as_bucket_view, hook="none", sparse_density=1.0, zero, cuda_graph, sync_every=1 and
            phase="steady".

    Raises:
        ValueError: An argument is invalid, or does not fit the trace, the fabric or another argument; the message
            names the argument.
        TypeError: A keyword argument is not a field of `Policy`.
    """
    joins = inputs is not None
    if joins and measured:
        raise ValueError("measured: expected none with inputs, because an epoch of Join has no steady iteration")
    policy = Policy.given(policy, settings, joins=joins)
    fabric, variation, assumed = completed(trace, fabric, variation, assume=assume, cuda_graph=policy.cuda_graph)
    model = recorded_model(trace, **policy.recorded_as(world_size))
    model, charged = rebucketed(trace, model, fabric, buckets_of(policy, model))
    sampler = IterationSampler(
        *(model.compute_times, world_size, variation, stragglers, inputs),
        sync_every=policy.sync_every,
        compute_bounds=trace.workload.compute_bounds,
    )
    schedule = build_schedule(policy, model, joins=joins, world_size=world_size)
    costs = price_schedule(schedule, charged, policy, world_size)
    end = price_collectives(build_join_end(policy, model), charged, world_size) if joins else None
    figures, median = simulate_many(costs, sampler, engine)
    prediction = Prediction(
        **figures,
        timeline=simulate(median, engine),
        buckets=schedule.buckets,
        epoch_end_ns=0 if end is None else simulate(end).iteration_ns,
        counted_as_free=counted_as_free(policy, fabric),
        assumed=(*assumed, *costs.assumed),
        compute_errors=sampler.compute_errors,
    )
    if not measured:
        return prediction
    on_few = partial(predict, trace, fabric, policy=policy, variation=variation, assume=False, engine=engine)
    return prediction.anchored(world_size, measured, {ranks: on_few(world_size=ranks) for ranks in {1, *measured}})
