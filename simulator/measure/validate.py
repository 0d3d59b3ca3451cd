"""Validate: predict real training runs, train, and compare.

The predictions cannot depend on the measurements: computation is recorded without communication, the machine is
calibrated, all predictions are written to disk, and only then the first target run begins. The inputs of
`predict_targets` are a trace and a fabric.

Speed checks between the target runs measure how fast the machine is at that moment.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from reference.files import write_atomically
from reference.launch import Progress, RankPool, no_progress
from reference.trace import Trace, join

from ..fabric import Fabric
from ..schedule.schedule import buckets_of
from ..workload.compute_times import recorded_model
from .calibrate import REPEATS, measure_collectives, measure_hooks, sizes_up_to, with_slowdowns
from .collectives import MessageSizes
from .report import (
    Configuration,
    Measurement,
    Report,
    TargetPrediction,
    make_row,
    model_folder,
    policy_of,
    predict_targets,
    summarize,
)
from .training_runs import TargetRun, measure_configurations, record_computation
from .watch import save_samples, to_samples

Target = tuple[str, Configuration]
"""A target run: a model and a configuration."""


def validate(
    pool: RankPool,
    model_names: Sequence[str],
    configurations: Sequence[Configuration],
    *,
    out: Path,
    repeat: int = 3,
    on_progress: Progress = no_progress,
) -> Report:
    """Record, calibrate, write the predictions, and only then train and measure.

    Args:
        pool: The ranks to train on.
        model_names: Models to train, as for `--model`.
        configurations: Configurations to predict and measure for each model.
        out: Folder for `predictions.json`, `report.json`, `report.csv` and `samples.parquet`, and for each model a
            folder with its `trace.json.gz` and `fabric.json`.
        repeat: Number of turns of each configuration.
        on_progress: Called with each step's name, the parts done and all parts.

    Raises:
        RankError: A rank failed.
        ValueError: There is no such hook.
    """
    hooks = list(dict.fromkeys(configuration.hook for configuration in configurations))
    traces, fabrics = _calibrate(pool, model_names, hooks, on_progress)
    for model in model_names:
        traces[model].save(model_folder(out, model) / "trace.json.gz")
        fabrics[model].save(model_folder(out, model) / "fabric.json")
    predicted = {
        (model, configuration): prediction
        for model in model_names
        for configuration, prediction in zip(
            configurations,
            predict_targets(traces[model], fabrics[model], configurations, pool.world_size),
            strict=True,
        )
    }
    digest = write_predictions(out / "predictions.json", predicted)
    measured, samples = _measure(pool, traces, predicted, repeat, on_progress)
    save_samples(samples, out)
    rows = [make_row(*target, prediction, measured[target]) for target, prediction in predicted.items()]
    report = summarize(rows, digest)
    report.save(out)
    return report


def _calibrate(
    pool: RankPool, model_names: Sequence[str], hooks: Sequence[str], on_progress: Progress
) -> tuple[dict[str, Trace], dict[str, Fabric]]:
    """Record and calibrate; return traces and fabrics by model. Recordings are spread out because speed drifts."""
    recordings: dict[str, list[Trace]] = {model: [] for model in model_names}

    def record_all() -> None:
        for model in model_names:
            on_progress(f"{model}: recording computation", 0, 1)
            recordings[model].append(pool.run(record_computation, model)[0])

    record_all()
    most_bytes = max(sum(trace.sizes_bytes) for (trace,) in recordings.values())
    collectives = measure_collectives(pool, MessageSizes.of_each(sizes_up_to(most_bytes)), REPEATS, on_progress)
    record_all()
    fabrics = {}
    for model in model_names:
        slowed = with_slowdowns(pool, model, collectives, on_progress=on_progress)
        fabrics[model] = measure_hooks(pool, slowed, hooks, model, on_progress=on_progress)
    record_all()
    return {model: join(traces) for model, traces in recordings.items()}, fabrics


def write_predictions(path: Path, predicted: Mapping[Target, TargetPrediction]) -> str:
    """Write all predictions as JSON, and return the file's sha256."""
    rows = [
        {
            "model": model,
            **configuration.to_json(),
            "naive_overlap_ns": target.naive_overlap_ns,
            "reference": asdict(target.speed_check),
            **target.prediction.to_json(),
        }
        for (model, configuration), target in predicted.items()
    ]
    data = json.dumps(rows, indent=1, allow_nan=False).encode()
    write_atomically(path, data)
    return hashlib.sha256(data).hexdigest()


def _measure(
    pool: RankPool,
    traces: Mapping[str, Trace],
    targets: Iterable[Target],
    repeat: int,
    on_progress: Progress,
) -> tuple[dict[Target, list[Measurement]], list[pd.DataFrame]]:
    """Return all turns of each target, and the samples of all ranks.

    Each turn trains one model after the other in all its configurations.
    """
    measured: dict[Target, list[Measurement]] = {target: [] for target in targets}
    samples = []
    for turn in range(repeat):
        for model, trace in traces.items():
            due = [configuration for name, configuration in measured if name == model]
            target_runs = [target_run(trace, configuration) for configuration in due]
            word = f"{model}: training, turn {turn + 1} of {repeat}"
            by_rank = pool.run(measure_configurations, model, target_runs, word, on_progress=on_progress)
            for configuration, *of_ranks in zip(due, *by_rank, strict=True):
                measured[model, configuration].append(of_ranks[0].measurement)
                iterations = [of_rank.iterations for of_rank in of_ranks]
                samples.append(to_samples(iterations, model=model, **asdict(configuration), turn=turn))
    return measured, samples


def target_run(trace: Trace, configuration: Configuration) -> TargetRun:
    """Make a target run: with the cap if the bucket order is the ready order, else with an explicit plan."""
    if configuration.order == "ready":
        return TargetRun({"bucket_cap_mb": configuration.cap_mb}, configuration.hook)
    return TargetRun({"plan": buckets_of(policy_of(configuration), recorded_model(trace))}, configuration.hook)
