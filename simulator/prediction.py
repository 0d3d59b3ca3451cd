"""Prediction: the iteration time of a recorded model for other buckets, bucket orders, networks and world sizes."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np
from pydantic import InstanceOf

from ..reference.files.value_ranges import as_int64
from ..reference.trace import Trace
from .argument_checks import Batches, Measured, Ranks, Stragglers, checked
from .engines.closed_form import Engine, latencies_ns, simulate
from .engines.timeline import EngineInput
from .fabric import Fabric
from .inputs_with_default_costs import Inputs, complete
from .predicted_iteration import Prediction, place_of_median, summarize
from .schedule.policy import Policy, PolicySettings
from .schedule.schedule import ComputeKind, build_join_end, build_schedule
from .step_costs import ScheduleCosts, counted_as_free, price_collectives, price_schedule, rebucketed
from .workload.compute_times import Floats, IterationSampler, Nanoseconds, check_stragglers, recorded_model
from .workload.trace_synthesis import with_batch
from .workload.variation import RECORDED, Variation

COMPUTATION: tuple[ComputeKind, ...] = ("unsynchronized", "forward", "backward", "step")
"""Computing steps of training without data parallelism."""


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
    **settings: Unpack[PolicySettings],
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
    check_stragglers(world_size, stragglers)
    how: dict[str, Any] = {"stragglers": stragglers, "inputs": inputs, "measured": measured, "settings": settings}
    completed = complete(trace, fabric, policy=policy, variation=variation, assume=assume, **how)
    return System(completed, engine=engine).at(world_size)


@dataclass(frozen=True)
class System:
    """A model on GPUs of one kind and one network, whose iterations are predicted for any number of ranks.

    Each prediction is made once, because limits, needs and changes share several.
    """

    inputs: Inputs  #: what predictions compute from, as long as nothing is changed
    name: str = ""  #: its name
    rebatched: Callable[[float], Trace] | None = None
    """Returns the trace with a multiple of its batch. None: see `trace_synthesis.with_batch`."""
    engine: Engine = "auto"  #: as for `predict`
    _known: list[tuple[tuple[int, Inputs], Prediction]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def with_batch(self, multiple: float) -> Trace | None:
        """Return the trace with this multiple of the batch; None: it was recorded with communication."""
        trace = self.inputs.trace
        if self.rebatched is not None:
            return self.rebatched(multiple)
        return with_batch(trace, multiple) if trace.workload.source == "module" else None

    def at(self, world_size: int, changed: Inputs | None = None) -> Prediction:
        """Predict an iteration, of changed inputs too; stragglers whose ranks do not exist are left out.

        Measured iterations are those of the unchanged system. They correct the predictions of changed ones too.
        """
        measured = self.inputs.measured
        prediction = self._predicted(world_size, self.inputs if changed is None else changed)
        if not measured:
            return prediction
        of_runs = self.inputs._replace(policy=self.inputs.measured_policy, stragglers=())
        few = {ranks: self._predicted(ranks, of_runs) for ranks in {1, world_size, *measured}}
        return prediction.anchored(world_size, measured, few)

    def _predicted(self, world_size: int, inputs: Inputs) -> Prediction:
        slow = tuple(one for one in inputs.stragglers if one.rank is None or one.rank < world_size)
        asked = world_size, inputs._replace(stragglers=slow)
        for about, known in self._known:  # fabrics have no hash
            if about == asked:
                return known
        made = predicted(asked[1], world_size, self.engine)
        self._known.append((asked, made))
        return made


def predicted(inputs: Inputs, world_size: int, engine: Engine = "auto") -> Prediction:
    """Predict an iteration from complete inputs, without measured iterations.

    All iterations are simulated, and the median iteration again with every uncertain cost at the low and at the high
    end of its error band. The variation of the iterations and the errors of the costs are independent, so their
    distances from the median are added in quadrature. A measured spread of iterations takes the place of both. The
    ends of the error bands are always simulated with the engine "auto".
    """
    trace, policy, joins = inputs.trace, inputs.policy, inputs.batches is not None
    model = recorded_model(trace, **policy.recorded_as(world_size))
    schedule = build_schedule(policy, model, joins=joins, world_size=world_size)
    model, charged = rebucketed(trace, model, inputs.fabric, schedule.buckets)
    costs = price_schedule(schedule, charged, policy, world_size)
    sampler = IterationSampler(
        *(model.compute_times, world_size, inputs.variation, inputs.stragglers, inputs.batches),
        sync_every=policy.sync_every,
        compute_bounds=trace.workload.compute_bounds,
    )
    distinct, place_of_cycle = sampler.distinct()
    batches = []  # duration, computation alone and duration without overlap of each iteration
    for drawn in sampler.in_batches(distinct.tolist(), len(schedule.instructions)):
        alone_ns, batch = sampler.alone_ns(drawn), costs.engine_input(sampler, drawn)
        serial_ns = no_overlap_ns(batch.duration_ns, batch.cost_ns)
        batches.append(np.stack([latencies_ns(batch, engine), alone_ns, serial_ns]))
    times_ns = np.concatenate(batches, axis=-1)[:, place_of_cycle] / sampler.sync_every

    # Drawn again, because keeping what all batches drew would take memory without a limit.
    place = place_of_median(times_ns[0])
    median, median_ns = costs.engine_input(sampler, sampler.draw([place]), 0), times_ns[0, place]
    bands = _error_bands(median, costs, sampler)
    ends = EngineInput.stack([median, *(end for both in bands.values() for end in both)])
    ends_ns = latencies_ns(ends)[1:].reshape(-1, 2) / sampler.sync_every
    causes = {
        cause: (median_ns - low_ns, high_ns - median_ns)
        for cause, (low_ns, high_ns) in zip(bands, ends_ns, strict=True)
    }
    if costs.unexplained:
        causes["unexplained"] = median_ns - median_ns / (1 + costs.unexplained), median_ns * costs.unexplained
    end = price_collectives(build_join_end(policy, model), charged, world_size) if joins else None
    prediction = Prediction(
        **summarize(times_ns, causes=causes),
        median=median if engine == "auto" else simulate(median, engine),
        buckets=schedule.buckets,
        epoch_end_ns=0 if end is None else simulate(end).iteration_ns,
        counted_as_free=counted_as_free(policy, inputs.fabric),
        assumed=(*inputs.assumed, *costs.assumed),
        compute_errors=sampler.compute_errors,
    )
    return prediction.with_spread(costs.spread) if costs.spread else prediction


def no_overlap_ns(duration_ns: Nanoseconds, cost_ns: Nanoseconds) -> Nanoseconds:
    """Return the duration of one iteration, or of many, without overlap; arguments as in `EngineInput`."""
    longest: Nanoseconds = duration_ns.sum(axis=-1).max(axis=-1) + cost_ns.sum(axis=-1)
    return longest


def _error_bands(
    median: EngineInput, costs: ScheduleCosts, sampler: IterationSampler
) -> dict[str, tuple[EngineInput, EngineInput]]:
    """Return the median iteration with one uncertain cost at the low, and at the high, end of its error band.

    Costs are left out if their band has no width.
    """
    kinds = [step.kind for step in median.schedule.steps]

    def with_collectives(factors: Floats) -> EngineInput:
        return replace(median, cost_ns=as_int64(median.cost_ns * factors))

    def with_steps(of_kinds: Collection[ComputeKind], factor: float | Floats) -> EngineInput:
        factors: Floats = np.where([kind in of_kinds for kind in kinds], factor, 1.0)
        return replace(median, duration_ns=as_int64(median.duration_ns * factors))

    bands = {}
    if costs.relative_errors.any():
        faster, slower = costs.relative_errors
        bands["collectives"] = with_collectives(1 / (1 + faster)), with_collectives(1 + slower)
    least, most = costs.slow_down_bounds
    if least != most:
        bands["slow-downs"] = replace(median, slow_down=least), replace(median, slow_down=most)
    for name, (of_kinds, error) in costs.step_errors.items():
        if error:
            bands[name] = with_steps(of_kinds, 1 / (1 + error)), with_steps(of_kinds, 1 + error)
    for name, ends in sampler.error_bands.items():
        low, high = (with_steps(COMPUTATION, factors[:, None]) for factors in ends)
        bands[name] = low, high
    return bands
