"""Part (i): training on several GPUs and nodes, predicted from what a buyer knows, as by the commands.

The inputs are the iteration on one GPU without data parallelism (or else on the fewest published), the model, the
GPU's data sheet and the rates of the links. All other costs are those that `ddplab predict` assumes for a GPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, Prediction, predict
from ddplab.simulator.baseline_predictions import BASELINES, baselines_ns
from ddplab.simulator.fabric import topology_of
from ddplab.simulator.fabric.cost_curves import BAND
from ddplab.simulator.inputs_with_default_costs import STALL_NS, assume_gpu
from ddplab.simulator.workload.roofline import Device
from ddplab.simulator.workload.variation import Variation

from .cases import MeasuredWeakScaling, WeakScalingCase, WeakScalingInputs, WeakScalingRun
from .comparison import CaseScore, Comparison, Stated, times_of, weighted_quantile
from .published_nodes import trace_of_model


def score(case: WeakScalingCase, *, stall_ns: int | None = None) -> CaseScore:
    """One row for each run and number of GPUs; `stall_ns` replaces the default stall of each bucket."""
    runs = {run.name: run for run in case.inputs.runs}
    return CaseScore(tuple(_compare(case, runs[row.run], row, stall_ns) for row in case.truth))


def predict_ns(
    inputs: WeakScalingInputs, run: WeakScalingRun, gpus: int, *, stall_ns: int | None = None
) -> dict[str, float]:
    """Nanoseconds of an iteration on `gpus` GPUs, and of both ends of the predicted interval, by method.

    If the known iteration is that of several GPUs, each method predicts the ratio to this iteration.
    """
    methods = _from_one_gpu(inputs, run, gpus, stall_ns)
    if run.gpus == 1:
        return methods
    known = _from_one_gpu(inputs, run, run.gpus, stall_ns)
    known |= {"low": known["predicted"], "high": known["predicted"]}
    return {method: ns * run.ms * 1e6 / known[method] for method, ns in methods.items()}


def _from_one_gpu(
    inputs: WeakScalingInputs, run: WeakScalingRun, gpus: int, stall_ns: int | None
) -> dict[str, float]:
    trace, fabric, _, settings = _asked(inputs, run, gpus, stall_ns)
    predicted = _predicted(inputs, run, gpus, stall_ns)
    return {**times_of(predicted), **baselines_ns(trace, fabric, **settings), "perfect scaling": run.ms * 1e6}


def _predicted(inputs: WeakScalingInputs, run: WeakScalingRun, gpus: int, stall_ns: int | None = None) -> Prediction:
    return _predicted_once(inputs.model_dump_json(), run, gpus, stall_ns)


@cache
def _predicted_once(inputs_json: str, run: WeakScalingRun, gpus: int, stall_ns: int | None) -> Prediction:
    """Predict; `score`, `anchored` and `leave_one_out` share the result. Only the JSON of the inputs is hashable."""
    trace, fabric, variation, settings = _asked(
        WeakScalingInputs.model_validate_json(inputs_json), run, gpus, stall_ns
    )
    return predict(trace, fabric, variation=variation, **settings)


def _asked(
    inputs: WeakScalingInputs, run: WeakScalingRun, gpus: int, stall_ns: int | None
) -> tuple[Trace, Fabric, Variation, dict[str, Any]]:
    """Return the arguments of `predict`; the last are the settings."""
    trace, links, settings = stated(inputs, run)
    fabric, variation, _ = assume_gpu(trace, links, Variation())
    if stall_ns is not None:
        fabric = fabric.with_processor(stall_ns=stall_ns)
    return trace, fabric, variation, {"world_size": gpus, **settings}


def stated(inputs: WeakScalingInputs, run: WeakScalingRun) -> Stated:
    """The known iteration as computation of one GPU, the links, and how the training is made data-parallel."""
    device = Device(
        name=inputs.gpu,
        flops_per_s=run.tflops * 1e12,
        bytes_per_s=inputs.memory_gb_per_s * 1e9,
    )
    trace = trace_of_model(run.model, device, run.ms * 1e6, run.optimizer_ms and run.optimizer_ms * 1e6)
    links = Fabric.from_topology(topology_of(inputs.topology))
    return Stated(trace, links, {"bucket_cap_mb": run.bucket_mb, "broadcast_buffers": run.broadcast_buffers})


def _compare(
    case: WeakScalingCase, run: WeakScalingRun, row: MeasuredWeakScaling, stall_ns: int | None
) -> Comparison:
    methods = predict_ns(case.inputs, run, row.gpus, stall_ns=stall_ns)
    levels = case.inputs.topology.levels.values()
    node = next(level.members for level in levels if level.of is None) or row.gpus
    return Comparison(
        part="i",
        case=case.name,
        group=run.name,
        label=f"{row.gpus} GPUs" + (f", {row.gpus // node} nodes" if row.gpus > node else ""),
        calibrated_from=f"{run.gpus} GPU" + ("s" if run.gpus > 1 else ""),
        predicted_ns=methods["predicted"],
        measured_ns=median(row.ms) * 1e6,
        baselines_ns={name: methods[name] for name in BASELINES},
        interval_ns=(methods["low"], methods["high"]),
        several_nodes=row.gpus > node,
        added_later=case.added_later,
    )


ANCHORS = 2
"""Numbers of GPUs of a run, the smallest ones, whose iterations anchor its other predictions."""


def anchored(case: WeakScalingCase, rows: Sequence[Comparison]) -> list[tuple[Comparison, Comparison]]:
    """Return the rows of more GPUs, without and with the iterations on the two smallest numbers as measured times.

    Args:
        case: The case; nothing is returned if its known iterations are those of several GPUs.
        rows: Its rows in the score, in the order of its measurements.
    """
    runs = {run.name: run for run in case.inputs.runs if run.gpus == 1}
    pairs = []
    for name, run in runs.items():
        of_run = [(one.gpus, row) for one, row in zip(case.truth, rows, strict=True) if one.run == name]
        anchors = sorted(of_run, key=lambda pair: pair[0])[:ANCHORS]
        measured = {gpus: round(row.measured_ns) for gpus, row in anchors}
        larger = [(gpus, row) for gpus, row in of_run if gpus not in measured]
        on_few = {gpus: _predicted(case.inputs, run, gpus) for gpus in measured if larger}
        for gpus, row in larger:
            again = _predicted(case.inputs, run, gpus).anchored(gpus, measured, on_few)
            pairs.append((row, replace(row, predicted_ns=again.iteration_ns, interval_ns=again.interval_ns)))
    return pairs


class LeftOut(NamedTuple):
    """One system, predicted with constants that were calibrated on all other systems.

    Attributes:
        rows: Its rows in the score.
        again: The same rows with the constants of the others.
        stall_ns: Computation that each bucket holds up per doubling of the GPUs: least squares of the others' errors.
        stretch: Factor on the interval with which it contains nine in ten of the others' measurements.
    """

    rows: Sequence[Comparison]
    again: Sequence[Comparison]
    stall_ns: float
    stretch: float


class _System(NamedTuple):
    rows: Sequence[Comparison]
    without_ns: Sequence[float]  # predictions without any stall, by row

    def again(self, stall: float, stretch: float = 1.0) -> list[Comparison]:
        """The rows with another stall, in multiples of the default one, and another width of the interval."""
        changed = []
        for row, without_ns in zip(self.rows, self.without_ns, strict=True):
            assert row.interval_ns is not None
            predicted_ns = without_ns + stall * (row.predicted_ns - without_ns)
            low_ns, high_ns = (predicted_ns + stretch * (end_ns - row.predicted_ns) for end_ns in row.interval_ns)
            changed.append(replace(row, predicted_ns=predicted_ns, interval_ns=(low_ns, high_ns)))
        return changed


def leave_one_out(cases: Sequence[WeakScalingCase], rows: Sequence[Comparison]) -> list[LeftOut]:
    """Predict each system with the stall and the width of intervals that fit the other systems, of equal weight.

    A predicted iteration is linear in the stall, so predictions without any stall give those with every stall; the
    distances to the ends of an interval are those of the score, times one factor. Cases whose known iteration is that
    of several GPUs take no part. A single case gives no result.
    """
    systems = [
        _System(
            [row for row in rows if row.part == "i" and row.case == case.name],
            [
                _predicted(case.inputs, runs[row.run], row.gpus, 0).iteration_ns
                for runs in [{run.name: run for run in case.inputs.runs}]
                for row in case.truth
            ],
        )
        for case in cases
        if all(run.gpus == 1 for run in case.inputs.runs)
    ]
    return [
        _leave_out(system, [one for one in systems if one is not system]) for system in systems if len(systems) > 1
    ]


def _leave_out(system: _System, others: Sequence[_System]) -> LeftOut:
    weights = [1 / len(other.rows) for other in others for _ in other.rows]
    covariance = variance = 0.0
    for other in others:
        for row, without_ns in zip(other.rows, other.without_ns, strict=True):
            gain = (row.predicted_ns - without_ns) / row.measured_ns
            covariance += gain * (1 - without_ns / row.measured_ns) / len(other.rows)
            variance += gain**2 / len(other.rows)
    stall = max(0.0, covariance / variance)
    distances = [_distance(row) for other in others for row in other.again(stall)]
    stretch = weighted_quantile(distances, weights, BAND)
    return LeftOut(system.rows, system.again(stall, stretch), stall * STALL_NS, stretch)


def _distance(row: Comparison) -> float:
    """Return the distance of the measurement to the prediction, where that of the interval's end is 1."""
    assert row.interval_ns is not None
    end_ns = row.interval_ns[row.measured_ns > row.predicted_ns]
    return (row.measured_ns - row.predicted_ns) / (end_ns - row.predicted_ns)
