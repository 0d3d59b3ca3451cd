"""Part (h): steps of profiled training on GPUs, replayed with the all-reduces of the other steps.

The trace comes from a file of torch's profiler. A bucket's all-reduce takes the median of its durations in the other
steps, with its wait for other ranks and for other collectives. So the part checks the import and the replay, not the
costs of a network.
"""

from functools import cache
from pathlib import Path
from statistics import median

from reference.trace import Iteration, Trace
from simulator import Fabric, import_profile, predict
from simulator.baseline_predictions import baselines_ns

from .comparison import CaseScore, Comparison

PROFILES = Path(__file__).parent / "profiler"


def score(path: Path) -> CaseScore:
    """Replay every step of a file; one of a single rank, without buckets or of a single step has no rows."""
    trace = import_profile([path]).trace
    world_size = trace.workload.world_size
    if world_size == 1 or not trace.layouts or len(trace.ranks[0].iterations) < 2:
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
    return CaseScore(tuple(rows))


@cache
def profiles() -> tuple[Path, ...]:
    """All files, in the order of their names."""
    return tuple(sorted(PROFILES.glob("*.json.gz")))


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
