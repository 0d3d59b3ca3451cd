"""Validate: predict real training runs, train, and compare.

The predictions cannot depend on the measurements: computation is recorded without communication, the machine is
calibrated, all predictions are written to disk, and only then the first target run begins.

Ranks train a model, or emulated devices, which sleep for the times of a trace instead of computing and overlap with
communication as on a GPU. Reducer, collectives and links are real in both.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from math import hypot
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter
from torch import nn

from .calibration.calibrate import calibrate
from .calibration.reducer_costs import time_launch_beside_network
from .calibration.repeated_timing import relative_spread
from .emulation.time_dilation import ORIGINAL, ScaleModel
from .emulation.virtual_training import ddp_arguments
from .models import EMULATED
from .prediction_errors import (
    Configuration,
    TargetPrediction,
    ValidationReport,
    make_row,
    policy_of,
    predict_target,
    summarize,
)
from .reference.bucketing import MIB
from .reference.data_parallel import DistributedDataParallel
from .reference.files.writing import write_atomically
from .reference.launch import Progress, RankPool, no_progress
from .reference.trace import Trace
from .simulator.fabric import Fabric
from .simulator.fabric.processor_costs import EMULATED_MODEL_ERROR, MODEL_ERROR
from .simulator.schedule.comm_hook_messages import NO_HOOK
from .simulator.schedule.policy import Policy
from .simulator.schedule.schedule import buckets_of
from .simulator.tuning.bucket_plan import BucketPlan
from .simulator.workload.compute_times import recorded_model
from .training_runs import MEASURED_ITERATIONS, RECORDED_ITERATIONS, TargetRun, Turn, record_computation, train_turn

LAUNCH_ROUNDS = 8
REHEARSALS = 4
"""Turns of a run before the predictions, of which only the spread of its iterations counts."""
REHEARSED_BUCKETS = 5


def validate(
    pool: RankPool,
    model: str | Trace,
    configurations: Sequence[Configuration],
    *,
    out: Path,
    repeat: int = 10,
    with_torch: bool = False,
    plan: BucketPlan | None = None,
    scale: ScaleModel = ORIGINAL,
    on_progress: Progress = no_progress,
) -> ValidationReport:
    """Record, calibrate, write the predictions, and only then train and measure.

    `out` gets `trace.json.gz` (the recorded computation), `fabric.json`, `predictions.json` and `report.json`, and
    `emulated.json.gz`, the computation of emulated devices.

    Args:
        pool: The ranks to train on; the rate of their links is that of the scale model.
        model: Name of a model; or a trace, whose rank r, or again its first ones, rank r emulates.
        configurations: What is trained in each turn.
        out: Folder for the files.
        repeat: Number of turns; those of emulated devices train the recorded iterations one after the other.
        with_torch: Whether torch's class trains after ours in each turn.
        plan: Buckets of the configuration whose cap is "plan".
        scale: The scale model in which emulated devices run; the report has times of the original.
        on_progress: Called with each step's name, the parts done and all parts.

    Raises:
        RankError: A rank failed.
        ValueError: There is no such hook, torch's class has not all settings, or the plan is that of another model.
    """
    configurations = list(dict.fromkeys(configurations))
    for one in configurations:
        if with_torch and (one.order != "ready" or one.hook != NO_HOOK.name):
            raise ValueError(f"torch: expected the order ready and the hook none, got {one.order} and {one.hook}")
    iterations = RECORDED_ITERATIONS
    if isinstance(model, str):
        name = built = model
    else:
        emulated = scale.trace(model, repeat * MEASURED_ITERATIONS)
        emulated.save(out / "emulated.json.gz")
        name, built = model.workload.model, f"{EMULATED}{out / 'emulated.json.gz'}"
        iterations = max(iterations, len(emulated.ranks[0].iterations))
    on_progress(f"{name}: recording computation", 0, 1)
    trace = pool.run(record_computation, built, iterations)[0]
    trace.save(out / "trace.json.gz")
    original = recorded_model(trace if isinstance(model, str) else model)
    explicit = {"default": buckets_of(Policy(bucket_cap_mb=None), original)}  # those of a scale model may differ
    if plan is not None:
        explicit["plan"] = list(map(list, plan.buckets))
    policies = [policy_of(one.in_model(scale), explicit) for one in configurations]
    rehearsed = Policy(bucket_cap_mb=max(1, sum(trace.sizes_bytes)) / MIB / REHEARSED_BUCKETS)
    caps = None if plan is None else plan.bucket_cap_mb_list
    runs = [
        target_run(policy, trace, torchs_policy(one, caps) if with_torch else None)
        for one, policy in zip(configurations, policies, strict=True)
    ]
    train = partial(train_in_turns, pool, built, on_progress)
    fabric = _calibrate(pool, built, trace, policies, on_progress)
    (rehearsals,) = train([target_run(rehearsed, trace)], REHEARSALS, f"{name}: rehearsal")
    spread = relative_spread([ns for of_ranks in rehearsals for ns in of_ranks[0].times_ns])
    error = EMULATED_MODEL_ERROR if built.startswith(EMULATED) else MODEL_ERROR
    fabric = fabric.with_processor(iteration_spread=hypot(spread, error) if spread else 0.0)
    fabric.save(out / "fabric.json")
    targets = [predict_target(trace, fabric, policy, pool.world_size) for policy in policies]
    digest = write_predictions(out / "predictions.json", name, configurations, targets)
    turns = train(runs, repeat, f"{name}: training")
    rows = [
        make_row(name, one, target, [of_turn[0] for of_turn in of_run], scale)
        for one, target, of_run in zip(configurations, targets, turns, strict=True)
    ]
    late_ns = [ns for of_run in turns for of_turn in of_run for of_rank in of_turn for ns in of_rank.overslept_ns]
    report = summarize(
        rows,
        digest,
        world_size=pool.world_size,
        scale_model=None if isinstance(model, str) else scale,
        overslept_ns=scale.original_ns(float(np.quantile(late_ns, 0.99))) if late_ns else None,
    )
    report.save(out)
    return report


def _calibrate(pool: RankPool, model: str, trace: Trace, policies: Sequence[Policy], on_progress: Progress) -> Fabric:
    """Measure the costs of collectives and of the processor; of an emulated device also those of its launches."""
    fabric = calibrate(pool, model, hooks=[policy.hook.name for policy in policies], on_progress=on_progress)
    if model.startswith(EMULATED):
        message_bytes = max(4, sum(trace.sizes_bytes) // 16 // 4 * 4)
        launch_ns = pool.run(time_launch_beside_network, message_bytes, LAUNCH_ROUNDS)[0]
        fabric = fabric.with_processor(launch_ns=launch_ns)
    return fabric


def write_predictions(
    path: Path, model: str, configurations: Sequence[Configuration], targets: Sequence[TargetPrediction]
) -> str:
    """Write all predictions as JSON, and return the file's sha256."""
    to_json = TypeAdapter(Configuration).dump_python
    rows = [
        {"model": model, **to_json(one), "baselines_ns": target.baselines_ns, **target.prediction.to_json()}
        for one, target in zip(configurations, targets, strict=True)
    ]
    data = json.dumps(rows, indent=1, allow_nan=False).encode()
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def torchs_policy(configuration: Configuration, caps_mb: Sequence[float] | None) -> Policy | None:
    """Return the settings of torch's class; None if no list of caps makes the buckets of the plan."""
    if configuration.cap_mb == "plan":
        return None if caps_mb is None else Policy(bucket_cap_mb_list=tuple(caps_mb))
    return Policy(bucket_cap_mb=None) if configuration.cap_mb == "default" else policy_of(configuration)


def target_run(policy: Policy, trace: Trace, torchs: Policy | None = None) -> TargetRun:
    """Make a target run: with the cap if the bucket order is the ready order, else with explicit buckets."""
    buckets = buckets_of(policy, recorded_model(trace))
    plan = None if policy.plan is None and policy.order == "ready" else buckets
    of_torch = None if torchs is None else ddp_arguments(nn.parallel.DistributedDataParallel, torchs, None)
    return TargetRun(ddp_arguments(DistributedDataParallel, policy, plan), policy.hook.name, of_torch)


def train_in_turns(
    pool: RankPool, model: str, on_progress: Progress, runs: Sequence[TargetRun], turns: int, word: str
) -> list[list[tuple[Turn, ...]]]:
    """Train all runs once in each turn, every other turn in reverse order, so that a drift of the speed cancels.

    Returns what all ranks measured in each turn, by run.
    """
    measured: list[list[tuple[Turn, ...]]] = [[] for _ in runs]
    for turn in range(turns):
        places = range(len(runs))[:: -1 if turn % 2 else 1]
        chosen, first = [runs[place] for place in places], turn * MEASURED_ITERATIONS
        words = f"{word}, turn {turn + 1} of {turns}"
        by_rank = pool.run(train_turn, model, chosen, first, words, on_progress=on_progress)
        for place, of_ranks in zip(places, zip(*by_rank, strict=True), strict=True):
            measured[place].append(of_ranks)
    return measured
