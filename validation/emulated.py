"""Predict and train emulated devices: `ddplab validate` with devices that sleep for the times of a trace.

`python -m validation.emulated TRACE --world-size 4 --link-rate 10gbit --dilation 2 --byte-scale 0.0625 --out FOLDER`.
The folder gets the files of `ddplab validate`, and `emulated.json.gz`, the computation of the devices in the scale
model. Times in the report are those of the original.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Self

import numpy as np

from ddplab.calibration.calibrate import calibrate
from ddplab.cli.shared_options import read_caps, read_hooks, read_orders
from ddplab.cli.terminal_output import progress, show_report
from ddplab.prediction_errors import Configuration, ValidationReport, summarize
from ddplab.reference.files.reading import read_schema
from ddplab.reference.launch import Progress, RankPool, no_progress
from ddplab.reference.ranks.launcher import launched, on_rank_0
from ddplab.reference.trace import Trace
from ddplab.simulator import BucketPlan, Fabric
from ddplab.train_and_compare import policies_of, predict_and_train, target_run, train_in_turns
from ddplab.training_runs import MEASURED_ITERATIONS, RECORDED_ITERATIONS, TargetRun, Turn

from .emulated_devices import EMULATED, record_device, time_launch_beside_network, train_device_turn
from .scale_model import ORIGINAL, ScaleModel
from .virtual_links import read_rates, run_linked

EMULATED_MODEL_ERROR = 0.009
"""The error of predicted medians in the committed runs with emulated devices, whose computation takes the recorded
times; see `processor_costs.MODEL_ERROR`."""
LAUNCH_ROUNDS = 8
TURNS = 3
EMULATED_MODEL_ERROR = 0.009
"""`MODEL_ERROR` with emulated devices, whose computation takes the recorded times."""
OVERSLEPT = 0.01
"""Largest delay of the end of a sleep, as a part of an iteration."""


@dataclass(frozen=True)
class LaboratoryReport(ValidationReport):
    """A report of `ddplab validate`, or of emulated devices.

    Attributes:
        scale_model: The scale model of emulated devices; times are those of the original. None: real models ran.
        overslept_ns: How late sleeps of emulated devices ended: the 99 % quantile. None: real models ran.
    """

    scale_model: ScaleModel | None = None
    overslept_ns: int | None = None

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `report.json`; if it is missing or malformed, a one-line `ValueError` names file, field and reason."""
        advice = "expected the folder of a run, which `ddplab validate --out` names"
        return read_schema(cls, folder / "report.json", what="a report", cure=advice)


def validate_devices(
    pool: RankPool,
    trace: Trace,
    configurations: Sequence[Configuration],
    *,
    out: Path,
    repeat: int = TURNS,
    plan: BucketPlan | None = None,
    scale: ScaleModel = ORIGINAL,
    on_progress: Progress = no_progress,
) -> LaboratoryReport:
    """Record, calibrate, write the predictions, and only then train emulated devices, as `ddplab validate` does.

    Args:
        pool: The ranks; rank r emulates rank r of the trace, or again its first ones. The rates of links between them
            are those of the scale model.
        trace: What the devices take the times of.
        configurations: What is trained in each turn, with caps of the original.
        out: Folder for the files.
        repeat: Number of turns; they train the recorded iterations one after the other.
        plan: Buckets of the configuration whose cap is "plan".
        scale: The scale model in which the devices run.
        on_progress: Called with each step's name, the parts done and all parts.

    Raises:
        RankError: A rank failed.
        ValueError: There is no such hook, or the plan is that of another model.
    """
    configurations = list(dict.fromkeys(configurations))
    emulated = scale.trace(trace, repeat * MEASURED_ITERATIONS)
    emulated.save(out / "emulated.json.gz")
    name, built = trace.workload.model, f"{EMULATED}{out / 'emulated.json.gz'}"
    on_progress(f"{name}: recording computation", 0, 1)
    iterations = max(RECORDED_ITERATIONS, len(emulated.ranks[0].iterations))
    recorded: Trace = pool.run(record_device, built, iterations)[0]
    recorded.save(out / "trace.json.gz")
    policies = policies_of([scale.configuration(one) for one in configurations], trace, plan)
    late_ns: list[int] = []

    def train(runs: Sequence[TargetRun], turns: int, word: str) -> list[list[list[Turn]]]:
        measured = train_in_turns(pool, train_device_turn, built, on_progress, runs, turns, word)
        late_ns[:] = [ns for run in measured for of_turn in run for _, late in of_turn for ns in late]
        return [[[turn for turn, _ in of_turn] for of_turn in run] for run in measured]

    rows, digest = predict_and_train(
        train,
        dict(zip(configurations, policies, strict=True)),
        [target_run(policy, recorded) for policy in policies],
        recorded,
        calibrate_devices(pool, built, recorded, [policy.hook.name for policy in policies], on_progress),
        name=name,
        world_size=pool.world_size,
        model_error=EMULATED_MODEL_ERROR,
        repeat=repeat,
        out=out,
    )
    report = summarize(list(map(scale.original_row, rows)), digest, world_size=pool.world_size)
    overslept_ns = scale.original_ns(float(np.quantile(late_ns, 0.99)))
    in_laboratory = LaboratoryReport(**vars(report), scale_model=scale, overslept_ns=overslept_ns)
    in_laboratory.save(out)
    return in_laboratory


def calibrate_devices(
    pool: RankPool, model: str, trace: Trace, hooks: Sequence[str], on_progress: Progress
) -> Fabric:
    """Measure what `ddplab calibrate` does, and launches of hosts that are idle between gradients."""
    fabric = calibrate(pool, model, hooks=hooks, on_progress=on_progress)
    message_bytes = max(4, sum(trace.sizes_bytes) // 16 // 4 * 4)
    return fabric.with_processor(launch_ns=pool.run(time_launch_beside_network, message_bytes, LAUNCH_ROUNDS)[0])


def show_devices_report(report: LaboratoryReport) -> None:
    """Print the report, and whether the machine was fast enough."""
    show_report(report)
    shortest_ns = min(row.measured_ns for row in report.rows)
    if report.overslept_ns is not None and report.overslept_ns > OVERSLEPT * shortest_ns:
        late = f"one in a hundred sleeps ended more than {report.overslept_ns / 1e6:.1f} ms late"
        print(f"the machine is too slow or too busy: {late}; try a larger --dilation or a smaller --byte-scale")


def main(words: Sequence[str]) -> None:
    """Start the ranks on virtual links, if a rate is given; otherwise, and on these links, predict and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--world-size", type=int, default=2, help="number of ranks")
    parser.add_argument("--link-rate", type=read_rates, help="RATE[,K:RATE] of virtual links in the original")
    parser.add_argument("--dilation", type=float, default=1.0, help="run so many times slower, links included")
    parser.add_argument("--byte-scale", type=float, default=1.0, help="factor for tensors, caps and rates of links")
    parser.add_argument("--caps", type=read_caps, default="1,default,single", help="bucket caps in MB")
    parser.add_argument("--orders", type=read_orders, default="ready", help="bucket orders")
    parser.add_argument("--hooks", type=read_hooks, default="none", help="comm hooks")
    parser.add_argument("--plan", type=BucketPlan.load, help="compare this plan with torch's default buckets")
    parser.add_argument("--repeat", type=int, default=TURNS, help="turns of each configuration")
    parser.add_argument("--out", type=Path, default=Path("out/emulated"), help="folder for the files")
    options = parser.parse_args(words)
    scale = ScaleModel(dilation=options.dilation, byte_scale=options.byte_scale)
    if options.link_rate is not None and launched() is None:
        own = ["-m", "validation.emulated", *words]
        sys.exit(run_linked(own, options.world_size, *scale.rates(*options.link_rate)))
    caps = ["default", "plan"] if options.plan else ["default" if cap is None else cap for cap in options.caps]
    axes = product(caps, options.orders, options.hooks)
    configurations = [Configuration(cap, order, hook.name) for cap, order, hook in axes]
    train = partial(validate_devices, out=options.out, repeat=options.repeat, plan=options.plan, scale=scale)

    def run() -> None:
        with progress() as on_progress, RankPool(options.world_size) as pool:
            report = train(pool, Trace.load(options.trace), configurations, on_progress=on_progress)
        show_devices_report(report)

    on_rank_0(run)


if __name__ == "__main__":
    main(sys.argv[1:])
