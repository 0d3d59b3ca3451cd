"""`ddplab tune`: fast buckets for a trace on a fabric, and a bound that no buckets beat."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Option

from ..reference.files.writing import milliseconds
from ..reference.trace import Trace
from ..simulator.inputs_with_default_costs import Inputs, complete
from ..simulator.predicted_iteration import Comparison
from ..simulator.prediction import System, predict
from ..simulator.schedule.policy import Policy
from ..simulator.schedule.schedule import buckets_of
from ..simulator.tuning.bucket_plan import DEFAULT, RULE, BucketPlan
from ..simulator.tuning.plan_times import Objective
from ..simulator.tuning.tune import roundest_mb, tuned
from ..simulator.workload.compute_times import RecordedModel, recorded_model
from . import shared_options as options
from .predict import assumptions
from .terminal_output import progress, say, show_table, write_json

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
CHOSEN = ("bucket_cap_mb", "bucket_cap_mb_list", "plan", "order")
"""Fields of `Policy` that the plan replaces."""

HELP = {
    "objective": f"Statistic of the iteration time that should be short: {', '.join(OBJECTIVES)}.",
    "verify": "`virtual` runs the real reducers with torch's default and with the plan, in virtual time.",
}


def tune(
    trace: options.TraceFile,
    fabric: options.FabricFiles = None,
    world_size: options.WorldSize = 2,
    objective: Annotated[str, Option(metavar="NAME", help=HELP["objective"])] = "median",
    changes: options.Changes = None,
    out: Annotated[Path, Option(metavar="PATH", help="Where to write the plan.")] = Path("out/plan.json"),
    verify: Annotated[str | None, Option(metavar="HOW", help=HELP["verify"])] = None,
    json_path: options.Json = None,
) -> None:
    """Find the buckets with the shortest iteration, and how much any buckets could gain.

    The first sentence is the answer: use these buckets, or keep torch's default if the gain lies within the errors of
    the costs. The table compares torch's default, the best single cap and known rules with the plan, and with a bound
    that no buckets beat. Below it are the arguments for torch's class and for ddplab's.

    `validate --plan` trains torch's default and the plan in turns, and compares measured and predicted gain.
    """
    if verify not in (None, "virtual"):
        raise ValueError(f"--verify: expected virtual, got {verify!r}; to train by the clock: ddplab validate --plan")
    if objective not in OBJECTIVES:
        raise ValueError(f"--objective: expected one of {', '.join(OBJECTIVES)}; got {objective!r}")
    files = fabric or [options.FABRIC]
    options.check_outputs(out, json_path, inputs=[trace, *files])
    asked = options.read_settings(changes, refused=dict.fromkeys(CHOSEN, "none, because tune chooses the buckets,"))
    base, recorded = asked.policy, Trace.load(trace)
    inputs = complete(recorded, asked.fabric(files), policy=base, variation=asked.variation)
    with progress("tuning"):
        plan = tuned(inputs, world_size, objective)
    system = System(inputs)
    default = system.at(world_size, inputs.with_policy(bucket_cap_mb=None))
    comparison = default.compare(system.at(world_size, inputs.with_policy(plan=plan.buckets)))
    say(answer(plan, comparison))
    on = f"{recorded.workload.described}, on {world_size} rank{'s' * (world_size > 1)}"
    show_table(plan_rows(plan, comparison), f"{on}: predicted iteration ({plan.objective}) by buckets")
    plan.save(out)
    for line in (
        *to_paste(plan, recorded_model(recorded, unused_allowed=base.unused_allowed), out),
        *assumptions(recorded, plan.assumed, inputs.fabric, [base]),
    ):
        say(line)
    answers = {"default_ns": plan.default_ns, "gain": plan.gain, "gap": plan.gap}
    result = plan.model_dump(mode="json") | answers | {"gain_interval": list(gain_interval(comparison))}
    if verify is not None:
        result["verification"] = verify_in_virtual_time(inputs, plan, world_size)
    write_json(json_path, result)


# What is printed


def decimals(width: float) -> int:
    """Return how many decimals to print of a value whose 90 % interval is so wide; at most 3."""
    return 3 if width <= 0 else min(3, max(0, math.ceil(-math.log10(width / 2))))


def gain_interval(comparison: Comparison) -> tuple[float, float]:
    """Return the 90 % interval of the gain over torch's default, as fractions of its time.

    Where the default takes longer than its median, the gain is a part of that longer time.
    """
    low_ns, high_ns = comparison.difference_interval_ns
    plan_ns = comparison.other.iteration_ns
    return -high_ns / max(1, plan_ns - high_ns), -low_ns / max(1, plan_ns - low_ns)


def answer(plan: BucketPlan, comparison: Comparison) -> str:
    """Return the recommendation in one sentence."""
    most = math.ceil(1000 * plan.gap) / 1000  # rounded up, because none saves more
    if plan.buckets == comparison.baseline.buckets:
        return f"keep torch's default: no other buckets were found to be faster, and none saves over {most:.1%}"
    low, high = gain_interval(comparison)
    digits = decimals(100 * (high - low))
    gain = f"{plan.gain:.{digits}%}"
    if plan.objective == "median":
        gain += f" ({low:.{digits}%} to {high:.{digits}%})"
    is_one = len(plan.buckets) == 1
    buckets = "one bucket" if is_one else f"{len(plan.buckets)} buckets"
    if plan.keep_default:
        return f"keep torch's default: the gain of {gain} by {buckets} lies within the errors of the costs"
    free = "; costs that count as free are not in it" if comparison.baseline.counted_as_free else ""
    left = f"no buckets save over {most:.1%} more" if most else "nothing is left to tune"
    return f"use {'' if is_one else 'these '}{buckets}: a gain of {gain} over torch's default{free}; {left}"


def plan_rows(plan: BucketPlan, comparison: Comparison) -> list[dict[str, str]]:
    """Return the rows of the table: torch's default, the plan, all known rules and the bound."""
    (low_ns, high_ns), (low, high) = plan.interval_ns, gain_interval(comparison)
    digits, percent = decimals((high_ns - low_ns) / 1e6), decimals(100 * (high - low))

    def row(name: str, buckets: int | None, ns: int) -> dict[str, str]:
        return {
            "name": name,
            "buckets": "" if buckets is None else str(buckets),
            "iteration ms": f"{milliseconds(ns, f'.{digits}f')}",
            "gain": f"{1 - ns / max(1, plan.default_ns):+.{percent}%}",
            "regret": "" if buckets is None else f"{ns / max(1, plan.iteration_ns) - 1:.{percent}%}",
        }

    kind = "no list of caps makes it" if plan.bucket_cap_mb_list is None else "a list of caps"
    rules = sorted(plan.baselines, key=lambda rule: rule.name != DEFAULT)
    names = {"best single cap": f"best single cap, {plan.best_cap_mb:.3g} MB"}
    rows = [row(names.get(rule.name, rule.name), rule.buckets, rule.iteration_ns) for rule in rules]
    rows.insert(1, row(f"plan, {kind}", len(plan.buckets), plan.iteration_ns))
    return [*rows, row("bound that no buckets beat", None, plan.lower_bound_ns)]


def to_paste(plan: BucketPlan, model: RecordedModel, out: Path) -> list[str]:
    """Return the arguments with which torch's class and ddplab's use the plan, saved as `out`; one line each."""
    if plan.bucket_cap_mb_list is None:
        of_torch = (
            "torch's class: no list of caps makes these buckets; the best single cap is "
            f"bucket_cap_mb={plan.best_cap_mb:.6g}"
        )
    else:
        caps_mb = short_caps_mb(plan.bucket_cap_mb_list, plan.buckets, model)
        of_torch = (
            f"torch's class or ddplab's: bucket_cap_mb_list={list(caps_mb)} makes these buckets at the rebuild, from "
            "the second iteration on"
        )
    caps = ", ".join(f"{cap:g}" for cap in plan.rule_caps_mb)
    argument = f"bucket_cap_mb_list=[{caps}]" if len(plan.rule_caps_mb) > 1 else f"bucket_cap_mb={caps}"
    regret = next(one.regret for one in plan.baselines if one.name == RULE)
    beside = "a tie with the plan" if plan.rule_ties else f"{regret:.1%} longer than with the plan"
    rule = f"by the rule of docs/bucket_size.md: {argument}, {beside}"
    return [of_torch, rule, f"ddplab's class: plan=ddplab.BucketPlan.load({str(out)!r}).buckets"]


def short_caps_mb(
    caps_mb: Sequence[float], buckets: Sequence[Sequence[int]], model: RecordedModel
) -> Sequence[float]:
    """Return caps with as few decimals as make the same buckets, or `caps_mb`, which make them, if that fails.

    A cap between the size of a bucket and its size without any one of its parameters closes the bucket at the same
    place, unless there are several dtypes, each of which counts its buckets from the first cap.
    """
    sizes_bytes = ([model.parameters[index].size_bytes for index in bucket] for bucket in buckets)
    short = [roundest_mb(sum(one) - min(one), sum(one)) for one in sizes_bytes]
    made = buckets_of(Policy(bucket_cap_mb_list=tuple(short)), model)
    return short if list(map(sorted, made)) == list(map(sorted, buckets)) else caps_mb


# Verification


def verify_in_virtual_time(inputs: Inputs, plan: BucketPlan, world_size: int) -> list[dict[str, Any]]:
    """Run both real reducers in virtual time, where they take the predicted time to the nanosecond; print the times.

    Copies and launches of torch's class count as free; it does not run a plan that no list of caps makes. Returns a
    row for each reducer, with torch's default and with the plan; times in nanoseconds.
    """
    from ..emulation.emulate import emulate, emulated_fabric

    planned: dict[str, dict[str, Any]] = {"ddplab": {"plan": plan.buckets}}
    if plan.bucket_cap_mb_list is not None:
        planned["torch"] = {"bucket_cap_mb_list": plan.bucket_cap_mb_list}
    rows: list[dict[str, Any]] = []
    for reducer, changes in planned.items():
        costs = emulated_fabric(inputs.fabric, reducer)
        for buckets, update in ((DEFAULT, {"bucket_cap_mb": None}), ("plan", changes)):
            how: dict[str, Any] = {"policy": inputs.policy.model_copy(update=update), "assume": False}
            emulated = emulate(inputs.trace, costs, reducer=reducer, world_size=world_size, **how)
            predicted = predict(inputs.trace, costs, world_size=world_size, **how)
            times = {"emulated_ns": emulated.iteration_ns, "predicted_ns": predicted.iteration_ns}
            rows.append({"class": reducer, "buckets": buckets, **times})
    cells = [
        {
            "name": f"{row['class']}, {row['buckets']}",
            "emulated ms": milliseconds(row["emulated_ns"], ".3f"),
            "predicted ms": milliseconds(row["predicted_ns"], ".3f"),
            "difference ns": str(row["emulated_ns"] - row["predicted_ns"]),
        }
        for row in rows
    ]
    free = "; copies and launches of torch's class are free" if "torch" in planned else ""
    show_table(cells, f"verified in virtual time, on {world_size} rank{'s' * (world_size > 1)} of equal speed{free}")
    for default, of_plan in zip(rows[::2], rows[1::2], strict=True):
        say(f"{of_plan['class']}: gain {1 - of_plan['emulated_ns'] / max(1, default['emulated_ns']):.2%}")
    return rows
