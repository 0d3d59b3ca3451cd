"""Gain of tuned buckets over torch's default, predicted and measured: four emulated GPUs on virtual links.

For each model, collectives are calibrated on the links, `tune` finds a plan for these costs, and default and plan
train in turns; with `--rule`, the buckets by the rule of docs/bucket_size.md train in place of the plan. ResNet-50
is a recorded trace, the others are synthesised. Needs Linux, root and a quiet machine. The
command fails if a plan is more than 1 % slower than the default, or if more than one gains less than half of what is
predicted and `tune` does not advise to keep the default.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from ddplab.calibration.calibrate import calibrate
from ddplab.cli.shared_options import bits_per_s
from ddplab.demo import TRACE
from ddplab.models import Loss
from ddplab.operation_counter import measure_operations
from ddplab.prediction_errors import Configuration
from ddplab.reference.bucketing import MIB
from ddplab.reference.files.writing import write_atomically
from ddplab.reference.launch import RankPool
from ddplab.reference.ranks.launcher import launched, on_rank_0
from ddplab.reference.trace import Trace
from ddplab.simulator import BucketPlan, Policy, predict, tune
from ddplab.simulator.schedule.schedule import buckets_of
from ddplab.simulator.tuning.tune import caps_of_three_times
from ddplab.simulator.workload.compute_times import recorded_model
from ddplab.simulator.workload.roofline import find_device
from ddplab.simulator.workload.trace_synthesis import synthesize
from ddplab.training_runs import MEASURED_ITERATIONS

from .emulated import LaboratoryReport, show_devices_report, validate_devices
from .emulated_devices import EMULATED
from .scale_model import ScaleModel
from .virtual_links import run_linked

RANKS = 4
TURNS = 8
"""Turns of default and plan: with 8 or more, a single outlier leaves the 90 % interval of the gain as it is."""
SLOWER_AT_MOST = 0.01
PART_OF_PREDICTED = 0.5


class Case(NamedTuple):
    """A model, the scale in which four of it fit two cores, its GPU and rate; None: the recorded trace."""

    model: str | None
    scale: ScaleModel
    device: str = "v100-fp32"
    rate: str = "10gbit"


CASES = {
    "resnet50": Case(None, ScaleModel(dilation=16, byte_scale=1 / 8)),
    "vgg16": Case("validation.plans_on_links:vgg16", ScaleModel(dilation=8, byte_scale=1 / 32)),
    "bert-large": Case("bert-large", ScaleModel(dilation=4, byte_scale=1 / 32)),
    "gpt2": Case("gpt2", ScaleModel(dilation=4, byte_scale=1 / 32)),
    "vit-h-14": Case("vit-h-14", ScaleModel(dilation=4, byte_scale=1 / 256), "h100-bf16", "100gbit"),
    "gpt2-xl": Case("gpt2-xl", ScaleModel(dilation=4, byte_scale=1 / 512), "h100-bf16", "200gbit"),
    "gpt2-h100": Case("gpt2", ScaleModel(dilation=8, byte_scale=1 / 64), "h100-bf16", "400gbit"),
}


def vgg16() -> tuple[nn.Module, Loss]:
    """VGG-16 (Simonyan and Zisserman 2015, table 1, D) on 32 images; most of its bytes are in one linear layer."""
    layers: list[nn.Module] = []
    inputs = 3
    for count, outputs in ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)):
        for _ in range(count):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    images, labels = torch.randn(32, 3, 224, 224), torch.randint(1000, (32,))
    module = nn.Sequential(*layers, *head, nn.Linear(4096, 1000))
    return module, lambda called: functional.cross_entropy(called(images), labels)


def verify(case: Case, turns: int, out: Path, *, by_rule: bool) -> None:
    """Calibrate the links between these ranks, tune for them, and train."""
    trace = (
        Trace.load(TRACE)
        if case.model is None
        else synthesize(measure_operations(case.model), find_device(case.device))
    )
    scale = case.scale
    model_trace = scale.trace(trace, turns * MEASURED_ITERATIONS)
    model_trace.save(out / "to_tune.json.gz")

    def on_progress(word: str, done: int, _total: int) -> None:
        if not done:
            print(word, file=sys.stderr)

    with RankPool(RANKS) as pool:
        fabric = calibrate(pool, f"{EMULATED}{out / 'to_tune.json.gz'}", on_progress=on_progress)
        default = buckets_of(Policy(bucket_cap_mb=None), recorded_model(trace))  # caps of the original size
        plan = tune(model_trace, fabric, world_size=RANKS, assume=False, plan=default)
        if by_rule:
            costs: dict[str, Any] = {"world_size": RANKS, "assume": False}
            total = sum(model_trace.sizes_bytes)
            # The rule's third time is that of 1 MiB in the original, which has fewer bytes in the scale model.
            every_ns, mib_ns = (fabric.all_reduce_ns(size, RANKS) for size in (total, round(MIB * scale.byte_scale)))
            caps = caps_of_three_times(total, every_ns, mib_ns, model_trace.ranks[0].iterations[0].duration_ns)
            caps_mb = tuple(cap / MIB for cap in caps)
            ruled = predict(model_trace, fabric, bucket_cap_mb_list=caps_mb, **costs)
            is_tie = predict(model_trace, fabric, plan=default, **costs).compare(ruled).is_tie
            of_rule = {"buckets": ruled.buckets, "bucket_cap_mb_list": caps_mb, "rule_caps_mb": caps_mb}
            times = {"iteration_ns": ruled.iteration_ns, "interval_ns": ruled.interval_ns}
            plan = plan.model_copy(update=of_rule | times | {"keep_default": is_tie})
        plan.save(out / "plan.json")
        both = [Configuration("default"), Configuration("plan")]
        how = {"out": out, "repeat": turns, "plan": plan, "scale": scale, "on_progress": on_progress}
        show_devices_report(validate_devices(pool, trace, both, **how))  # type: ignore[arg-type]


def main() -> None:
    """Start the ranks of each model on its links, and print the tables; end with an error if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of default and plan")
    parser.add_argument("--rule", action="store_true", help="train by the rule in place of the plan")
    parser.add_argument("--out", type=Path, default=Path("out/plans_on_links"), help="folder for all files")
    options = parser.parse_args()
    if launched() is not None:
        (name,) = options.models
        on_rank_0(partial(verify, CASES[name], options.turns, options.out / name, by_rule=options.rule))
        return
    missed, reached, results = [], 0, {}
    for name in options.models:
        print(f"\n{name}", flush=True)
        words = ["-m", "validation.plans_on_links", "--models", name, "--turns", options.turns, "--out", options.out]
        words += ["--rule"] if options.rule else []
        if status := run_linked(words, RANKS, *CASES[name].scale.rates(bits_per_s(CASES[name].rate))):
            sys.exit(status)
        plan, report = BucketPlan.load(options.out / name / "plan.json"), LaboratoryReport.load(options.out / name)
        if plan.keep_default:
            print("the predicted gain lies within the errors of the costs, so the advice is to keep the default")
        results[name] = {"keep_default": plan.keep_default, **report.to_json()}
        write_atomically(options.out / "gains.json", json.dumps(results, indent=1).encode())
        gain = report.gain
        assert gain is not None
        reached += plan.keep_default or gain.measured >= PART_OF_PREDICTED * gain.predicted
        if gain.measured < -SLOWER_AT_MOST:
            missed.append(f"{name}: slower than torch's default")
    if reached < len(options.models) - 1:
        missed.append(f"half of the predicted gain, or the advice to keep the default: {reached} models")
    if missed:
        sys.exit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
