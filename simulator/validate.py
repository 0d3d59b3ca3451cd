"""Validate: predict real training runs, then make them, and compare.

The order is the point: computation is recorded without communication, the machine is calibrated, all predictions
are written to disk, and only then does the first target run begin. `predict` gets a trace and a fabric and nothing
else, so no prediction can have seen a measurement.

Between target runs computation alone is timed, so that each is paired with the machine's speed just then.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reference.files import write_whole
from reference.launch import Progress, RankPool, no_progress
from reference.trace import Trace, join

from .calibrate import REPEATS, SIZES_BYTES, measure_collectives, with_slowdowns
from .fabric import Fabric
from .iteration.policy import Policy, buckets_of
from .prediction import Prediction, predict
from .quiet import quiet_part
from .report import Configuration, Measurement, Report, make_row, summarize
from .training import measure_configurations, record_computation

Target = tuple[str, Configuration]
"""A model under a configuration: one target run."""


def validate(
    pool: RankPool,
    model_names: Sequence[str],
    configurations: Sequence[Configuration],
    *,
    out: Path,
    repeat: int = 3,
    on_progress: Progress = no_progress,
) -> Report:
    """Record, calibrate, predict, write, and only then measure.

    Args:
        pool: The ranks to train on.
        model_names: Models to train, as for `--model`.
        configurations: What to predict and measure for each model.
        out: Folder for `predictions.json`, `report.json` and `report.csv`, and for each model a folder with
            its `trace.json.gz` and `fabric.json`.
        repeat: How often each configuration has its turn.
        on_progress: Told of every step.

    Raises:
        RankError: A rank failed.
    """
    traces, fabrics = _calibrate(pool, model_names, on_progress)
    for model in model_names:
        traces[model].save(out / model / "trace.json.gz")
        fabrics[model].save(out / model / "fabric.json")
    predictions = {
        (model, configuration): predict_one(traces[model], fabrics[model], configuration, pool.world_size)
        for model in model_names
        for configuration in configurations
    }
    digest = _write_predictions(out / "predictions.json", predictions)
    measured = _measure(pool, traces, configurations, repeat, on_progress)
    rows = [make_row(*target, prediction, measured[target]) for target, prediction in predictions.items()]
    report = summarize(rows, digest)
    report.save(out)
    return report


def predict_one(trace: Trace, fabric: Fabric, configuration: Configuration, world_size: int) -> Prediction:
    """The prediction for one configuration."""
    return predict(
        trace, fabric, world_size=world_size, bucket_cap_mb=configuration.cap_mb, order=configuration.order
    )


def _calibrate(
    pool: RankPool, model_names: Sequence[str], on_progress: Progress
) -> tuple[dict[str, Trace], dict[str, Fabric]]:
    """Traces and fabrics by model. Recording is spread over the whole time, as a machine's speed drifts."""
    recordings: dict[str, list[Trace]] = {model: [] for model in model_names}

    def record_all() -> None:
        for model in model_names:
            on_progress(f"{model}: recording computation", 0, 1)
            recordings[model].append(pool.run(record_computation, model)[0])

    record_all()
    collectives = measure_collectives(pool, SIZES_BYTES, REPEATS, on_progress)
    record_all()
    fabrics = {}
    for model in model_names:
        on_progress(f"{model}: calibrating slow-downs", 0, 1)
        fabrics[model] = with_slowdowns(pool, model, collectives)
    record_all()
    return {model: quiet_part(join(traces)) for model, traces in recordings.items()}, fabrics


def _write_predictions(path: Path, predictions: dict[Target, Prediction]) -> str:
    """The file's sha256."""
    rows = [{"model": model, **c.to_json(), **p.to_json()} for (model, c), p in predictions.items()]
    data = json.dumps(rows, indent=1, allow_nan=False).encode()
    write_whole(path, data)
    return hashlib.sha256(data).hexdigest()


def _measure(
    pool: RankPool,
    traces: dict[str, Trace],
    configurations: Sequence[Configuration],
    repeat: int,
    on_progress: Progress,
) -> dict[Target, list[Measurement]]:
    """All turns of each target; models take turns too."""
    measured: dict[Target, list[Measurement]] = {(model, c): [] for model in traces for c in configurations}
    for turn in range(repeat):
        for model, trace in traces.items():
            arguments = [_arguments(trace, configuration) for configuration in configurations]
            word = f"{model}: training, turn {turn + 1} of {repeat}"
            one_turn = pool.run(measure_configurations, model, arguments, word, on_progress=on_progress)[0]
            for configuration, measurement in zip(configurations, one_turn, strict=True):
                measured[model, configuration].append(measurement)
    return measured


def _arguments(trace: Trace, configuration: Configuration) -> dict[str, Any]:
    """How the real reducer is told: by its cap where it finds the order itself, else by an explicit plan."""
    if configuration.order == "ready":
        return {"bucket_cap_mb": configuration.cap_mb}
    return {"plan": buckets_of(Policy(bucket_cap_mb=configuration.cap_mb, order=configuration.order), trace)}
