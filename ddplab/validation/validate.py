"""Validate: predict real training runs, train, and compare.

The predictions cannot depend on the measurements: computation is recorded without communication, the machine is
calibrated, all predictions are written to disk, and only then the first target run begins. The calibration includes
training runs, the reference runs, with bucket caps that no target run has.

Speed checks between the target runs measure how fast the machine is at that moment.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from reference.files.writing import write_atomically
from reference.launch import Progress, RankPool, no_progress
from reference.trace import Trace, join
from simulator.fabric import Fabric
from simulator.schedule.comm_hook_messages import NO_HOOK
from simulator.schedule.schedule import buckets_of
from simulator.workload.compute_times import recorded_model

from ..calibration.calibrate import REPEATS, measure_collectives, measure_hooks, sizes_up_to, with_slowdowns
from ..calibration.collective_times import MessageSizes
from ..calibration.repeated_timing import relative_spread
from ..emulation.virtual_training import ONE_BUCKET_MB
from .fitted_slow_downs import Reference, fitted, reference_runs, with_hook_costs, with_slow_downs
from .reducer_step_times import save_samples, to_samples
from .training_runs import TargetRun, Turn, measure_configurations, record_computation
from .validation_report import (
    Configuration,
    Measurement,
    SpeedCheck,
    TargetPrediction,
    ValidationReport,
    join_rows,
    make_row,
    model_folder,
    policy_of,
    predict_targets,
    share_folder,
    summarize,
)

TURNS_AT_A_TIME = 2
"""Turns of each reference run after a recording."""
MOST_TURNS = 12
STEADY = 0.02
"""Half-width of the 90 % band of the reference run's median, as a fraction, above which further turns are trained."""


def validate(
    pool: RankPool,
    model: str,
    configurations: Sequence[Configuration],
    *,
    out: Path,
    repeat: int = 10,
    calibrations: int = 1,
    with_torch: bool = False,
    on_progress: Progress = no_progress,
) -> ValidationReport:
    """Record, calibrate, write the predictions, and only then train and measure.

    One calibration is one sample of a machine whose speed drifts: the errors of all configurations have its error in
    common. With more calibrations, each is followed by an equal share of the `repeat` turns, which it predicts. The
    report compares the mean prediction of a configuration with all of its turns. With `with_torch`, torch's class
    trains after ours in each turn.

    `out` gets `predictions.json`, `report.json`, `report.csv` and `samples.parquet`, and a folder of the model with
    `trace.json.gz` and `fabric.json`. With more calibrations, the folders `calibration-1`, `calibration-2`, ... of
    `out` have the files of each, and `out` itself has `report.json` and `report.csv`.

    Raises:
        RankError: A rank failed.
        ValueError: There is no such hook, or there are more calibrations than turns.
    """
    if calibrations > repeat:
        raise ValueError(f"calibrations: expected at most one before each of {repeat} turns, got {calibrations}")
    with_plan = [one for one in configurations if one.order != "ready" or one.hook != NO_HOOK.name]
    if with_torch and with_plan:
        wrong = f"{with_plan[0].order} and {with_plan[0].hook}"
        raise ValueError(f"torch: expected the order ready and the hook none, to train torch's class, got {wrong}")
    validate_once = partial(
        _validate_once, pool, model, configurations, with_torch=with_torch, on_progress=on_progress
    )
    if calibrations == 1:
        return validate_once(out=out, repeat=repeat)
    reports = []
    for number in range(calibrations):
        turns = repeat // calibrations + (number < repeat % calibrations)
        folder = share_folder(out, number + 1)
        reports.append(validate_once(out=folder, repeat=turns))
    hashes = "".join(f"{report.predictions_sha256}\n" for report in reports)
    rows = [join_rows(of_configuration) for of_configuration in zip(*(one.rows for one in reports), strict=True)]
    joined = summarize(rows, hashlib.sha256(hashes.encode()).hexdigest(), world_size=pool.world_size)
    joined.save(out)
    return joined


def _validate_once(
    pool: RankPool,
    model: str,
    configurations: Sequence[Configuration],
    *,
    out: Path,
    repeat: int,
    with_torch: bool,
    on_progress: Progress,
) -> ValidationReport:
    configurations = list(dict.fromkeys(configurations))
    trace, fabric, speed_check = _calibrate(pool, model, configurations, on_progress)
    trace.save(model_folder(out, model) / "trace.json.gz")
    fabric.save(model_folder(out, model) / "fabric.json")
    predictions = predict_targets(trace, fabric, configurations, pool.world_size, speed_check=speed_check)
    predicted = dict(zip(configurations, predictions, strict=True))
    digest = write_predictions(out / "predictions.json", model, predicted)
    target_runs = [target_run(trace, one) for one in configurations]
    if with_torch:
        target_runs = [
            run._replace(torchs_arguments={"bucket_cap_mb": min(one.cap_mb, ONE_BUCKET_MB)})
            for run, one in zip(target_runs, configurations, strict=True)
        ]

    def train(turn: int) -> list[list[Turn]]:
        word = f"{model}: training, turn {turn + 1} of {repeat}"
        return pool.run(measure_configurations, model, target_runs, word, on_progress=on_progress)

    measured = train_turns(model, configurations, repeat, train, out)
    rows = [make_row(model, *of_one, turns) for of_one, turns in zip(predicted.items(), measured, strict=True)]
    report = summarize(rows, digest, world_size=pool.world_size)
    report.save(out)
    return report


def train_turns(
    model: str,
    configurations: Sequence[Configuration],
    repeat: int,
    train: Callable[[int], Sequence[Sequence[Turn]]],
    out: Path,
) -> list[list[Measurement]]:
    """Train all turns and save their samples; return the measurements of each configuration.

    `train` trains the turn with this number; it returns what each rank measured in each configuration.
    """
    samples, measured = [], [list[Measurement]() for _ in configurations]
    for turn in range(repeat):
        for configuration, so_far, *of_ranks in zip(configurations, measured, *train(turn), strict=True):
            so_far.append(of_ranks[0].measurement)
            iterations = [of_rank.iterations for of_rank in of_ranks]
            samples.append(to_samples(iterations, model=model, **asdict(configuration), turn=turn))
    save_samples(samples, out)
    return measured


def _calibrate(
    pool: RankPool, model: str, configurations: Sequence[Configuration], on_progress: Progress
) -> tuple[Trace, Fabric, SpeedCheck | None]:
    """Record and calibrate; return trace, fabric and the usual speed check of the calibration.

    Recordings and turns of the reference runs are spread out, because the machine's speed drifts.
    """
    hooks = [configuration.hook for configuration in configurations]
    recordings: list[Trace] = [pool.run(record_computation, model)[0]]
    runs = reference_runs(recordings[0], configurations)
    with_hooks = [replace(runs[0], hook=hook) for hook in dict.fromkeys(hooks) if runs and hook != NO_HOOK.name]
    turns: dict[Configuration, list[Measurement]] = {configuration: [] for configuration in (*runs, *with_hooks)}

    def record_and_train() -> None:
        on_progress(f"{model}: recording computation", 0, 1)
        recordings.append(pool.run(record_computation, model)[0])
        due = [configuration for configuration in turns for _ in range(TURNS_AT_A_TIME)]
        target_runs = [target_run(recordings[0], configuration) for configuration in due]
        word = "training reference runs"
        by_rank = pool.run(measure_configurations, model, target_runs, word, on_progress=on_progress)
        for configuration, turn in zip(due, by_rank[0], strict=True):
            turns[configuration].append(turn.measurement)

    record_and_train()
    gradient_bytes = sum(recordings[0].sizes_bytes)
    sizes = MessageSizes.of_each(sizes_up_to(gradient_bytes, pool.backend), pool.backend)
    collectives = measure_collectives(pool, sizes, REPEATS, on_progress, gradient_bytes=gradient_bytes)
    record_and_train()
    slowed = with_slowdowns(pool, model, collectives, on_progress=on_progress)
    fabric = measure_hooks(pool, slowed, hooks, model, on_progress=on_progress)
    record_and_train()
    if not runs:
        return join(recordings), fabric, None
    while len(turns[runs[0]]) < MOST_TURNS and any(Reference.of(one).error > STEADY for one in turns.values()):
        record_and_train()
    trace = join(recordings)
    references = {configuration: Reference.of(of_run) for configuration, of_run in turns.items()}
    without_hooks = {run: references[run] for run in runs}
    fabric = fitted(partial(with_slow_downs, fabric), trace, pool.world_size, without_hooks)
    for run in with_hooks:
        fabric = fitted(partial(with_hook_costs, fabric, run.hook), trace, pool.world_size, {run: references[run]})
    few = references[runs[0]]
    return trace, fabric.with_processor(iteration_spread=relative_spread(few.times_ns)), few.speed_check


def write_predictions(path: Path, model: str, predicted: Mapping[Configuration, TargetPrediction]) -> str:
    """Write all predictions as JSON, and return the file's sha256."""
    rows = [
        {
            "model": model,
            **configuration.to_json(),
            "naive_overlap_ns": target.naive_overlap_ns,
            "reference": asdict(target.speed_check),
            **target.prediction.to_json(),
        }
        for configuration, target in predicted.items()
    ]
    data = json.dumps(rows, indent=1, allow_nan=False).encode()
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def target_run(trace: Trace, configuration: Configuration) -> TargetRun:
    """Make a target run: with the cap if the bucket order is the ready order, else with an explicit plan."""
    if configuration.order == "ready":
        return TargetRun({"bucket_cap_mb": configuration.cap_mb}, configuration.hook)
    return TargetRun({"plan": buckets_of(policy_of(configuration), recorded_model(trace))}, configuration.hook)
