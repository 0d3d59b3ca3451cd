"""Part (h): steps of training on GPUs, profiled or recorded, replayed with the all-reduces of the other steps.

The trace comes from a file of torch's profiler, or from a run of `make gpu`, which keeps what our recorder and the
profiler made of the same steps; such a run has one GPU, whose all-reduces send nothing. A bucket's all-reduce takes
the median of its durations in the other steps, with its wait for other ranks and for other collectives. So the part
checks the import and the replay, not the costs of a network.

A run of `make gpu` also trained the module itself, our DDP and torch's in turns. The step of each class is predicted
from the recorded trace of the module and the measured costs of copies and launches, without a network.
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from ddplab.reference.trace import Iteration, Trace
from ddplab.simulator import Fabric, assume_gpu, import_profile, predict
from ddplab.simulator.baseline_predictions import baselines_ns

from .comparison import CaseScore, Comparison

PROFILES = Path(__file__).parent / "profiler"
RUNS = Path(__file__).parent / "gpu"
KEPT = ("recorded", "imported")
"""Ends of the names of traces that `make gpu` keeps."""


def score(path: Path) -> CaseScore:
    """Replay every step of a file; one without buckets or of a single step has no rows.

    A profile has a row for each step, unless it is of a single rank. A trace of `make gpu` has one row: the medians.
    A folder of such a run has a row for each model and class that it timed.
    """
    if path.is_dir():
        return CaseScore(tuple(_from_the_module(path)))
    kept = path.is_relative_to(RUNS)
    trace = Trace.load(path) if kept else import_profile([path]).trace
    world_size = trace.workload.world_size
    if (world_size == 1 and not kept) or not trace.layouts or len(trace.ranks[0].iterations) < 2:
        return CaseScore(())
    plan, (rank,) = trace.layouts[0], trace.ranks
    rows = []
    for number, step in enumerate(rank.iterations):
        others = [other for other in rank.iterations if other is not step]
        fabric = Fabric.from_table(
            [
                (world_size, sum(trace.sizes_bytes[index] for index in members), _median_ns(others, bucket))
                for bucket, members in enumerate(plan)
            ]
        )
        alone = _with_one_iteration(trace, step)
        prediction = predict(alone, fabric, world_size=world_size, plan=plan, assume=False)
        rows.append(
            Comparison(
                part="h",
                case=path.name.partition(".")[0],
                group=trace.workload.device_name,
                label=f"step {number}",
                calibrated_from=f"{len(others)} other steps",
                predicted_ns=prediction.iteration_ns,
                measured_ns=step.duration_ns,
                baselines_ns=baselines_ns(alone, fabric, world_size=world_size, plan=plan),
                interval_ns=prediction.interval_ns,
            )
        )
    return CaseScore((_medians(rows, f"median of {len(rows)} steps"),) if kept else tuple(rows))


def _from_the_module(run: Path) -> list[Comparison]:
    """Predict steps of data-parallel classes on one GPU from the module's trace and the costs of copies and launches.

    Ours are those that `ddplab calibrate` measured, torch's those of the GPU in the catalogue.
    """
    times, calibrated = _values(run, "overhead-ddp")["ddp"]["times"], _values(run, "calibrate")["fabric"]
    rows = []
    for model, turns in times.items():
        ours_ns, torchs_ns, module_ns = (1e9 * median(of_one) for of_one in zip(*turns, strict=True))
        recorded = [Trace.load(path) for path in run.glob(f"{model}_batch*_module_recorded.json.gz")]
        if not recorded:
            continue
        trace = min(recorded, key=lambda one: abs(_step_ns(one) - module_ns))  # of several batch sizes
        nothing = Fabric.from_table([(2, size, 0) for size in (1, 2**40)])  # a rank alone would copy nothing
        processors = {
            "our class": Fabric.model_validate_json(json.dumps(calibrated)).processor,
            "torch's class": assume_gpu(trace, nothing).fabric.processor,
        }
        for (name, processor), measured_ns in zip(processors.items(), (ours_ns, torchs_ns), strict=True):
            fabric = nothing.model_copy(update={"processor": processor}).with_processor(stall_ns=0)
            prediction = predict(trace, fabric, world_size=2, assume=False)
            added_ns = prediction.iteration_ns - prediction.compute_ns
            rows.append(
                Comparison(
                    part="h",
                    case=run.name,
                    group=model,
                    label=f"{name} on one GPU",
                    calibrated_from="module, copies, launches",
                    predicted_ns=module_ns + added_ns,
                    measured_ns=measured_ns,
                    baselines_ns=dict.fromkeys(baselines_ns(trace, nothing, world_size=2), module_ns),
                )
            )
    return rows


def _values(run: Path, part: str) -> dict[str, Any]:
    """Return the measured values of a part of `make gpu`."""
    values: dict[str, Any] = json.loads(gzip.decompress((run / f"{part}.json.gz").read_bytes()))["values"]
    return values


def _step_ns(trace: Trace) -> float:
    return median(one.duration_ns for one in trace.ranks[0].iterations)


def _medians(steps: Sequence[Comparison], label: str) -> Comparison:
    """Return one row for the steps of a trace."""
    return replace(
        steps[0],
        label=label,
        predicted_ns=median(step.predicted_ns for step in steps),
        measured_ns=median(step.measured_ns for step in steps),
        baselines_ns={name: median(step.baselines_ns[name] for step in steps) for name in steps[0].baselines_ns},
        interval_ns=None,
        counts=False,  # one GPU sends nothing, so each method is exact
    )


@cache
def profiles() -> tuple[Path, ...]:
    """All files, in the order of their names, those of the profiler first."""
    kept = (path for end in KEPT for path in RUNS.glob(f"*/*_{end}.json.gz"))
    timed = (path.parent for path in RUNS.glob("*/overhead-ddp.json.gz"))
    return (*sorted(PROFILES.glob("*.json.gz")), *sorted(kept), *sorted(timed))


def _median_ns(steps: list[Iteration], bucket: int) -> int:
    """Return the time that a bucket's all-reduce takes once it is launched and the one before is done."""
    durations = []
    for step in steps:
        one = step.buckets[bucket]
        before_ns = step.buckets[bucket - 1].done_ns if bucket else 0
        durations.append(one.done_ns - max(one.launched_ns, before_ns))
    return round(median(durations))


def _with_one_iteration(trace: Trace, step: Iteration) -> Trace:
    (rank,) = trace.ranks
    return trace.model_copy(update={"ranks": (rank.model_copy(update={"iterations": (step,)}),)})
