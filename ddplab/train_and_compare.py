"""Train and compare: predict real training runs, train, and compare (`ddplab validate`).

The predictions cannot depend on the measurements: computation is recorded without communication, the machine is
calibrated, all predictions are written to disk, and only then the first target run begins.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from math import hypot
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from torch import nn

from . import prediction_errors
from .calibration.calibrate import calibrate
from .calibration.repeated_timing import relative_spread
from .emulation.virtual_training import ddp_arguments
from .prediction_errors import Configuration, TargetPrediction, ValidationReport, ValidationRow, policy_of
from .reference.bucketing import MIB
from .reference.data_parallel import DistributedDataParallel
from .reference.files.writing import write_atomically
from .reference.launch import Progress, RankPool, no_progress
from .reference.trace import Trace
from .simulator.fabric import Fabric
from .simulator.fabric.processor_costs import MODEL_ERROR
from .simulator.schedule.comm_hook_messages import NO_HOOK
from .simulator.schedule.policy import Policy
from .simulator.schedule.schedule import buckets_of
from .simulator.tuning.bucket_plan import BucketPlan
from .simulator.workload.compute_times import recorded_model
from .training_runs import RECORDED_ITERATIONS, TargetRun, Turn, record_computation, train_turn

T = TypeVar("T")
Train = Callable[[Sequence[TargetRun], int, str], Sequence[Sequence[Sequence[Turn]]]]
"""Trains runs for a number of turns, with words for the progress; returns the turns of all ranks, by run and turn."""

REHEARSALS = 4
"""Turns of a run before the predictions, of which only the spread of its iterations counts."""
REHEARSED_BUCKETS = 5


def validate(
    pool: RankPool,
    model: str,
    configurations: Sequence[Configuration],
    *,
    out: Path,
    repeat: int = 10,
    with_torch: bool = False,
    plan: BucketPlan | None = None,
    on_progress: Progress = no_progress,
) -> ValidationReport:
    """Record, calibrate, write the predictions, and only then train and measure.

    The folder `out` gets `trace.json.gz` (the recorded computation), `fabric.json`, `predictions.json` and
    `report.json`. In each of `repeat` turns all configurations train, with `with_torch` also by torch's class after
    ours. `plan` has the buckets of the configuration whose cap is "plan". Raises RankError if a rank failed, and
    ValueError if there is no such hook, torch's class has not all settings, or the plan is that of another model.
    """
    configurations = list(dict.fromkeys(configurations))
    for one in configurations:
        if with_torch and (one.order != "ready" or one.hook != NO_HOOK.name):
            raise ValueError(f"torch: expected the order ready and the hook none, got {one.order} and {one.hook}")
    on_progress(f"{model}: recording computation", 0, 1)
    trace = pool.run(record_computation, model, RECORDED_ITERATIONS)[0]
    trace.save(out / "trace.json.gz")
    policies = policies_of(configurations, trace, plan)
    caps = None if plan is None else plan.bucket_cap_mb_list
    runs = [
        target_run(policy, trace, torchs_policy(one, caps) if with_torch else None)
        for one, policy in zip(configurations, policies, strict=True)
    ]
    fabric = calibrate(pool, model, hooks=[policy.hook.name for policy in policies], on_progress=on_progress)
    rows, digest = predict_and_train(
        partial(train_in_turns, pool, train_turn, model, on_progress),
        dict(zip(configurations, policies, strict=True)),
        runs,
        trace,
        fabric,
        name=model,
        world_size=pool.world_size,
        model_error=MODEL_ERROR,
        repeat=repeat,
        out=out,
    )
    report = prediction_errors.summarize(rows, digest, world_size=pool.world_size)
    report.save(out)
    return report


def policies_of(configurations: Sequence[Configuration], original: Trace, plan: BucketPlan | None) -> list[Policy]:
    """Return the settings of the reducer; the cap "default" means torch's default buckets of this trace."""
    explicit = {"default": buckets_of(Policy(bucket_cap_mb=None), recorded_model(original))}
    if plan is not None:
        explicit["plan"] = list(map(list, plan.buckets))
    return [policy_of(one, explicit) for one in configurations]


def predict_and_train(
    train: Train,
    policies: dict[Configuration, Policy],
    runs: Sequence[TargetRun],
    trace: Trace,
    fabric: Fabric,
    *,
    name: str,
    world_size: int,
    model_error: float,
    repeat: int,
    out: Path,
) -> tuple[list[ValidationRow], str]:
    """Rehearse, write the fabric and all predictions, and then train all runs; return rows and the digest.

    The rehearsal shows how much iterations vary; with the error of medians, `model_error`, this gives the intervals.
    """
    rehearsed = Policy(bucket_cap_mb=max(1, sum(trace.sizes_bytes)) / MIB / REHEARSED_BUCKETS)
    (rehearsals,) = train([target_run(rehearsed, trace)], REHEARSALS, f"{name}: rehearsal")
    spread = relative_spread([ns for of_ranks in rehearsals for ns in of_ranks[0].times_ns])
    fabric = fabric.with_processor(iteration_spread=hypot(spread, model_error) if spread else 0.0)
    fabric.save(out / "fabric.json")
    targets = [prediction_errors.predict_target(trace, fabric, policy, world_size) for policy in policies.values()]
    digest = write_predictions(out / "predictions.json", name, list(policies), targets)
    turns = train(runs, repeat, f"{name}: training")
    rows = [
        prediction_errors.make_row(name, one, target, [of_turn[0] for of_turn in of_run])
        for one, target, of_run in zip(policies, targets, turns, strict=True)
    ]
    return rows, digest


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
    plan = None if policy.plan is None and policy.order == "ready" else buckets_of(policy, recorded_model(trace))
    of_torch = None if torchs is None else ddp_arguments(nn.parallel.DistributedDataParallel, torchs, None)
    return TargetRun(ddp_arguments(DistributedDataParallel, policy, plan), policy.hook.name, of_torch)


def train_in_turns(
    pool: RankPool,
    body: Callable[..., list[T]],
    model: str,
    on_progress: Progress,
    runs: Sequence[TargetRun],
    turns: int,
    word: str,
) -> list[list[tuple[T, ...]]]:
    """Train all runs once in each turn, every other turn in reverse order, so that a drift of the speed cancels.

    Ranks run `body(rank, world_size, model, runs, turn, words)`. Returns what all measured in each turn, by run.
    """
    measured: list[list[tuple[T, ...]]] = [[] for _ in runs]
    for turn in range(turns):
        places = range(len(runs))[:: -1 if turn % 2 else 1]
        chosen = [runs[place] for place in places]
        words = f"{word}, turn {turn + 1} of {turns}"
        by_rank: list[Any] = pool.run(body, model, chosen, turn, words, on_progress=on_progress)
        for place, of_ranks in zip(places, zip(*by_rank, strict=True), strict=True):
            measured[place].append(of_ranks)
    return measured
