"""Part (d): training under torch's DDP on the GPUs of one node, predicted from the speed of one of them.

What counts is the ratio of an iteration on several GPUs to one on one GPU. The inputs are the speed on one GPU
without data parallelism, the model, and data sheets of GPU and links. All other costs are the usual ones of a GPU, as
`ddplab predict` assumes them.
"""

from ddplab.simulator import predict
from ddplab.simulator.baseline_predictions import BASELINES, baselines_ns
from ddplab.simulator.inputs_with_default_costs import assume_gpu
from ddplab.simulator.workload.variation import Variation

from .cases import MeasuredScaling, OneGpuRun, ScalingCase, ScalingInputs
from .comparison import CaseScore, Comparison, Stated, times_of
from .published_nodes import device_of, fabric_of_node, trace_of_model


def score(case: ScalingCase) -> CaseScore:
    """One row for each measured number of GPUs."""
    runs = {run.name: run for run in case.inputs.one_gpu}
    return CaseScore(tuple(_compare(case, runs[row.run], row) for row in case.truth))


def predict_ns(inputs: ScalingInputs, run: OneGpuRun, gpus: int) -> dict[str, float]:
    """Nanoseconds of an iteration on `gpus` GPUs, by method."""
    trace, links, settings = stated(inputs, run, gpus)
    fabric, variation, _ = assume_gpu(trace, links, Variation())
    predicted = predict(trace, fabric, world_size=gpus, variation=variation, **settings)
    baselines = baselines_ns(trace, fabric, world_size=gpus, **settings)
    return {**times_of(predicted), **baselines, "perfect scaling": one_gpu_ns(run)}


def stated(inputs: ScalingInputs, run: OneGpuRun, gpus: int) -> Stated:
    """The iteration on one GPU, the links of its node, and torch's default buckets."""
    node = inputs.node(run.node)
    trace = trace_of_model(run.model, device_of(node, run.tflops), one_gpu_ns(run))
    return Stated(trace, fabric_of_node(node, inputs, gpus), {"bucket_cap_mb": None})


def one_gpu_ns(run: OneGpuRun) -> float:
    """Nanoseconds of an iteration on one GPU."""
    return run.samples / run.per_s * 1e9


def _compare(case: ScalingCase, run: OneGpuRun, row: MeasuredScaling) -> Comparison:
    methods = predict_ns(case.inputs, run, row.gpus)
    return Comparison(
        part="d",
        case=case.name,
        group=run.name,
        label=f"{row.gpus} GPUs",
        calibrated_from="1 GPU",
        predicted_ns=methods["predicted"],
        measured_ns=run.samples * row.gpus / row.per_s * 1e9,
        baselines_ns={name: methods[name] for name in BASELINES},
        interval_ns=(methods["low"], methods["high"]),
    )
