"""Which bucket cap? The predicted regret of caps and rules against the best buckets, for the whole catalogue.

`python -m validation.bucket_cap_study` predicts every counted model on every node of the catalogue and on slow
networks, on 16, 128 and 1,024 GPUs, and writes `data/bucket_caps.csv`, one row for each: the iteration with each
cap, with the best buckets that `tune` finds, and the bound that none can beat. `--print` shows tables from that file:
the regret of each cap and rule, also for models and systems that had no part in choosing the rule, and the measured
regret of published sweeps beside the predicted one.
"""

import argparse
import csv
import os
import resource
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from math import inf, log2
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from ddplab import Fabric
from ddplab.cli.shared_options import element_type, operations_of
from ddplab.reference.bucketing import MIB
from ddplab.reference.trace import Trace
from ddplab.simulator import Variation
from ddplab.simulator.catalogue import Rate, read_catalogue
from ddplab.simulator.inputs_with_default_costs import Inputs, complete
from ddplab.simulator.prediction import System
from ddplab.simulator.tuning.bucket_plan import DEFAULT, RULE
from ddplab.simulator.tuning.lower_bound import lower_bound_ns
from ddplab.simulator.tuning.plan_times import PlanTimes, partition_costs, with_plan
from ddplab.simulator.tuning.tune import Search
from ddplab.simulator.workload.roofline import find_device, with_precision
from ddplab.simulator.workload.trace_synthesis import synthesize

from . import part_b_iterations
from .cases import BucketCapsCase, IterationsCase, load_case
from .part_e_bucket_caps import predict_ns

TABLE = Path(__file__).parent / "data" / "bucket_caps.csv"
CASES = Path(__file__).parent / "cases"
MODELS = (
    *("resnet50-224", "resnet152-224", "vit-b-16", "vit-l-16", "vit-h-14", "stable-diffusion-2-unet"),
    *("bert-large", "bert-large-512", "gpt2", "gpt2-xl", "gpt-1.3b", "llama-3.2-1b", "llama-3.1-8b"),
    *("t5-base", "t5-large", "whisper-small", "whisper-large-v2"),
)
SLOW = (("dgx-1-v100", 10), ("dgx-a100", 25), ("dgx-h100", 100))
"""Nodes with one slow adapter each, in Gbit/s."""
GPUS = (16, 128, 1024)
CAPS_MB = (5.0, 10.0, 25.0, 50.0, 100.0, 250.0, inf)
FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Multiples of the rule's caps."""
SWEEP_NOISE = 0.01
"""Published times that differ by less count as ties."""

Row = Mapping[str, str]


def systems() -> list[tuple[str, int | None]]:
    """Every node of the catalogue whose GPU has rates, one of equal ones, and the slow networks."""
    listed = read_catalogue()
    rated = {name: node.device for name, node in listed.nodes.items() if listed.devices[node.device].peaks}
    links = {
        name: (device, *((one.members, one.latency_ns, one.bytes_per_s) for one in listed.topology(name).levels))
        for name, device in rated.items()
    }
    first = {of: name for name, of in reversed(links.items())}.values()
    return [*((name, None) for name in rated if name in first), *SLOW]


@cache
def _dtype(model: str) -> str:
    return element_type(operations_of(model).parameters)


@cache
def _synthesized(model: str, device: str, dtype: str) -> Trace:
    sheet = find_device(with_precision(device, dtype))
    return synthesize(operations_of(model, sheet.autocast), sheet)


def described(row: Mapping[str, object]) -> tuple[Search, Inputs]:
    """Return search and inputs of the model, system and number of GPUs of a row."""
    listed = read_catalogue()
    model, gpus = str(row["model"]), int(str(row["gpus"]))
    node, _, network = str(row["system"]).partition(", ")
    rate = Rate(gbit_per_s=int(network.split()[0]), source="") if network else None
    fabric = Fabric.from_topology(listed.topology(node, network=rate))
    trace = _synthesized(model, listed.nodes[node].device, _dtype(model))
    inputs = complete(trace, fabric, policy=None, variation=Variation(device_spread=0.0), assume=True, settings={})
    times = PlanTimes(inputs.with_policy(plan=None, order="ready"), gpus, "median")
    return Search(partition_costs(times), "reaches the cap", None), inputs


def row_of(model: str, node: str, gbit_per_s: int | None, gpus: int) -> dict[str, object] | None:
    """Predict one model on one system; times are in milliseconds, caps in MiB. None: a V100 has no bfloat16."""
    asked = {
        "model": model,
        "system": node if gbit_per_s is None else f"{node}, {gbit_per_s} Gbit/s",
        "gpus": gpus,
    }
    if read_catalogue().nodes[node].device.startswith("v100") and _dtype(model) == "bfloat16":
        return None
    search, inputs = described(asked)
    times, fabric, trace = search.times, search.times.fabric, inputs.trace
    total = sum(trace.sizes_bytes)
    all_ns, mib_ns = (fabric.all_reduce_ns(size, gpus) for size in (total, MIB))
    best = search.run()
    best_ns = times.value_ns(best)
    system = System(inputs)
    compared = {"best": best, "default": search.rules[DEFAULT], "rule": search.rules[RULE]}
    predicted = {name: system.at(gpus, with_plan(inputs, plan)) for name, plan in compared.items()}
    low, high = predicted["best"].interval_ns
    caps: dict[str, tuple[float, ...]] = {f"cap {cap:g}": (min(cap, total / MIB),) for cap in CAPS_MB}
    of_rule = search.rule_caps_mb
    caps["rule, one cap"] = (of_rule[min(1, len(of_rule) - 1)],)
    caps |= {f"rule x {factor:g}": tuple(factor * cap for cap in of_rule) for factor in FACTORS}
    plans = {name: search.assigned(bucket_cap_mb_list=one) for name, one in caps.items()}
    dropped = "best single cap", "each gradient alone", RULE
    plans |= {name: plan for name, plan in search.rules.items() if name not in dropped}
    return {
        **asked,
        "computation": times.trace.ranks[0].iterations[0].duration_ns / 1e6,
        "gradients MB": total / 1e6,
        "all-reduce of all": all_ns / 1e6,
        "all-reduce of 1 MiB": mib_ns / 1e6,
        "rule MiB": of_rule[min(1, len(of_rule) - 1)],
        "rule doubles": int(len(of_rule) > 1),
        "best": best_ns / 1e6,
        "bound": min(best_ns, lower_bound_ns(search.costs)) / 1e6,
        "best cap MiB": search.best_cap_mb,
        "low": low / 1e6,
        "high": high / 1e6,
        **{f"{name} ties": int(predicted[name].compare(predicted["best"]).is_tie) for name in ("default", "rule")},
        **{name: times.value_ns(plan) / 1e6 for name, plan in plans.items()},
    }


def study() -> list[dict[str, object]]:
    """All rows, made by all processors."""
    every = [(model, *system, gpus) for model, system, gpus in product(MODELS, systems(), GPUS)]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        return list(filter(None, pool.map(row_of, *zip(*every, strict=True), chunksize=12)))


def rounded(value: object) -> object:
    """Return a value as the table has it: numbers with six digits."""
    return f"{value:.6g}" if isinstance(value, float) else value


# What the table shows


def rows_of_table() -> list[Row]:
    """The committed rows, as text by column."""
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def regret(row: Row, column: str) -> float:
    """The iteration of a column over that of the best buckets, minus one."""
    return float(row[column]) / float(row["best"]) - 1


def summary(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """A table with the mean, the 95th percentile and the worst regret of each column, in percent."""
    lines = ["| buckets by | mean | 95 % below | worst | over 5 % |", "| --- | ---: | ---: | ---: | ---: |"]
    for column in columns:
        lost = sorted(100 * regret(row, column) for row in rows)
        many = sum(one > 5 for one in lost) / len(lost)
        lines.append(
            f"| {column} | {fmean(lost):.1f} | {lost[int(0.95 * len(lost))]:.1f} | {lost[-1]:.1f} | {many:.0%} |"
        )
    return "\n".join(lines)


def left_out(rows: Sequence[Row], by: str, candidates: Sequence[str]) -> tuple[float, float, Counter[str]]:
    """Choose a rule without one model or system at a time; return mean and worst regret there, and the choices."""
    lost, chosen = [], Counter[str]()
    for value in sorted({row[by] for row in rows}):
        others = [row for row in rows if row[by] != value]
        rule = min(candidates, key=lambda column: fmean(regret(row, column) for row in others))
        lost += [regret(row, rule) for row in rows if row[by] == value]
        chosen[rule] += 1
    return fmean(lost), max(lost), chosen


class Swept(NamedTuple):
    """A published time with one cap over that with the swept cap next to torch's 25 MB, minus one."""

    sweep: str
    cap_mb: float
    measured: float
    predicted: float

    @property
    def verdict(self) -> str:
        """Whether both have one sign, or are ties within `SWEEP_NOISE`; or one of them is, or they contradict."""
        ours, theirs = (0 if abs(one) < SWEEP_NOISE else one for one in (self.predicted, self.measured))
        return "agree" if ours * theirs > 0 or ours == theirs == 0 else "contradict" if ours * theirs else "one ties"


def published() -> list[Swept]:
    """Measured and predicted times of each published sweep of caps: parts (b) and (e) of the score."""
    measured: dict[str, dict[float, float]] = {}
    predicted: dict[str, dict[float, float]] = {}
    for case in map(load_case, sorted(CASES.glob("*.toml"))):
        if isinstance(case, BucketCapsCase):
            for reducer in case.inputs.reducers:
                name = f"{reducer.name}, {reducer.gpus} GPUs"
                measured[name] = {row.cap_mb: row.ms for row in case.truth if row.reducer == reducer.name}
                predicted[name] = {cap: predict_ns(case.inputs, reducer, cap)["predicted"] for cap in measured[name]}
        elif isinstance(case, IterationsCase):
            for row in part_b_iterations.score(case).rows:
                cap, _, gpus = row.label.partition(" MB, ")
                name = f"{row.group}, {gpus}"
                measured.setdefault(name, {})[float(cap)] = row.measured_ns
                predicted.setdefault(name, {})[float(cap)] = row.predicted_ns
    rows = []
    for name, times in measured.items():
        middle = min(times, key=lambda cap: abs(log2(cap / 25)))
        relative = [{cap: one[cap] / one[middle] - 1 for cap in one} for one in (times, predicted[name])]
        rows += [Swept(name, cap, relative[0][cap], relative[1][cap]) for cap in sorted(times) if cap != middle]
    return rows


def show() -> None:
    """Print the tables."""
    rows = rows_of_table()
    columns = [one for one in rows[0] if one.startswith(("cap ", "rule, ", "rule x "))]
    known = list(rows[0])[list(rows[0]).index(columns[-1]) + 1 :]
    print(f"{len(rows)} rows\n\n{summary(rows, [*known, *columns])}\n")
    rules = [one for one in columns if one.startswith("rule x ")]
    for kind in ("slow networks", "the others"):
        some = [row for row in rows if ("Gbit/s" in row["system"]) == (kind == "slow networks")]
        print(f"{kind}\n\n{summary(some, [*known, *columns])}\n")
    for by in ("model", "system"):
        mean, worst, chosen = left_out(rows, by, rules)
        print(f"left out by {by}: mean {mean:.2%}, worst {worst:.1%}; chosen {dict(chosen)}")
    gap = fmean(float(row["best"]) / float(row["bound"]) - 1 for row in rows)
    ties = [fmean(int(row[f"{name} ties"]) for row in rows) for name in ("default", "rule")]
    print(f"best above its bound: {gap:.2%}; ties with the best: default {ties[0]:.0%}, rule {ties[1]:.0%}\n")
    sweeps = published()
    print("| sweep | cap, MB | measured | predicted | |\n| --- | ---: | ---: | ---: | --- |")
    for row in sweeps:
        print(f"| {row.sweep} | {row.cap_mb:g} | {row.measured:+.1%} | {row.predicted:+.1%} | {row.verdict} |")
    apart = sorted(abs(row.measured - row.predicted) for row in sweeps)
    print(f"{dict(Counter(row.verdict for row in sweeps))}; apart: median {median(apart):.1%}, most {apart[-1]:.1%}")


def main() -> None:
    """Make the table, or print from it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="only print, from the committed table")
    if parser.parse_args().print:
        show()
    else:
        start = time.monotonic()
        rows = study()
        with TABLE.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows({name: rounded(value) for name, value in row.items()} for row in rows)
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        print(f"{len(rows)} rows in {time.monotonic() - start:.0f} s, {used:.0f} s of processors")


if __name__ == "__main__":
    main()
