"""Part (c): one training run under three schedules: all gradients after the backward pass, one by one, or merged.

Only the first schedule, *no overlap*, is an input. Its iteration exceeds that of one GPU by one all-reduce of all
gradients. On a flat ring of given latency the only unknown is then the rate of the slowest link. The other two
schedules are predicted from this rate, the slow-down of computation beside a collective, and the time to merge a
gradient on the GPU.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, predict
from ddplab.simulator.baseline_predictions import BASELINES, baselines_ns
from ddplab.simulator.fabric import Linear, Processor
from ddplab.simulator.fabric.algorithms import sent_share
from ddplab.simulator.inputs_with_default_costs import COPY_ERROR, SLOW_DOWN_ERROR, UNEXPLAINED

from .cases import MeasuredSchedule, MergingCosts, ScheduleInputs, SchedulesCase, Throughput
from .comparison import (
    FEWER_BUCKETS,
    RANKING_BASELINES,
    CaseScore,
    Comparison,
    FastestChoice,
    Stated,
    fastest,
    times_of,
)
from .ready_times import read_gradients, trace_of

FLOAT32_BYTES = 4
NO_OVERLAP = "no overlap"


class Cell(NamedTuple):
    """One configuration to predict; `schedule` as in the case file."""

    gpus: int
    schedule: str


def score(case: SchedulesCase) -> CaseScore:
    """One row for each cell, and the fastest of the three schedules for each number of GPUs."""
    predicted = predict_ns(case.inputs, [_cell(row) for row in case.truth])
    rows = []
    for truth in case.truth:
        methods = predicted[_cell(truth)]
        rows.append(
            Comparison(
                part="c",
                case=case.name,
                group=truth.schedule,
                label=f"{truth.gpus} GPUs",
                calibrated_from=NO_OVERLAP,
                predicted_ns=methods["predicted"],
                measured_ns=iteration_ns(case.inputs, truth),
                baselines_ns={name: methods[name] for name in BASELINES},
                interval_ns=(methods["low"], methods["high"]),
                several_nodes=truth.gpus > case.inputs.node_gpus,
            )
        )
    return CaseScore(tuple(rows), tuple(_fastest_choices(case, predicted)))


def predict_ns(inputs: ScheduleInputs, cells: Sequence[Cell]) -> dict[Cell, dict[str, float]]:
    """Nanoseconds of an iteration in each cell, by method."""
    trace = one_gpu_trace(inputs)
    return {cell: _predict_cell(inputs, trace, cell) for cell in cells}


def one_gpu_trace(inputs: ScheduleInputs) -> Trace:
    """The recorded ready times, scaled to the iteration of one GPU."""
    return trace_of(read_gradients(inputs.gradients), inputs.samples / inputs.one_gpu_per_s * 1e9)


def _predict_cell(inputs: ScheduleInputs, trace: Trace, cell: Cell) -> dict[str, float]:
    _, ring, settings = stated(inputs, trace, cell)
    copies = Linear(fixed_ns=copy_ns(inputs) if cell.schedule == "merged" else 0.0)
    processor = Processor(
        pack=copies,
        copy_error=COPY_ERROR,
        slow_down=inputs.compute_slowdown.value,
        slow_down_error=SLOW_DOWN_ERROR,
        unexplained=UNEXPLAINED,
    )
    fabric = ring.model_copy(update={"processor": processor})
    predicted = predict(trace, fabric, world_size=cell.gpus, assume=False, **settings)
    baselines = baselines_ns(trace, fabric, world_size=cell.gpus, **settings)
    return {**times_of(predicted), **baselines, FEWER_BUCKETS: len(settings["plan"])}


def stated(inputs: ScheduleInputs, trace: Trace, cell: Cell) -> Stated:
    """The iteration of one GPU, the ring that follows from the iteration without overlap, and the groups."""
    return Stated(trace, ring_of(inputs, trace, cell.gpus), {"plan": plan_of(inputs, trace, cell)})


def plan_of(inputs: ScheduleInputs, trace: Trace, cell: Cell) -> list[list[int]]:
    """Groups of parameter indices that are sent together, in launch order."""
    ready = [ns for ns in trace.ranks[0].iterations[0].ready_ns if ns is not None]
    ready_order = sorted(range(len(ready)), key=ready.__getitem__)
    if cell.schedule == "per tensor":
        return [[index] for index in ready_order]
    costs = merging_costs(inputs, cell.gpus)
    return merged_plan(
        ready_order,
        trace.sizes_bytes,
        ready,
        start_up_ns=costs.start_up_us * 1000,
        ns_per_byte=costs.ns_per_byte,
        below_bytes=inputs.merging.below_elements * FLOAT32_BYTES,
    )


def merged_plan(
    ready_order: Sequence[int],
    sizes_bytes: Sequence[int],
    ready_ns: Sequence[int],
    *,
    start_up_ns: float,
    ns_per_byte: float,
    below_bytes: int,
) -> list[list[int]]:
    """Groups of parameters that MG-WFBP merges, in launch order (Shi, Chu and Li, INFOCOM 2019; arXiv 1811.11141).

    A group takes in the next gradient if its own all-reduce would still be running when that gradient becomes ready,
    and if the wait is shorter than a start-up. A group of fewer than `below_bytes` always takes in the next gradient.
    An all-reduce costs `start_up_ns + ns_per_byte * size`.

    Args:
        ready_order: Parameter indices in ready order; at least one.
        sizes_bytes: Size of each gradient, by parameter index.
        ready_ns: When each gradient is ready, by parameter index.
        start_up_ns: Start-up time of an all-reduce, as configured for the training run.
        ns_per_byte: Time for each byte, as configured for the training run.
        below_bytes: Size below which a group always takes in the next gradient.
    """
    plan: list[list[int]] = [[]]
    size, free_ns = 0, 0.0
    for place, index in enumerate(ready_order):
        plan[-1].append(index)
        size += sizes_bytes[index]
        if place + 1 == len(ready_order):
            break
        start_ns = max(free_ns, ready_ns[index])
        end_ns = start_ns + start_up_ns + ns_per_byte * size
        next_ns = ready_ns[ready_order[place + 1]]
        if size >= below_bytes and not (next_ns < end_ns and next_ns - start_ns < start_up_ns):
            plan.append([])
            size, free_ns = 0, end_ns
    return plan


def ring_of(inputs: ScheduleInputs, trace: Trace, gpus: int) -> Fabric:
    """A flat ring of the given latency; its rate follows from the iteration without overlap.

    Raises:
        ValueError: The iteration without overlap is too short to send any bytes.
    """
    hop_us = (inputs.hop_inside_us if gpus <= inputs.node_gpus else inputs.hop_us).value
    measured = next(row for row in inputs.no_overlap if row.gpus == gpus)
    merging_ns = copy_ns(inputs) * len(trace.sizes_bytes)
    rest_ns = iteration_ns(inputs, measured) - inputs.samples / inputs.one_gpu_per_s * 1e9
    bytes_ns = rest_ns - merging_ns - 2 * (gpus - 1) * hop_us * 1000
    if bytes_ns <= 0:
        raise ValueError(
            f"inputs.no_overlap: expected {gpus} GPUs to be slower than one by more than copies and latency, "
            f"got {rest_ns / 1e6:.1f} ms"
        )
    rate = sent_share(gpus) * sum(trace.sizes_bytes) / (bytes_ns / 1e9)
    return Fabric.from_alpha_beta(round(hop_us * 1000), rate)


def copy_ns(inputs: ScheduleInputs) -> float:
    """Nanoseconds to merge one gradient on the GPU."""
    return inputs.copy_us.value * 1000


def merging_costs(inputs: ScheduleInputs, gpus: int) -> MergingCosts:
    """The costs that the merging rule was configured with for this number of GPUs."""
    return next(costs for costs in inputs.merging.figures if costs.gpus == gpus)


def iteration_ns(inputs: ScheduleInputs, measured: Throughput) -> float:
    """Nanoseconds of one iteration at a measured throughput."""
    return inputs.samples * measured.gpus / measured.per_s * 1e9


def _cell(row: MeasuredSchedule) -> Cell:
    return Cell(row.gpus, row.schedule)


def _fastest_choices(case: SchedulesCase, predicted: Mapping[Cell, Mapping[str, float]]) -> list[FastestChoice]:
    """One choice for each number of GPUs; a tie if the spreads of the two fastest overlap."""
    choices = []
    for no_overlap in case.inputs.no_overlap:
        measured: dict[str, Throughput] = {row.schedule: row for row in case.truth if row.gpus == no_overlap.gpus}
        if not measured:
            continue
        times = {schedule: predicted[Cell(no_overlap.gpus, schedule)] for schedule in measured}
        all_at_once_ns = iteration_ns(case.inputs, no_overlap)
        times[NO_OVERLAP] = dict.fromkeys(("predicted", *RANKING_BASELINES), all_at_once_ns) | {FEWER_BUCKETS: 1}
        measured[NO_OVERLAP] = no_overlap
        first, second = sorted(measured, key=lambda schedule: -measured[schedule].per_s)[:2]
        lead = measured[first].per_s - measured[second].per_s
        choices.append(
            FastestChoice(
                part="c",
                case=case.name,
                label=f"{no_overlap.gpus} GPUs",
                predicted=fastest(times, "predicted"),
                measured=first,
                lead=lead / measured[second].per_s,
                is_tie=lead <= measured[first].spread + measured[second].spread,
                baselines={name: fastest(times, name) for name in RANKING_BASELINES},
            )
        )
    return choices
