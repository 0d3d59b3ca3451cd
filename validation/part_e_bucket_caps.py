"""Part (e): how the bucket cap changes the iteration time of published reducers on two GPUs.

A reducer's iteration without communication is an input. Buckets follow the reducer's own rule. What counts is the
sign of the effect: which of two caps is faster, wherever the difference exceeds the published spread.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

from ddplab.reference.bucketing import MIB, BucketAssignment, assign_buckets, bucket_caps
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, predict
from ddplab.simulator.baseline_predictions import BASELINES, baselines_ns
from ddplab.simulator.inputs_with_default_costs import assume_gpu
from ddplab.simulator.workload.variation import Variation

from .cases import BucketCapsCase, BucketCapsInputs, BucketRule, MeasuredCap
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
from .published_nodes import device_of, fabric_of_node, trace_of_model

UNPUBLISHED_SPREAD = 0.01
"""Least relative difference of two caps that counts if the spread was not published."""


def score(case: BucketCapsCase) -> CaseScore:
    """One row for each reducer and cap, and one choice for each pair of caps."""
    rows, choices = [], []
    for reducer in case.inputs.reducers:
        measured = [row for row in case.truth if row.reducer == reducer.name]
        predicted = {row.cap_mb: predict_ns(case.inputs, reducer, row.cap_mb) for row in measured}
        rows += [_compare(case, reducer, row, predicted[row.cap_mb]) for row in measured]
        choices += [_choose(case, reducer, one, other, predicted) for one, other in combinations(measured, 2)]
    return CaseScore(tuple(rows), tuple(choices))


def predict_ns(inputs: BucketCapsInputs, reducer: BucketRule, cap_mb: float) -> dict[str, float]:
    """Nanoseconds of an iteration with one bucket cap, by method."""
    trace, links, settings = stated(inputs, reducer, cap_mb)
    fabric, variation, _ = assume_gpu(trace, links, Variation())
    fabric, _ = costs_of(reducer, fabric)
    steady = variation.model_copy(update={"jitter": 0.0})  # all caps then have one iteration, and fast predictions
    predicted = predict(trace, fabric, world_size=reducer.gpus, variation=steady, **settings)
    baselines = baselines_ns(trace, fabric, world_size=reducer.gpus, **settings)
    return {**times_of(predicted), **baselines, FEWER_BUCKETS: len(settings["plan"])}


def stated(inputs: BucketCapsInputs, reducer: BucketRule, cap_mb: float) -> Stated:
    """The iteration without communication, the links of the node, and the reducer's buckets and copies."""
    optimizer_ns = None if reducer.optimizer_ms is None else reducer.optimizer_ms * 1e6
    node = inputs.node(reducer.node)
    trace = trace_of_model(reducer.model, device_of(node, reducer.tflops), reducer.compute_ms * 1e6, optimizer_ns)
    grouping = "buckets" if reducer.rule == "reaches the cap" else "fusion"
    settings = {"plan": plan_of(trace, reducer, cap_mb), "grouping": grouping}
    return Stated(trace, fabric_of_node(node, inputs, reducer.gpus), settings)


def plan_of(trace: Trace, reducer: BucketRule, cap_mb: float) -> BucketAssignment:
    """Return parameter indices by bucket, in launch order."""
    sizes = trace.sizes_bytes
    order = range(len(sizes))[::-1]
    if reducer.rule == "reaches the cap":
        return assign_buckets(sizes, bucket_caps(cap_mb), order=order)
    return at_most(sizes, order, round(cap_mb * MIB))


def costs_of(reducer: BucketRule, fabric: Fabric) -> tuple[Fabric, bool]:
    """Return the costs for one reducer, and whether it copies a gradient that is alone in its bucket.

    The reducers of CS336 flatten buckets with `torch._utils._flatten_dense_tensors`, which returns a view of a single
    gradient (torch/csrc/utils/tensor_flatten.h), and do no more at a launch.
    """
    if reducer.rule == "at most the cap":
        return fabric.with_processor(launch_ns=0, stall_ns=0), False
    return fabric, True


def at_most(sizes_bytes: Sequence[int], order: Sequence[int], cap_bytes: int) -> BucketAssignment:
    """Assign parameters to buckets of at most the cap's size, or of one parameter, walking them in this order."""
    buckets: BucketAssignment = []
    free = 0
    for index in order:
        if not buckets or sizes_bytes[index] > free:
            buckets.append([])
            free = cap_bytes
        buckets[-1].append(index)
        free -= sizes_bytes[index]
    return buckets


def _compare(case: BucketCapsCase, reducer: BucketRule, row: MeasuredCap, methods: Mapping[str, float]) -> Comparison:
    return Comparison(
        part="e",
        case=case.name,
        group=reducer.name,
        label=f"{row.cap_mb:g} MB",
        calibrated_from="iteration without communication",
        predicted_ns=methods["predicted"],
        measured_ns=row.ms * 1e6,
        baselines_ns={name: methods[name] for name in BASELINES},
        interval_ns=(methods["low"], methods["high"]),
    )


def _choose(
    case: BucketCapsCase,
    reducer: BucketRule,
    one: MeasuredCap,
    other: MeasuredCap,
    predicted: Mapping[float, Mapping[str, float]],
) -> FastestChoice:
    times: TimesByMethod = {f"{row.cap_mb:g} MB": predicted[row.cap_mb] for row in (one, other)}
    fast, slow = sorted((one, other), key=lambda row: row.ms)
    spread_ms = fast.spread_ms + slow.spread_ms or UNPUBLISHED_SPREAD * fast.ms
    return FastestChoice(
        part="e",
        case=case.name,
        label=f"{reducer.name}, {one.cap_mb:g} or {other.cap_mb:g} MB",
        predicted=fastest(times, "predicted"),
        measured=f"{fast.cap_mb:g} MB",
        lead=slow.ms / fast.ms - 1,
        is_tie=slow.ms - fast.ms <= spread_ms,
        baselines={name: fastest(times, name) for name in RANKING_BASELINES},
    )
