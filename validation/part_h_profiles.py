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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from ddplab.reference.trace import Iteration, Trace
from ddplab.simulator import Fabric, assume_gpu, import_profile, predict
from ddplab.simulator.baseline_predictions import BASELINES, baselines_ns

from .comparison import CaseScore, Comparison, Stated

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
    rows = []
    for number, (step, fabric, settings) in enumerate(steps := stated(path)):
        workload = step.workload
        prediction = predict(step, fabric, world_size=workload.world_size, assume=False, **settings)
        rows.append(
            Comparison(
                part="h",
                case=path.name.partition(".")[0],
                group=workload.device_name,
                label=f"step {number}",
                calibrated_from=f"{len(steps) - 1} other steps",
                predicted_ns=prediction.iteration_ns,
                measured_ns=duration_ns(step),
                baselines_ns=baselines_ns(step, fabric, world_size=workload.world_size, **settings),
                interval_ns=prediction.interval_ns,
            )
        )
    if path.is_relative_to(RUNS) and rows:
        return CaseScore((_medians(rows, f"median of {len(rows)} steps"),))
    return CaseScore(tuple(rows))


def stated(path: Path) -> list[Stated]:
    """Each step of a file alone, with its communication, and the all-reduces of the others; may be empty."""
    kept = path.is_relative_to(RUNS)
    trace = Trace.load(path) if kept else import_profile([path]).trace
    world_size = trace.workload.world_size
    if (world_size == 1 and not kept) or not trace.layouts or len(trace.ranks[0].iterations) < 2:
        return []
    plan, (rank,) = trace.layouts[0], trace.ranks
    steps = []
    for step in rank.iterations:
        others = [other for other in rank.iterations if other is not step]
        table = [
            (world_size, sum(trace.sizes_bytes[index] for index in members), _median_ns(others, bucket))
            for bucket, members in enumerate(plan)
        ]
        steps.append(Stated(_with_one_iteration(trace, step), Fabric.from_table(table), {"plan": plan}))
    return steps


def _from_the_module(run: Path) -> list[Comparison]:
    """Predict steps of data-parallel classes on one GPU from the module's trace and the costs of copies and launches.

    Ours are those that `ddplab calibrate` measured, torch's those of the GPU in the catalogue.
    """
    return [
        Comparison(
            part="h",
            case=run.name,
            group=step.model,
            label=f"{step.name} on one GPU",
            calibrated_from="module, copies, launches",
            predicted_ns=step.module_ns + added_ns(step.trace, step.fabric),
            measured_ns=step.measured_ns,
            baselines_ns=dict.fromkeys(BASELINES, step.module_ns),
        )
        for step in timed_classes(run)
    ]


class TimedClass(NamedTuple):
    """A data-parallel class on one GPU: the plain module's trace and step, and the costs that were measured."""

    model: str
    name: str  #: "our class" or "torch's class"
    trace: Trace
    fabric: Fabric  #: sends nothing; has the costs of our class, none of torch's
    module_ns: float
    measured_ns: float


def timed_classes(run: Path) -> Iterator[TimedClass]:
    """Yield both classes for each model that a run of `make gpu` timed and recorded."""
    times, calibrated = _values(run, "overhead-ddp")["ddp"]["times"], _values(run, "calibrate")["fabric"]
    nothing = Fabric.from_table([(2, size, 0) for size in (1, 2**40)])  # a rank alone would copy nothing
    ours = nothing.model_copy(update={"processor": Fabric.model_validate_json(json.dumps(calibrated)).processor})
    for model, turns in times.items():
        ours_ns, torchs_ns, module_ns = (1e9 * median(of_one) for of_one in zip(*turns, strict=True))
        recorded = [Trace.load(path) for path in sorted(run.glob(f"{model}_batch*_module_recorded.json.gz"))]
        if recorded:
            trace = min(recorded, key=lambda one: abs(_step_ns(one) - module_ns))  # of several batch sizes
            yield TimedClass(model, "our class", trace, ours, module_ns, ours_ns)
            yield TimedClass(model, "torch's class", trace, nothing, module_ns, torchs_ns)


def added_ns(trace: Trace, fabric: Fabric) -> int:
    """Return what a class adds to the step of the plain module on one GPU."""
    fabric = assume_gpu(trace, fabric).fabric.with_processor(stall_ns=0)
    prediction = predict(trace, fabric, world_size=2, assume=False)
    return prediction.iteration_ns - prediction.compute_ns


def _values(run: Path, part: str) -> dict[str, Any]:
    """Return the measured values of a part of `make gpu`."""
    values: dict[str, Any] = json.loads(gzip.decompress((run / f"{part}.json.gz").read_bytes()))["values"]
    return values


def duration_ns(step: Trace) -> int:
    """Nanoseconds of the only iteration."""
    return step.ranks[0].iterations[0].duration_ns


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
