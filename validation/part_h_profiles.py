"""Part (h): steps of training on GPUs, profiled or recorded, replayed with the all-reduces of the other steps.

The trace comes from a file of torch's profiler, or from a run of `make gpu`, which keeps what our recorder and the
profiler made of the same steps; such a run has one GPU, whose all-reduces send nothing. A bucket's all-reduce takes
the median of its durations in the other steps, with its wait for other ranks and for other collectives. So the part
checks the import and the replay, not the costs of a network.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

from reference.trace import Iteration, Trace
from simulator import Fabric, import_profile, predict
from simulator.baseline_predictions import baselines_ns

from .comparison import CaseScore, Comparison

PROFILES = Path(__file__).parent / "profiler"
RUNS = Path(__file__).parent / "gpu"
KEPT = ("recorded", "imported")
"""Ends of the names of traces that `make gpu` keeps."""


def score(path: Path) -> CaseScore:
    """Replay every step of a file; one without buckets or of a single step has no rows.

    A profile has a row for each step, unless it is of a single rank. A trace of `make gpu` has one row: the medians.
    """
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
    return CaseScore((_medians(rows, f"{path.parent.name}, median of {len(rows)} steps"),) if kept else tuple(rows))


def _medians(steps: Sequence[Comparison], label: str) -> Comparison:
    """Return one row for the steps of a trace."""
    return replace(
        steps[0],
        label=label,
        predicted_ns=median(step.predicted_ns for step in steps),
        measured_ns=median(step.measured_ns for step in steps),
        baselines_ns={name: median(step.baselines_ns[name] for step in steps) for name in steps[0].baselines_ns},
        interval_ns=None,
    )


@cache
def profiles() -> tuple[Path, ...]:
    """All files, in the order of their names, those of the profiler first."""
    kept = (path for end in KEPT for path in RUNS.glob(f"*/*_{end}.json.gz"))
    return (*sorted(PROFILES.glob("*.json.gz")), *sorted(kept))


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
