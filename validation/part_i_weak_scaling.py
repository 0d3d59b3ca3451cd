"""Part (i): training on several GPUs and nodes, predicted from what a buyer knows, as by the commands.

The inputs are the iteration on one GPU without data parallelism, the model, the GPU's data sheet and the rates of the
links. All other costs are those that `ddplab predict` assumes for a GPU.
"""

from statistics import median

from simulator import Fabric, predict
from simulator.baseline_predictions import BASELINES, baselines_ns
from simulator.fabric import topology_of
from simulator.workload.compute_times import Variation
from simulator.workload.default_gpu_costs import assume_gpu
from simulator.workload.roofline import Device

from .cases import MeasuredWeakScaling, WeakScalingCase, WeakScalingInputs, WeakScalingRun
from .comparison import CaseScore, Comparison
from .published_nodes import trace_of_model


def score(case: WeakScalingCase) -> CaseScore:
    """One row for each run and number of GPUs."""
    runs = {run.name: run for run in case.inputs.runs}
    return CaseScore(tuple(_compare(case, runs[row.run], row) for row in case.truth))


def predict_ns(inputs: WeakScalingInputs, run: WeakScalingRun, gpus: int) -> tuple[dict[str, float], tuple[int, int]]:
    """Nanoseconds of an iteration on `gpus` GPUs by method, and the predicted interval."""
    device = Device(
        name=inputs.gpu,
        flops_per_s=run.tflops * 1e12,
        bytes_per_s=inputs.memory_gb_per_s * 1e9,
        source=inputs.topology.source,
    )
    trace = trace_of_model(run.model, device, run.ms * 1e6, run.optimizer_ms and run.optimizer_ms * 1e6)
    links = Fabric.from_topology(topology_of(inputs.topology))
    fabric, variation, _ = assume_gpu(trace, links, Variation())
    predicted = predict(trace, fabric, world_size=gpus, variation=variation, bucket_cap_mb=run.bucket_mb)
    baselines = baselines_ns(trace, fabric, world_size=gpus, bucket_cap_mb=run.bucket_mb)
    methods = {"predicted": predicted.iteration_ns, **baselines, "perfect scaling": run.ms * 1e6}
    return methods, predicted.interval_ns


def _compare(case: WeakScalingCase, run: WeakScalingRun, row: MeasuredWeakScaling) -> Comparison:
    methods, interval = predict_ns(case.inputs, run, row.gpus)
    levels = case.inputs.topology.levels.values()
    node = next(level.members for level in levels if level.of is None) or row.gpus
    return Comparison(
        part="i",
        case=case.name,
        group=run.name,
        label=f"{row.gpus} GPUs" + (f", {row.gpus // node} nodes" if row.gpus > node else ""),
        calibrated_from="1 GPU",
        predicted_ns=methods["predicted"],
        measured_ns=median(row.ms) * 1e6,
        baselines_ns={name: methods[name] for name in BASELINES},
        interval_ns=interval,
        several_nodes=row.gpus > node,
    )
