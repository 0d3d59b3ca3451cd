"""Part (b): iterations of torch's DDP on several GPUs, predicted from iterations on one GPU.

The inputs are the recorded ready times, scaled to the iteration of DDP on one GPU (with copies and hooks, without
communication), a table of all-reduces, the slow-down of computation beside a collective, and the spread of the speeds
of equal GPUs. All ranks wait for the slowest. The errors of these inputs are the usual ones of a GPU.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddplab.reference.bucketing import DEFAULT_FIRST_BUCKET_MB, MIB, BucketAssignment, initial_buckets
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, predict
from ddplab.simulator.baseline_predictions import BASELINES, baselines_ns
from ddplab.simulator.fabric import Level, Processor, Topology
from ddplab.simulator.inputs_with_default_costs import JITTER, SLOW_DOWN_ERROR, UNEXPLAINED
from ddplab.simulator.workload.variation import Variation

from .cases import IterationInputs, IterationsCase, Link, MeasuredIteration, Model
from .comparison import (
    FEWER_BUCKETS,
    RANKING_BASELINES,
    CaseScore,
    Comparison,
    FastestChoice,
    Stated,
    TimesByMethod,
    fastest,
    times_of,
)
from .part_a_all_reduces import fabric_of
from .ready_times import read_gradients, repeat_block, trace_of


class Cell(NamedTuple):
    """One configuration to predict."""

    model: str
    bucket_mb: float
    gpus: int


def score(case: IterationsCase) -> CaseScore:
    """One row for each cell, and the faster bucket cap for each model and number of GPUs."""
    predicted = predict_ns(case.inputs, [_cell(row) for row in case.truth])
    rows = [_compare(case, truth, predicted[_cell(truth)]) for truth in case.truth]
    return CaseScore(tuple(rows), tuple(_fastest_choices(case, predicted)))


def predict_ns(inputs: IterationInputs, cells: Sequence[Cell]) -> dict[Cell, dict[str, float]]:
    """Nanoseconds of an iteration in each cell, by method."""
    fabric = fabric_with(inputs)
    models = {model.name: model for model in inputs.models}
    return {cell: _predict_cell(inputs, fabric, models[cell.model], cell) for cell in cells}


def _predict_cell(inputs: IterationInputs, fabric: Fabric, model: Model, cell: Cell) -> dict[str, float]:
    trace, fabric, settings = stated(inputs, fabric, model, cell.bucket_mb)
    processor = Processor(
        slow_down=inputs.compute_slowdown.value, slow_down_error=SLOW_DOWN_ERROR, unexplained=UNEXPLAINED
    )
    slowed = fabric.model_copy(update={"processor": processor})
    variation = Variation(kind="slowest", device_spread=inputs.gpu_spread.value, jitter=JITTER)
    predicted = predict(trace, slowed, world_size=cell.gpus, variation=variation, **settings)
    baselines = baselines_ns(trace, slowed, world_size=cell.gpus, **settings)
    return {
        **times_of(predicted),
        **baselines,
        "perfect scaling": iteration_ns(inputs.batch, model.no_ddp_per_s),
        FEWER_BUCKETS: len(settings["plan"]),
    }


def stated(inputs: IterationInputs, fabric: Fabric, model: Model, bucket_mb: float) -> Stated:
    """The iteration of DDP on one GPU, the network, and the buckets."""
    one_gpu_per_s = {one.bucket_mb: one.per_s for one in model.one_gpu}[bucket_mb]
    trace = _trace(model, iteration_ns(inputs.batch, one_gpu_per_s))
    return Stated(trace, fabric, {"plan": plan_of(trace, bucket_mb), "broadcast_buffers": False})


def iteration_ns(batch: int, per_s: int) -> float:
    """Midpoint of the iteration times that print as `per_s` examples a second, rounded down to a whole number."""
    return batch / (per_s + 0.5) * 1e9


def plan_of(trace: Trace, bucket_mb: float) -> BucketAssignment:
    """Buckets of torch 1.4: assigned at construction, never rebuilt (torch/nn/parallel/distributed.py)."""
    return initial_buckets(trace.sizes_bytes, [DEFAULT_FIRST_BUCKET_MB * MIB, round(bucket_mb * MIB)])


def fabric_with(inputs: IterationInputs) -> Fabric:
    """The measured tables, with links for all other numbers of GPUs."""
    links = topology(inputs.links)
    if not inputs.tables:
        return Fabric(topology=links)
    return fabric_of(inputs.tables).model_copy(update={"topology": links})


def topology(links: Sequence[Link]) -> Topology | None:
    """The simulator's topology of these links; None without links."""
    if not links:
        return None
    levels = tuple(
        Level(
            name=link.name,
            members=link.members,
            latency_ns=round(link.latency_us * 1000),
            bytes_per_s=link.gb_per_s * 1e9,
        )
        for link in links
    )
    return Topology(levels=levels)


def _trace(model: Model, duration_ns: float) -> Trace:
    gradients = read_gradients(model.gradients)
    return trace_of(repeat_block(gradients, model.repeat) if model.repeat else gradients, duration_ns)


def _cell(row: MeasuredIteration) -> Cell:
    return Cell(row.model, row.bucket_mb, row.gpus)


def _compare(case: IterationsCase, truth: MeasuredIteration, by_method: Mapping[str, float]) -> Comparison:
    return Comparison(
        part="b",
        case=case.name,
        group=truth.model,
        label=f"{truth.bucket_mb:g} MB, {truth.gpus} GPUs",
        calibrated_from="1 GPU",
        predicted_ns=by_method["predicted"],
        measured_ns=iteration_ns(case.inputs.batch, truth.per_s),
        baselines_ns={name: by_method[name] for name in BASELINES},
        interval_ns=(by_method["low"], by_method["high"]),
        several_nodes=any(truth.gpus > link.members for link in case.inputs.links if link.members),
    )


def _fastest_choices(case: IterationsCase, predicted: Mapping[Cell, Mapping[str, float]]) -> list[FastestChoice]:
    """One choice for each model and number of GPUs; a tie if both published whole numbers are equal."""
    measured: dict[tuple[str, int], dict[float, int]] = {}
    for row in case.truth:
        measured.setdefault((row.model, row.gpus), {})[row.bucket_mb] = row.per_s
    choices = []
    for (model, gpus), per_s in measured.items():
        if len(per_s) < 2:
            continue
        times: TimesByMethod = {f"{cap:g} MB": predicted[Cell(model, cap, gpus)] for cap in per_s}
        first, second = sorted(per_s, key=lambda bucket_mb: -per_s[bucket_mb])[:2]
        choices.append(
            FastestChoice(
                part="b",
                case=case.name,
                label=f"{model}, {gpus} GPUs",
                predicted=fastest(times, "predicted"),
                measured=f"{first:g} MB",
                lead=per_s[first] / per_s[second] - 1,
                is_tie=per_s[first] == per_s[second],
                baselines={name: fastest(times, name) for name in RANKING_BASELINES},
            )
        )
    return choices
