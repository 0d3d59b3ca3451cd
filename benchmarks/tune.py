"""Time and result of `tune`: synthetic models of 161 to 2,000 parameters, and recorded ones, on nodes of 8 A100.

Prints one line for each: processor seconds of one core, times with torch's default and with the plan, the gain, the
distance to the bound, and how much slower the known rules are. Fails if a goal is missed.
"""

import sys
import time
from pathlib import Path

import numpy as np

from ddplab import BucketPlan, Trace, tune
from ddplab.demo import TRACE
from ddplab.reference.trace import Iteration, Parameter, RankTrace, Workload
from ddplab.simulator.catalogue import load_fabric

RECORDED = (Path(__file__).parent / "resnet50.json.gz", TRACE)
NODE = "aws-p4d"
GOALS_S = {161: 1.0, 400: 1.0, 2000: 20.0}
"""Limits in processor seconds by number of parameters."""


def synthetic(parameters: int, total_bytes: float, *, device: str, seed: int = 0) -> Trace:
    """Return a trace of 30 ms forward and 60 ms backward, with lognormal sizes and exponential gaps."""
    rng = np.random.default_rng(seed)
    shares = rng.lognormal(0, 2, parameters)
    elements = 1 + (shares / shares.sum() * total_bytes / 4).astype(int)
    gaps = rng.exponential(1, parameters)
    ready_ns = (30e6 + np.cumsum(gaps / gaps.sum() * 60e6)).astype(int)[::-1].tolist()
    iteration = Iteration(
        forward_start_ns=0,
        forward_end_ns=30_000_000,
        backward_start_ns=30_000_000,
        backward_end_ns=ready_ns[0],
        end_ns=ready_ns[0],
        synchronized=False,
        ready_ns=tuple(ready_ns),
    )
    workload = Workload(
        model=f"{parameters} parameters, {total_bytes / 1e6:.0f} MB, {device}",
        source="module",
        parameters=tuple(
            Parameter(name=f"layer {index}", shape=(count,), dtype="float32", size_bytes=4 * count)
            for index, count in enumerate(elements.tolist())
        ),
        device="cuda",
        device_name=device,
        backend=None,
        world_size=1,
        torch_version="2.13.0",
    )
    return Trace(workload=workload, ranks=(RankTrace(rank=0, iterations=(iteration,)),))


def line(plan: BucketPlan, seconds: float) -> str:
    """Describe a plan and how long its search took."""
    rules = ", ".join(f"{one.name} {one.regret:+.2%}" for one in plan.baselines)
    return (
        f"{plan.model}, {plan.world_size} ranks: {seconds:.2f} s; {plan.default_ns / 1e6:.2f} -> "
        f"{plan.iteration_ns / 1e6:.2f} ms in {len(plan.buckets)} buckets, gain {plan.gain:.2%}, above the bound "
        f"{plan.gap:.2%}{', tie' if plan.keep_default else ''}; {rules}"
    )


def main() -> None:
    """Tune each model and print a line; exit with an error if a goal is missed."""
    fabric = load_fabric(NODE)
    models = [synthetic(count, size, device=device)
              for count, size in ((161, 1e8), (400, 1e8), (400, 4e8), (2000, 4e8), (2000, 1.6e9))
              for device in ("NVIDIA A100-SXM4-40GB", "no known GPU")]  # fmt: skip
    missed = []
    for trace in [*map(Trace.load, [*RECORDED, *map(Path, sys.argv[1:])]), *models]:
        for ranks in (8, 64):
            start = time.process_time()
            plan = tune(trace, fabric, world_size=ranks)
            seconds = time.process_time() - start
            print(line(plan, seconds), flush=True)
            if trace in models and seconds > GOALS_S[len(plan.parameters)]:
                missed.append(plan.model)
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
