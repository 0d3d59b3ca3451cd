"""Part (b): iterations of torch's DDP on several GPUs, from those on one.

What a prediction knows: the recorded ready times, stretched to the iteration on one GPU under DDP (copies and hooks
are in it, but nothing is sent), a table of all-reduces, how much a collective slows the computation beside it, and
how much equal GPUs differ. All wait for the slowest GPU, so one rank is as slow as the slowest of so many is expected
to be.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import norm

from reference.bucketing import DEFAULT_FIRST_BUCKET_MB, MIB, BucketAssignment, initial_buckets
from reference.trace import Trace
from simulator import Fabric, Straggler, predict
from simulator.fabric import Contention, Level, Processor, Topology

from .all_reduce import fabric_of
from .gradients import read_gradients, repeated, trace_of
from .rows import RULES, Scored, ScoreRow, WinnerTally, winner
from .training_case import IterationInputs, IterationsCase, Link, Model, TrainedIteration

Cell = tuple[str, float, int]
"""Model, bucket size in MB, GPUs."""


def score(case: IterationsCase) -> Scored:
    """A row for each cell, and for each model and number of GPUs which bucket size is the faster."""
    cells = [(row.model, row.bucket_mb, row.gpus) for row in case.truth]
    foretold = foretold_ns(case.inputs, cells)
    rows = [_row(case, truth, foretold[truth.model, truth.bucket_mb, truth.gpus]) for truth in case.truth]
    return Scored(tuple(rows), tuple(_contests(case, foretold)))


def foretold_ns(inputs: IterationInputs, cells: Sequence[Cell]) -> dict[Cell, dict[str, float]]:
    """Nanoseconds of an iteration in each cell: `predicted`, and the yardsticks by name."""
    fabric = fabric_with(inputs)
    models = {model.name: model for model in inputs.models}
    return {cell: _foretold_one(inputs, fabric, models[cell[0]], cell) for cell in cells}


def _foretold_one(inputs: IterationInputs, fabric: Fabric, model: Model, cell: Cell) -> dict[str, float]:
    _, bucket_mb, gpus = cell
    one_gpu = {one.bucket_mb: one.per_s for one in model.one_gpu}[bucket_mb]
    trace = _trace(model, iteration_ns(inputs.batch, one_gpu))
    plan = plan_of(trace, bucket_mb)
    slowest = Straggler(rank=0, factor=1 + inputs.gpu_spread.value * expected_slowest(gpus))
    slowed = Processor(contention=(Contention(compute=inputs.compute_slowdown.value),))
    predicted = predict(
        trace,
        fabric.model_copy(update={"processor": slowed}),
        world_size=gpus,
        plan=plan,
        broadcast_buffers=False,
        stragglers=[slowest],
    )
    naive = predict(trace, fabric, world_size=gpus, plan=plan, broadcast_buffers=False)
    return {
        "predicted": predicted.iteration_ns,
        "perfect scaling": iteration_ns(inputs.batch, model.no_ddp_per_s),
        "no overlap": naive.no_overlap_ns,
        "naive overlap": naive.iteration_ns,
    }


def iteration_ns(batch: int, per_s: int) -> float:
    """The middle of the times that are printed as so many examples a second, which is cut to a whole number."""
    return batch / (per_s + 0.5) * 1e9


def plan_of(trace: Trace, bucket_mb: float) -> BucketAssignment:
    """Buckets as torch 1.4 has them: laid out at construction, never rebuilt (torch/nn/parallel/distributed.py)."""
    return initial_buckets(trace.sizes_bytes, [DEFAULT_FIRST_BUCKET_MB * MIB, round(bucket_mb * MIB)])


def expected_slowest(gpus: int) -> float:
    """How many standard deviations the slowest of so many normally distributed GPUs is expected to be off."""
    grid = np.linspace(-10, 10, 20_001)
    density = gpus * norm.pdf(grid) * norm.cdf(grid) ** (gpus - 1)
    return float(np.trapezoid(grid * density, grid))


def fabric_with(inputs: IterationInputs) -> Fabric:
    """Measured tables, and links for other numbers of GPUs."""
    links = topology(inputs.links)
    if not inputs.tables:
        return Fabric(topology=links)
    return fabric_of(inputs.tables).model_copy(update={"topology": links})


def topology(links: Sequence[Link]) -> Topology | None:
    """The simulator's topology of such links; none of none."""
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


def _trace(model: Model, step_ns: float) -> Trace:
    gradients = read_gradients(model.gradients)
    return trace_of(repeated(gradients, model.repeat) if model.repeat else gradients, step_ns)


def _row(case: IterationsCase, truth: TrainedIteration, foretold: Mapping[str, float]) -> ScoreRow:
    yardsticks = dict(foretold)
    return ScoreRow(
        part="b",
        case=case.name,
        group=truth.model,
        what=f"{truth.bucket_mb:g} MB, {truth.gpus} GPUs",
        calibrated="1 GPU",
        predicted_ns=yardsticks.pop("predicted"),
        measured_ns=iteration_ns(case.inputs.batch, truth.per_s),
        yardsticks_ns=yardsticks,
    )


def _contests(case: IterationsCase, foretold: Mapping[Cell, Mapping[str, float]]) -> list[WinnerTally]:
    """By model and GPUs; a tie where the whole numbers of the truth are equal."""
    measured: dict[tuple[str, int], dict[float, int]] = {}
    for row in case.truth:
        measured.setdefault((row.model, row.gpus), {})[row.bucket_mb] = row.per_s
    contests = []
    for (model, gpus), per_s in measured.items():
        if len(per_s) < 2:
            continue
        entrants = {f"{bucket_mb:g} MB": foretold[model, bucket_mb, gpus] for bucket_mb in per_s}
        first, second = sorted(per_s, key=lambda bucket_mb: -per_s[bucket_mb])[:2]
        contests.append(
            WinnerTally(
                part="b",
                case=case.name,
                what=f"{model}, {gpus} GPUs",
                predicted=winner(entrants, "predicted"),
                measured=f"{first:g} MB",
                lead=per_s[first] / per_s[second] - 1,
                is_tie=per_s[first] == per_s[second],
                yardsticks={rule: winner(entrants, rule) for rule in RULES},
            )
        )
    return contests
