"""`ddplab tune`: fast buckets for a trace on a fabric, a bound that no buckets beat, and the measured gain."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import numpy as np
from typer import Option

from reference.bucketing import MIB
from reference.fork_server import start_server
from reference.trace import Trace
from simulator.fabric import Fabric
from simulator.prediction import Comparison, predict
from simulator.schedule.policy import Policy
from simulator.schedule.schedule import buckets_of
from simulator.tuning.plan import DEFAULT, Plan
from simulator.tuning.plan_times import Objective, PlanTimes
from simulator.tuning.tune import tune as search
from simulator.workload.compute_times import RecordedModel, recorded_model
from simulator.workload.default_gpu_costs import assume_gpu

from . import shared_options as options
from .predict_many import assumptions
from .terminal_output import conditions_sentence, progress, show_table, write_json

if TYPE_CHECKING:
    from ..validation.plan_verification import GainCheck, PlanVerification, TrainedTimes

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
CURVE_CAPS = 48
"""Caps on the curve of the picture, evenly spaced in logarithms."""
CURVE_SPAN = 1000
"""Ratio of the largest and the smallest cap on the curve."""
NOTHING_LEFT = 0.01
"""What other buckets might save at most, as a fraction, below which there is nothing left to tune."""
CHOSEN = ("bucket_cap_mb", "bucket_cap_mb_list", "plan", "order")
"""Fields of `Policy` that the plan replaces."""

HELP = {
    "objective": f"Statistic of the iteration time that should be short: {', '.join(OBJECTIVES)}.",
    "in_flight": "Limit for the sum of the buckets that are launched and not yet averaged at the same time, in MB.",
    "out": "Where to write the plan.",
    "picture": "Plot iteration time against the bucket cap to this file (.png, .svg, .pdf).",
    "verify": "Train torch's default and the plan in turns, and compare the measured gain with the predicted one: "
    "`virtual` (in virtual time, exact), `clock` (on emulated devices) or `train` (real computation).",
    "model": "With --verify train: the model to train. Default: that of the trace.",
    "turns": "With --verify clock or train: turns of default and plan; a turn measures 3 iterations of each.",
    "link_rate": "With --verify clock: train over virtual links of this rate, such as 10gbit, which are calibrated "
    "first; requires Linux and root. Without it, collectives take the times of the fabric.",
    "folder": "With --verify clock: folder for what is calibrated.",
}


def tune(
    trace: options.TraceFile,
    fabric: options.FabricFiles = None,
    world_size: options.WorldSize = 2,
    objective: Annotated[str, Option(metavar="NAME", help=HELP["objective"])] = "median",
    in_flight: Annotated[float | None, Option(metavar="MB", help=HELP["in_flight"])] = None,
    changes: options.Changes = None,
    out: Annotated[Path, Option(metavar="PATH", help=HELP["out"])] = Path("out/plan.json"),
    picture: Annotated[Path | None, Option(metavar="PATH", help=HELP["picture"])] = None,
    verify: Annotated[str | None, Option(metavar="HOW", help=HELP["verify"])] = None,
    model: Annotated[str | None, Option(metavar="MODEL", help=HELP["model"], show_default=False)] = None,
    turns: Annotated[int | None, Option(min=1, metavar="N", help=HELP["turns"], show_default="8")] = None,
    link_rate: Annotated[str | None, Option(metavar="RATE", help=HELP["link_rate"])] = None,
    dilation: options.Dilation = 1.0,
    byte_scale: options.ByteScale = 1.0,
    folder: Annotated[Path | None, Option(metavar="FOLDER", help=HELP["folder"], show_default="out/tune")] = None,
    json_path: options.Json = None,
) -> None:
    """Find the buckets with the shortest iteration, and how much any buckets could gain.

    The first sentence is the answer: use these buckets, or keep torch's default if the gain lies within the errors of
    the costs. The table compares torch's default, the best single cap and known rules with the plan, and with a bound
    that no buckets beat. Below it are the arguments for torch's class and for ddplab's.

    With --verify, torch's default and the plan then train in turns, and the measured gain is compared with the
    predicted one.
    """
    how = Verification(verify, model, turns, link_rate, dilation, byte_scale, folder)
    how.check()
    if objective not in OBJECTIVES:
        raise ValueError(f"--objective: expected one of {', '.join(OBJECTIVES)}; got {objective!r}")
    if in_flight is not None and not 0 < in_flight < math.inf:
        raise ValueError(f"--in-flight: expected a size in MB above 0, got {in_flight:g}")
    options.check_picture("--picture", picture)
    files = fabric or [options.FABRIC]
    read = [trace, *files, *options.files_of(model or "")]
    options.check_outputs(out, picture, json_path, inputs=read, folder=how.folder if verify == "clock" else None)
    settings = options.read_settings(
        changes, refused=dict.fromkeys(CHOSEN, "none, because tune chooses the buckets,")
    )
    base, recorded = settings.policy, Trace.load(trace)
    completed = assume_gpu(recorded, settings.fabric(files), settings.variation)
    costs = completed.fabric
    varied: dict[str, Any] = {"variation": completed.variation, "assume": False}
    with progress("tuning"):
        plan = search(
            recorded,
            costs,
            world_size=world_size,
            objective=objective,
            in_flight_bytes=None if in_flight is None else max(1, round(in_flight * MIB)),
            policy=base,
            **varied,
        )
    forecast = partial(predict, recorded, costs, world_size=world_size, **varied)
    default = forecast(policy=with_buckets(base, bucket_cap_mb=None))
    comparison = default.compare(forecast(policy=with_buckets(base, plan=plan.buckets)))
    print(answer(plan, comparison))
    title = f"{recorded.workload.described}, on {world_size} ranks: predicted iteration ({plan.objective}) by buckets"
    show_table(plan_rows(plan, comparison), title)
    plan.save(out)
    for line in (
        *to_paste(plan, recorded_model(recorded, unused_allowed=base.unused_allowed), out),
        *assumptions("the trace", recorded, (*completed.sentences, *plan.assumed), [costs], [base]),
    ):
        print(line)
    if picture is not None:
        times = PlanTimes(recorded, costs, world_size, base, completed.variation, (), plan.objective)
        _save_cap_curve(plan, times, picture)
    result: dict[str, Any] = plan.model_dump(mode="json") | {
        "default_ns": plan.default_ns,
        "gain": plan.gain,
        "gain_interval": list(gain_interval(comparison)),
        "gap": plan.gap,
    }
    if verify is not None:
        verified = how.run(recorded, costs, plan, base)
        show_verification(verified)
        result["verification"] = verified.to_json()
    write_json(json_path, result)


def with_buckets(policy: Policy, **buckets: Any) -> Policy:
    """Return the policy with other fields that determine the buckets."""
    return policy.model_copy(update=buckets)


# What is printed


def decimals(width: float) -> int:
    """Return how many decimals to print of a value whose 90 % interval is so wide; at most 3."""
    return 3 if width <= 0 else min(3, max(0, math.ceil(-math.log10(width / 2))))


def gain_interval(comparison: Comparison) -> tuple[float, float]:
    """Return the 90 % interval of the gain over torch's default, as fractions of its time."""
    low_ns, high_ns = comparison.difference_interval_ns
    default_ns = max(1, comparison.baseline.iteration_ns)
    return -high_ns / default_ns, -low_ns / default_ns


def gain_decimals(comparison: Comparison) -> int:
    """Return how many decimals to print of a gain in percent."""
    low, high = gain_interval(comparison)
    return decimals(100 * (high - low))


def time_decimals(plan: Plan) -> int:
    """Return how many decimals to print of an iteration time in milliseconds."""
    low_ns, high_ns = plan.interval_ns
    return decimals((high_ns - low_ns) / 1e6)


def answer(plan: Plan, comparison: Comparison) -> str:
    """Return the recommendation in one sentence."""
    if plan.buckets == comparison.baseline.buckets:
        return f"keep torch's default: no other buckets were found to be faster, and none saves over {plan.gap:.1%}"
    digits = gain_decimals(comparison)
    gain = f"{plan.gain:.{digits}%}"
    if plan.objective == "median":
        low, high = gain_interval(comparison)
        gain += f" ({low:.{digits}%} to {high:.{digits}%})"
    buckets = f"{len(plan.buckets)} bucket{'s' * (len(plan.buckets) != 1)}"
    if plan.keep_default:
        why = "lies within the errors of the costs" if comparison.is_tie else "is below the unexplained error"
        return f"keep torch's default: the gain of {gain} by {buckets} {why}"
    left = "nothing is left to tune" if plan.gap < NOTHING_LEFT else f"no buckets save over {plan.gap:.1%} more"
    return f"use these {buckets}: a gain of {gain} over torch's default; {left}"


def plan_rows(plan: Plan, comparison: Comparison) -> list[dict[str, str]]:
    """Return the rows of the table: torch's default, the plan, all known rules and the bound."""
    digits, percent = time_decimals(plan), gain_decimals(comparison)

    def row(name: str, buckets: int | None, ns: int) -> dict[str, str]:
        return {
            "name": name,
            "buckets": "" if buckets is None else str(buckets),
            "iteration ms": f"{ns / 1e6:.{digits}f}",
            "gain": f"{1 - ns / max(1, plan.default_ns):+.{percent}%}",
            "regret": "" if buckets is None else f"{ns / max(1, plan.iteration_ns) - 1:.{percent}%}",
        }

    kind = "no list of caps makes it" if plan.bucket_cap_mb_list is None else "a list of caps"
    rules = sorted(plan.baselines, key=lambda rule: rule.name != DEFAULT)
    names = {"best single cap": f"best single cap, {plan.best_cap_mb:.3g} MB"}
    rows = [row(names.get(rule.name, rule.name), rule.buckets, rule.iteration_ns) for rule in rules]
    rows.insert(1, row(f"plan, {kind}", len(plan.buckets), plan.iteration_ns))
    return [*rows, row("bound that no buckets beat", None, plan.lower_bound_ns)]


def to_paste(plan: Plan, model: RecordedModel, out: Path) -> list[str]:
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
    return [of_torch, f"ddplab's class: plan=simulator.Plan.load({str(out)!r}).buckets"]


def short_caps_mb(
    caps_mb: Sequence[float], buckets: Sequence[Sequence[int]], model: RecordedModel
) -> Sequence[float]:
    """Return caps with as few decimals as make the same buckets, or `caps_mb`, which make them, if that fails.

    A cap between the size of a bucket and its size without any one of its parameters closes the bucket at the same
    place, unless there are several dtypes, each of which counts its buckets from the first cap.
    """
    sizes_bytes = [parameter.size_bytes for parameter in model.parameters]
    short = []
    for exact, bucket in zip(caps_mb, buckets, strict=True):
        size = sum(sizes_bytes[index] for index in bucket)
        least = size - min(sizes_bytes[index] for index in bucket)
        rounded = (math.floor(size / MIB * 10**digits) / 10**digits for digits in range(12))
        short.append(next((cap for cap in rounded if least < int(cap * MIB) <= size), exact))
    made = buckets_of(Policy(bucket_cap_mb_list=tuple(short)), model)
    return short if list(map(sorted, made)) == list(map(sorted, buckets)) else caps_mb


def _save_cap_curve(plan: Plan, times: PlanTimes, path: Path) -> None:
    from matplotlib.figure import Figure  # loading matplotlib takes longer than a prediction

    from simulator.results.cap_curve import draw_cap_curve

    total_mb = sum(times.trace.sizes_bytes) / MIB
    caps_mb = {plan.best_cap_mb, *np.geomspace(total_mb / CURVE_SPAN, total_mb, CURVE_CAPS).tolist()}

    def ns(cap_mb: float) -> int:
        buckets = buckets_of(with_buckets(times.policy, bucket_cap_mb=cap_mb), times.recorded)
        return times.value_ns(tuple(map(tuple, buckets)))

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    draw_cap_curve(
        {cap_mb: ns(cap_mb) for cap_mb in caps_mb},
        figure.add_subplot(),
        best_cap_mb=plan.best_cap_mb,
        default_ns=plan.default_ns,
        plan_ns=plan.iteration_ns,
        lower_bound_ns=plan.lower_bound_ns,
        is_list=plan.bucket_cap_mb_list is not None,
        decimals=time_decimals(plan),
    )
    options.save_picture(figure, path)


# Verification


@dataclass(frozen=True)
class Verification:
    """Options of --verify; None: not given."""

    how: str | None
    model: str | None
    turns: int | None
    link_rate: str | None
    dilation: float
    byte_scale: float
    out: Path | None

    @property
    def folder(self) -> Path:
        """Folder for what is calibrated."""
        return self.out or Path("out/tune")

    def check(self) -> None:
        """Raise a ValueError for an unknown way, and for options that it does not have."""
        if self.how not in (None, "virtual", "clock", "train"):
            raise ValueError(f"--verify: expected virtual, clock or train, got {self.how!r}")
        of_clock = {
            "--link-rate": self.link_rate,
            "--dilation": self.dilation != 1,
            "--byte-scale": self.byte_scale != 1,
            "--folder": self.out,
        }
        if self.how != "clock":
            options.refuse(of_clock, "expected with --verify clock only")
        if self.how != "train":
            options.refuse({"--model": self.model}, "expected with --verify train only")
        if self.how not in ("clock", "train"):
            options.refuse({"--turns": self.turns}, "expected with --verify clock or train only")

    def run(self, trace: Trace, fabric: Fabric, plan: Plan, policy: Policy) -> "PlanVerification":
        """Train torch's default and the plan, in virtual time with the recorded iterations."""
        if self.how != "virtual":
            start_server()  # it imports torch while this process does
        from ..validation import plan_verification as verification

        training = verification.PlannedTraining(
            trace=trace,
            world_size=plan.world_size,
            policy=policy,
            buckets=plan.buckets,
            caps_mb=plan.bucket_cap_mb_list,
        )
        if self.how == "virtual":
            return verification.verify_in_virtual_time(training, fabric, assume=False)
        from reference.launch import RankPool, default_backend, spread_members

        ranks, turns = plan.world_size, self.turns or verification.TURNS
        if self.how == "train":
            model = self.model or trace.workload.model
            pool = RankPool(ranks, backend=default_backend(ranks), pinned=True)
            with progress() as on_progress, pool:
                return verification.verify_by_training(
                    training, pool, model, fabric, turns=turns, on_progress=on_progress
                )
        scale = options.read_scale(self.dilation, self.byte_scale)
        rate, _ = options.read_links(self.link_rate, None, scale)
        pool = RankPool(ranks, link_rate=rate, members=spread_members(ranks))
        modelled = fabric if rate is None else None
        with progress() as on_progress, pool:
            return verification.verify_by_the_clock(
                training, pool, out=self.folder, scale=scale, turns=turns, modelled=modelled, on_progress=on_progress
            )


TITLES = {
    "virtual": "in virtual time",
    "clock": "on emulated devices by the clock",
    "train": "with real computation",
}
"""How the ways of verification are called."""


def show_verification(verified: "PlanVerification") -> None:
    """Print predicted and measured times of default and plan, and the gain of each reducer."""
    digits = 3 if verified.how == "virtual" else 1
    rows = [
        _times_row(check.reducer, name, times, digits)
        for check in verified.checks
        for name, times in ((DEFAULT, check.default), ("plan", check.plan))
    ]
    show_table(rows, f"verified {TITLES[verified.how]}, on {verified.world_size} ranks; iteration in ms")
    for check in verified.checks:
        print(gain_sentence(check, exact=verified.how == "virtual"))
    if verified.conditions is not None:
        print(conditions_sentence(verified.conditions))


def _times_row(reducer: str, name: str, times: "TrainedTimes", digits: int) -> dict[str, str]:
    return {
        "name": f"{reducer}, {name}",
        "predicted": f"{times.predicted_ns / 1e6:.{digits}f}",
        "measured": f"{times.measured_ns / 1e6:.{digits}f}",
        "quartiles": "-".join(f"{ns / 1e6:.{digits}f}" for ns in times.quartiles_ns),
    }


def gain_sentence(check: "GainCheck", *, exact: bool) -> str:
    """Return the measured gain beside the predicted one; `exact` is whether they are equal if all is right."""
    if exact:
        off_ns = max(abs(times.measured_ns - times.predicted_ns) for times in (check.default, check.plan))
        return (
            f"{check.reducer}: gain {check.measured_gain:.2%}, predicted {check.predicted_gain:.2%}; the iterations "
            f"differ from the predicted ones by {off_ns} ns"
        )
    interval, digits, band = check.gain_interval, 1, "too few turns for an interval"
    if interval is not None:
        low, high = interval
        digits = decimals(100 * (high - low))
        band = f"90 %: {low:.{digits}%} to {high:.{digits}%}"
    measured, predicted = (f"{gain:.{digits}%}" for gain in (check.measured_gain, check.predicted_gain))
    return f"{check.reducer}: gain {measured} ({band}), predicted {predicted}"
