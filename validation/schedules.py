"""Part (c): one job with its gradients sent after the backward pass, one by one, and merged.

Only the first of these is known: what it takes longer than one GPU is one all-reduce of everything. A flat ring of
known latency then has one unknown, the rate of its slowest link. That rate, how much a collective slows the
computation beside it, and what merging costs the GPU give the other two.
"""

from collections.abc import Mapping, Sequence

from reference.trace import Trace
from simulator import Fabric, predict
from simulator.fabric import Contention, Linear, Processor

from .all_reduce import ring_share
from .gradients import read_gradients, trace_of
from .mg_wfbp import merged_plan
from .rows import RULES, Scored, ScoreRow, WinnerTally, winner
from .training_case import MergingFigures, ScheduleInputs, SchedulesCase, Throughput

FLOAT32_BYTES = 4
NO_OVERLAP = "no overlap"
Cell = tuple[int, str]
"""GPUs, schedule."""


def score(case: SchedulesCase) -> Scored:
    """A row for each cell, and the fastest of the three schedules for each number of GPUs."""
    foretold = foretold_ns(case.inputs, [(row.gpus, row.schedule) for row in case.truth])
    rows = []
    for truth in case.truth:
        yardsticks = dict(foretold[truth.gpus, truth.schedule])
        rows.append(
            ScoreRow(
                part="c",
                case=case.name,
                group=truth.schedule,
                what=f"{truth.gpus} GPUs",
                calibrated="no overlap",
                predicted_ns=yardsticks.pop("predicted"),
                measured_ns=iteration_ns(case.inputs, truth),
                yardsticks_ns=yardsticks,
            )
        )
    return Scored(tuple(rows), tuple(_contests(case, foretold)))


def foretold_ns(inputs: ScheduleInputs, cells: Sequence[Cell]) -> dict[Cell, dict[str, float]]:
    """Nanoseconds of an iteration in each cell: `predicted`, and the yardsticks by name."""
    trace = trace_of(read_gradients(inputs.gradients), inputs.samples / inputs.one_gpu_per_s * 1e9)
    return {cell: _foretold_one(inputs, trace, *cell) for cell in cells}


def _foretold_one(inputs: ScheduleInputs, trace: Trace, gpus: int, schedule: str) -> dict[str, float]:
    plan = plan_of(inputs, trace, gpus, schedule)
    copies = Linear(fixed_ns=copy_ns(inputs) if schedule == "merged" else 0.0)
    slowed = Processor(pack=copies, contention=(Contention(compute=inputs.compute_slowdown.value),))
    fabric = ring_of(inputs, trace, gpus)
    predicted = predict(trace, fabric.model_copy(update={"processor": slowed}), world_size=gpus, plan=plan)
    naive = predict(trace, fabric, world_size=gpus, plan=plan)
    return {
        "predicted": predicted.iteration_ns,
        "perfect scaling": naive.compute_ns,
        "no overlap": naive.no_overlap_ns,
        "naive overlap": naive.iteration_ns,
    }


def plan_of(inputs: ScheduleInputs, trace: Trace, gpus: int, schedule: str) -> list[list[int]]:
    """What is sent together, in launch order."""
    ready = [moment for moment in trace.ranks[0].iterations[0].ready_ns if moment is not None]
    order = sorted(range(len(ready)), key=ready.__getitem__)
    if schedule == "per tensor":
        return [[index] for index in order]
    figures = figures_of(inputs, gpus)
    return merged_plan(
        order,
        trace.sizes_bytes,
        ready,
        start_up_ns=figures.start_up_us * 1000,
        ns_per_byte=figures.ns_per_byte,
        below_bytes=inputs.merging.below_elements * FLOAT32_BYTES,
    )


def ring_of(inputs: ScheduleInputs, trace: Trace, gpus: int) -> Fabric:
    """A flat ring whose latency is told and whose rate is what the iteration without overlap leaves.

    Raises:
        ValueError: That iteration leaves nothing for the bytes.
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
    rate = 2 * ring_share(gpus) * sum(trace.sizes_bytes) / (bytes_ns / 1e9)
    return Fabric.from_alpha_beta(round(hop_us * 1000), rate)


def copy_ns(inputs: ScheduleInputs) -> float:
    """What merging costs a gradient."""
    return inputs.copy_us.value * 1000


def figures_of(inputs: ScheduleInputs, gpus: int) -> MergingFigures:
    """The settings of the merging rule for that many GPUs."""
    return next(figures for figures in inputs.merging.figures if figures.gpus == gpus)


def iteration_ns(inputs: ScheduleInputs, measured: Throughput) -> float:
    """Nanoseconds of an iteration."""
    return inputs.samples * measured.gpus / measured.per_s * 1e9


def _contests(case: SchedulesCase, foretold: Mapping[Cell, Mapping[str, float]]) -> list[WinnerTally]:
    """By number of GPUs; a tie where the first two are no farther apart than their spreads together."""
    contests = []
    for known in case.inputs.no_overlap:
        measured: dict[str, Throughput] = {row.schedule: row for row in case.truth if row.gpus == known.gpus}
        if not measured:
            continue
        entrants = {schedule: foretold[known.gpus, schedule] for schedule in measured}
        entrants[NO_OVERLAP] = dict.fromkeys(("predicted", *RULES), iteration_ns(case.inputs, known))
        measured[NO_OVERLAP] = known
        first, second = sorted(measured, key=lambda schedule: -measured[schedule].per_s)[:2]
        lead = measured[first].per_s - measured[second].per_s
        contests.append(
            WinnerTally(
                part="c",
                case=case.name,
                what=f"{known.gpus} GPUs",
                predicted=winner(entrants, "predicted"),
                measured=first,
                lead=lead / measured[second].per_s,
                is_tie=lead <= measured[first].spread + measured[second].spread,
                yardsticks={rule: winner(entrants, rule) for rule in RULES},
            )
        )
    return contests
