"""`ddplab predict` and `ddplab sweep`: predict iteration times for several settings, or for all combinations."""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from itertools import product
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from typer import Argument, Option

from reference.trace import Trace
from simulator.cost_terms import Effect, Inputs, explain, leave_out, origins
from simulator.fabric import Fabric
from simulator.interval import COMPUTATION
from simulator.prediction import Prediction
from simulator.prediction import predict as predict_one
from simulator.profiler_import.trace_of_profile import HOST_BOUND, host_bound
from simulator.results.breakdown import PARTS
from simulator.results.scaling_verdict import TARGET, counted, network_need, width_sentence
from simulator.schedule.policy import Policy
from simulator.step_costs import counted_as_free
from simulator.sweep import AXES, COLUMNS, TABLE_WRITERS, save_table
from simulator.sweep import sweep as sweep_all
from simulator.workload.compute_times import Variation
from simulator.workload.default_gpu_costs import assume_gpu

from . import shared_options as options
from .terminal_output import progress, show_table, write_json

if TYPE_CHECKING:
    import pandas as pd

SPARED = ("hook", "critical buckets", "computation ms", "buckets")
"""Columns to leave out on a narrow terminal, the first one first."""


def predict(
    trace: options.TraceFile,
    fabric: options.FabricFiles = None,
    world_size: options.WorldSize = 2,
    caps: options.ChosenCaps = None,
    orders: options.ChosenOrders = None,
    hooks: options.Hooks = "none",
    policy: options.Settings = None,
    fabric_set: options.FabricSettings = None,
    processor: options.ProcessorFile = None,
    variation: options.VariationSettings = None,
    straggler: options.Stragglers = None,
    inputs: options.Inputs = None,
    measured: options.Measured = None,
    without: options.Without = None,
    explains: options.Explain = False,  # noqa: FBT002
    perfetto: options.PerfettoFile = None,
    timeline: options.TimelinePicture = None,
    json_path: options.Json = None,
) -> None:
    """Predict the iteration time for each combination of bucket cap, order and comm hook.

    The table shows the median iteration time, an interval that contains 90 % of the iterations, the time of
    computation alone, the time that data parallelism adds (copies, slower computation, waiting), and the buckets on
    the critical path. Costs that are unknown are listed below the table, followed by a breakdown of the fastest
    configuration, the two largest parts of its iteration, and the configurations that are as fast within the
    intervals. The verdict says how much of the ranks' time becomes training, and how fast the network must be for
    90 %. A trace of one rank is enough for any world size.
    """
    options.check_picture("--timeline", timeline)
    options.check_outputs(perfetto, timeline, json_path, inputs=[trace, *(fabric or [options.FABRIC]), processor])
    base, policies = read_policies(policy, caps, orders, hooks)
    left_out = without.split(",") if without else []
    recorded = Trace.load(trace)
    given = options.read_fabric(fabric or [options.FABRIC], fabric_set, processor)
    asked = Inputs(given, options.read_variation(variation), base)
    costs, varied, assumed = assume_gpu(recorded, given, asked.variation)
    with options.naming("--without"):
        costs, varied, _ = leave_out(left_out, Inputs(costs, varied, base))
        policies = [leave_out(left_out, Inputs(costs, varied, one)).policy for one in policies]
    settings: dict[str, Any] = {
        "world_size": world_size,
        "stragglers": options.read_stragglers(straggler),
        "inputs": None if inputs is None else options.read_counts("--inputs", inputs, least=0),
    }
    predict_policy = partial(predict_one, recorded, fabric=costs, variation=varied, assume=False, **settings)

    def anchored(prediction: Prediction) -> Prediction:
        return prediction.anchored(world_size, anchors, on_few) if anchors else prediction

    on_few: dict[int, Prediction] = {}
    if anchors := options.read_measured(measured) or {}:
        options.refuse(
            {"--measured": inputs}, "expected none with --inputs: an epoch of Join has no steady iteration"
        )
        run = policies[0] if len(policies) == 1 else base
        with options.naming("--measured"):
            on_few = {
                ranks: predict_one(recorded, costs, world_size=ranks, policy=run, variation=varied, assume=False)
                for ranks in anchors
            }
    predictions = [anchored(predict_policy(policy=one)) for one in policies]
    model = recorded.workload.model
    title = f"{recorded.workload.described}, on {world_size} ranks, predicted"
    show_table(list(map(_prediction_row, policies, predictions)), title, optional=SPARED)
    fastest = min(predictions, key=lambda prediction: prediction.iteration_ns)
    moves = [anchor.sentence() for anchor in fastest.anchors]
    assumed = *assumed, *(sentence for one in predictions for sentence in one.assumed)
    from_where = origins(recorded, asked, Inputs(costs, varied, policies[0]), world_size)
    print(origins_sentence(from_where))
    for sentence in (*moves, *assumptions("the trace", recorded, assumed, [costs], policies)):
        print(sentence)
    parts = {part.replace("_", " "): f"{ns / 1e6:.1f}" for part, ns in fastest.breakdown.items() if ns}
    span = "iteration" if base.sync_every == 1 else f"cycle of {base.sync_every} iterations"
    show_table([parts], f"fastest configuration: parts of the median {span} on the slowest rank, ms")
    if fastest.epoch_end_ns:
        print(f"after the last iteration, all ranks receive one rank's model: {fastest.epoch_end_ns / 1e6:.1f} ms")
    if explains:
        best = policies[predictions.index(fastest)]
        effects = explain(recorded, given, policy=best, variation=asked.variation, without=left_out, **settings)
        title = "the terms of the fastest configuration, each with what it adds; --without TERM leaves it out"
        show_table(list(map(_effect_row, effects)), title, optional=("source",))
    save_timelines(fastest, perfetto, timeline)
    rows = [values_of_axes(one) | prediction.to_json() for one, prediction in zip(policies, predictions, strict=True)]
    if sentence := width_sentence(fastest.shares_of_width):
        print(sentence)
    print(conclusion(policies, predictions))
    result: dict[str, Any] = {"model": model, "world_size": world_size, "rows": rows, "assumed": list(assumed)}
    result["origins"] = from_where
    if world_size > 1:
        by_efficiency = sorted(policies, key=lambda one: -predictions[policies.index(one)].efficiency)

        def predict_at(policy: Policy, multiple: float) -> Prediction:
            return anchored(predict_policy(policy=policy, fabric=costs.with_rates(multiple)))

        need = network_need([partial(predict_at, one) for one in by_efficiency])
        needed = by_efficiency[need.configuration]
        print(
            f"verdict: {world_size} ranks do the work of {fastest.efficiency * world_size:.4g} that train alone and "
            f"undisturbed ({fastest.efficiency:.0%}); {need.sentence()}"
            + (f", with {_in_words(needed)}" if needed != policies[predictions.index(fastest)] else "")
        )
        result["verdict"] = {
            "efficiency": fastest.efficiency,
            "target": need.target,
            "needed_multiple_of_rates": need.multiple,
            "needed_configuration": values_of_axes(needed),
            "message_bytes": need.message_bytes,
            "bus_gb_per_s": need.bus_gb_per_s,
            "needed_bus_gb_per_s": need.needed_gb_per_s,
        }
    write_json(json_path, result)


def read_policies(
    words: Sequence[str] | None, caps: str | None, orders: str | None, hooks: str
) -> tuple[Policy, list[Policy]]:
    """Return the settings common to all configurations, and those of each combination of cap, order and hook."""
    base = options.read_policy(words)
    caps_mb = options.choose_caps(caps, base, options.PREDICT_CAPS)
    axes = product(caps_mb, options.choose_orders(orders, base), options.read_hooks(hooks))
    return base, [base.model_copy(update=dict(zip(options.OPTIONS, values, strict=True))) for values in axes]


def values_of_axes(policy: Policy) -> dict[str, Any]:
    """Return cap, order and hook for JSON; a field that overrides the axis stands in place of the value."""
    values = {"bucket_cap_mb": policy.bucket_cap_mb, "order": policy.order, "hook": policy.hook.name}
    values |= policy.overruled
    return {"cap_mb": options.cap_json(values.pop("bucket_cap_mb")), **values}


def cells_of_axes(policy: Policy) -> dict[str, str]:
    """Return cap, order and hook for a table, as `values_of_axes`."""
    cap_mb = policy.overruled.get("bucket_cap_mb", policy.bucket_cap_mb)
    return {
        "cap": options.cap_word(cap_mb),
        "order": policy.overruled.get("order", policy.order),
        "hook": policy.hook.name,
    }


def _prediction_row(policy: Policy, prediction: Prediction) -> dict[str, str]:
    return {
        **cells_of_axes(policy),
        "buckets": str(len(prediction.buckets)),
        "iteration ms": f"{prediction.iteration_ns / 1e6:.1f}",
        "90 % ms": f"{prediction.interval_ns[0] / 1e6:.1f} - {prediction.interval_ns[1] / 1e6:.1f}",
        "computation ms": f"{prediction.compute_ns / 1e6:.1f}",
        "added ms": f"{(prediction.iteration_ns - prediction.compute_ns) / 1e6:.1f}",
        "critical buckets": counted(prediction.critical_buckets, len(prediction.buckets)),
    }


def _effect_row(effect: Effect) -> dict[str, str]:
    return {
        "term": effect.term,
        "adds ms": f"{effect.adds_ns / 1e6:.2f}",
        "origin": effect.origin,
        "width": f"{effect.width:.0%}",
        "source": effect.evidence,
    }


def origins_sentence(origins: Mapping[str, str]) -> str:
    """Name the costs that are measured, described, extrapolated and assumed."""
    parts = [
        f"{', '.join(name for name, one in origins.items() if one == origin)} {origin}"
        for origin in dict.fromkeys(origins.values())
        if origin != "none"
    ]
    return f"origin of the costs: {'; '.join(parts)}"


def assumptions(
    name: str, trace: Trace, assumed: Sequence[str], fabrics: Sequence[Fabric], policies: Sequence[Policy]
) -> list[str]:
    """Return what predictions from a trace assume, and which costs count as free; one sentence each."""
    sentences = [*assumed]
    if (share := host_bound(trace)) > HOST_BOUND:
        sentences.insert(
            0, f"{name} is host-bound: its GPU waited for its host {share:.0%} of the time; counted as computation"
        )
    free = (sentence for fabric in fabrics for policy in policies for sentence in counted_as_free(policy, fabric))
    return list(dict.fromkeys([*sentences, *free]))


def conclusion(policies: Sequence[Policy], predictions: Sequence[Prediction]) -> str:
    """Describe the fastest configuration, its largest parts, and which others tie with it."""
    ranked = sorted(zip(policies, predictions, strict=True), key=lambda pair: pair[1].iteration_ns)
    policy, fastest = ranked[0]
    sentences = [f"fastest: {_in_words(policy)}, {fastest.iteration_ns / 1e6:.1f} ms, limited by {_limits(fastest)}"]
    compared = [
        (_in_words(other), fastest.compare(prediction))
        for other, prediction in ranked[1:]
        if prediction.buckets != fastest.buckets or other.hook != policy.hook
    ]
    ties = [f"{name} (+{one.difference_ns / 1e6:.1f} ms)" for name, one in compared if one.is_tie]
    if len(compared) < len(ranked) - 1:
        sentences.append(f"{len(ranked) - 1 - len(compared)} others have the same buckets")
    if ties:
        sentences.append(f"a tie within the errors of the costs with {'; '.join(ties)}")
    elif compared:
        name, second = compared[0]
        sentences.append(
            f"its lead of {second.difference_ns / 1e6:.1f} ms over {name} exceeds the errors of the costs"
        )
    return "; ".join(sentences)


def _in_words(policy: Policy) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in cells_of_axes(policy).items())


def _limits(prediction: Prediction) -> str:
    """Describe the two largest parts of the slowest rank's iteration.

    "computation" is that of the median rank; any further computation of the slowest rank counts as "stragglers".
    """
    engine_input = prediction.timeline.engine_input
    is_computation = [step.kind in COMPUTATION for step in engine_input.schedule.steps]
    simulated_ns = engine_input.duration_ns[:, is_computation].sum(axis=1)
    by_rank_ns = np.sort(np.repeat(simulated_ns, [len(ranks) for ranks in engine_input.alike().values()]))

    shares = dict(prediction.breakdown)
    slowest_ns = sum(shares.pop(part) for part, kinds in PARTS.items() if set(kinds) <= set(COMPUTATION))
    shares["computation"] = min(slowest_ns, int(by_rank_ns[(len(by_rank_ns) - 1) // 2]))
    shares["stragglers"] += slowest_ns - shares["computation"]
    largest = sorted(((ns, part) for part, ns in shares.items() if ns), reverse=True)[:2]

    of_buckets = f" of {counted(prediction.critical_buckets, len(prediction.buckets), 'buckets')}"
    words = {"exposed_comm": f"exposed communication{of_buckets}", "slowdown": "slow-downs beside collectives"}
    whole_ns = max(1, prediction.timeline.iteration_ns)
    sentence = ", then by ".join(f"{words.get(part, part)} ({100 * ns / whole_ns:.0f} %)" for ns, part in largest)
    return sentence or "nothing"


def save_timelines(prediction: Prediction, perfetto: Path | None, picture: Path | None) -> None:
    """Write the timeline of the fastest configuration as a Chrome trace and as a picture, if paths are given."""
    if perfetto is not None:
        prediction.save_perfetto(perfetto)
        print(f"timeline of the fastest configuration written to {perfetto}; open it in ui.perfetto.dev")
    if picture is not None:
        from matplotlib.figure import Figure  # loading matplotlib takes longer than a prediction

        from simulator.results.timeline_plot import draw_timeline

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        draw_timeline(prediction, figure.add_subplot())
        options.save_picture(figure, picture)


VALUES = COLUMNS[len(AXES) : -1]
"""Columns that a heat map can show: all numbers."""
SWEEP_CAPS = "1,5,25,100,single"
SHOWN_ROWS = 40
SWEEP_SPARED = ("hook", "order")
"""Columns to leave out on a narrow terminal, the first one first."""
HELP = {
    "caps": options.HELP["chosen_caps"],
    "fabric": f"{options.FABRIC_FILE}; repeat the option to compare several fabrics.",
    "out": "Where to write the table (.csv, .parquet, .json).",
    "heat_map": "Plot a heat map of the table to this file (.png, .svg, .pdf).",
    "rows": f"Axis for the rows of the heat map: {', '.join(AXES)}.",
    "value": f"Value to show in the cells of the heat map: {', '.join(VALUES)}.",
}


def sweep(
    traces: Annotated[list[Path], Argument(metavar="TRACE", help="Traces of `record`, `synthesize` or `rescale`.")],
    fabric: Annotated[list[Path], Option(metavar="PATH", help=HELP["fabric"])],
    world_sizes: Annotated[str, Option(metavar="N,...", help="Numbers of ranks.")] = "2,4,8,16,32,64",
    caps: Annotated[str | None, Option(metavar="MB,...", help=HELP["caps"], show_default=SWEEP_CAPS)] = None,
    orders: options.ChosenOrders = None,
    hooks: options.Hooks = "none",
    policy: options.Settings = None,
    fabric_set: options.FabricSettings = None,
    processor: options.ProcessorFile = None,
    variation: options.VariationSettings = None,
    straggler: options.Stragglers = None,
    measured: options.Measured = None,
    out: Annotated[Path, Option(metavar="PATH", help=HELP["out"])] = Path("out/sweep.csv"),
    heat_map: Annotated[Path | None, Option(metavar="PATH", help=HELP["heat_map"])] = None,
    rows: Annotated[str, Option(metavar="AXIS", help=HELP["rows"])] = "bucket_cap_mb",
    columns: Annotated[str, Option(metavar="AXIS", help="Axis for the columns of the heat map.")] = "world_size",
    value: Annotated[str, Option(metavar="COLUMN", help=HELP["value"])] = "efficiency",
    jobs: Annotated[int | None, Option(metavar="N", help="Number of parallel tasks; default: one per core.")] = None,
    json_path: options.Json = None,
) -> None:
    """Predict all combinations of traces, fabrics, world sizes, bucket caps, orders and comm hooks as one table.

    Fabrics are compared with each other, not merged. The heat map shows two axes of the table, and each cell the
    fastest bucket cap, order and comm hook of those that are not on an axis. There is one map for each trace, fabric
    and world size that is not on an axis. If speeds are constant, thousands of combinations take about a second;
    other combinations are simulated on all cores.
    """
    if out.suffix not in TABLE_WRITERS:
        raise ValueError(f"--out: expected a name that ends in {', '.join(TABLE_WRITERS)}; got {out}")
    _check_heat_map(heat_map, rows, columns, value)
    options.check_outputs(out, heat_map, json_path, inputs=[*traces, *fabric, processor])
    if max(len(traces), len(fabric)) > 1:
        options.refuse({"--measured": measured}, "expected one trace and one --fabric, those of the measured runs")
    base = options.read_policy(policy)
    with progress("sweeping") as on_progress:
        fabrics = {str(path): options.read_fabric([path], fabric_set, processor) for path in fabric}
        recorded = {str(path): Trace.load(path) for path in traces}
        varied, swept_hooks = options.read_variation(variation), options.read_hooks(hooks)
        table = sweep_all(
            recorded,
            fabrics,
            world_sizes=options.read_counts("--world-sizes", world_sizes),
            bucket_caps_mb=options.choose_caps(caps, base, SWEEP_CAPS),
            orders=options.choose_orders(orders, base),
            hooks=swept_hooks,
            policy=base,
            variation=varied,
            stragglers=options.read_stragglers(straggler),
            measured=options.read_measured(measured),
            n_jobs=jobs,
            on_progress=on_progress,
        )
    sentences = _sweep_assumptions(
        table, recorded, fabrics, varied, [base.model_copy(update={"hook": hook}) for hook in swept_hooks]
    )
    table = table.assign(**base.overruled)
    save_table(table, out)
    if heat_map is not None:
        from matplotlib.figure import Figure

        from simulator.results.heat_map import draw_heat_maps

        figure = Figure(layout="constrained")
        maps = draw_heat_maps(table, figure, rows=rows, columns=columns, value=value)
        figure.set_size_inches(8, 4.5 * len(maps))
        options.save_picture(figure, heat_map)
    shown = [_sweep_row(part) for _, part in table.groupby(list(AXES[:3]), sort=False)]
    show_table(shown[:SHOWN_ROWS], "the fastest configuration at each world size", optional=SWEEP_SPARED)
    verdicts = sweep_verdicts(table)
    for sentence in (*sentences, *verdicts[:SHOWN_ROWS]):
        print(sentence)
    for many, what in ((len(shown), "rows of the table"), (len(verdicts), "verdicts")):
        if many > SHOWN_ROWS:
            print(f"{many - SHOWN_ROWS} more {what} not shown; at most {SHOWN_ROWS} are printed")
    print(f"{len(table)} configurations written to {out}")
    records = table.astype(object).where(table.notna(), None).to_dict("records")
    rows_json = [row | {"bucket_cap_mb": options.cap_json(row["bucket_cap_mb"])} for row in records]
    write_json(json_path, {"rows": rows_json})


def _check_heat_map(path: Path | None, rows: str, columns: str, value: str) -> None:
    options.check_picture("--heat-map", path)
    others = [axis for axis in AXES if axis != rows]
    for option, name, names in (("--rows", rows, AXES), ("--columns", columns, others), ("--value", value, VALUES)):
        if name not in names:
            raise ValueError(f"{option}: expected one of {', '.join(names)}; got {name!r}")


def _sweep_assumptions(
    table: "pd.DataFrame",
    traces: Mapping[str, Trace],
    fabrics: Mapping[str, Fabric],
    variation: Variation,
    policies: Sequence[Policy],
) -> list[str]:
    """Return what the printed predictions assume, as `ddplab predict` says for each of them; one sentence each.

    Args:
        table: The table of the sweep.
        traces: By name.
        fabrics: By name.
        variation: As for `sweep`.
        policies: One for each comm hook.
    """
    by_hook = {policy.hook.name: policy for policy in policies}
    fastest = table.loc[table.groupby(list(AXES[:3]), sort=False)["iteration_ns"].idxmin()]
    sentences = []
    for row in fastest.head(SHOWN_ROWS).to_dict("records"):
        trace, fabric = traces[row["trace"]], fabrics[row["fabric"]]
        cap_mb = row["bucket_cap_mb"]
        cap_mb = None if cap_mb is None or isnan(cap_mb) else cap_mb
        policy = by_hook[row["hook"]].model_copy(update={"bucket_cap_mb": cap_mb, "order": row["order"]})
        prediction = predict_one(trace, fabric, world_size=row["world_size"], policy=policy, variation=variation)
        costs = assume_gpu(trace, fabric).fabric
        sentences += assumptions(Path(row["trace"]).name, trace, prediction.assumed, [costs], policies)
    return list(dict.fromkeys(sentences))


def sweep_verdicts(table: "pd.DataFrame") -> list[str]:
    """Return on which fabrics each trace reaches the target efficiency at each world size; one sentence each."""
    sentences = []
    for (trace, ranks), part in table.groupby(["trace", "world_size"], sort=False):
        best = part.groupby("fabric", sort=False)["efficiency"].max()
        reached, missed = best[best >= TARGET], best[best < TARGET]
        parts = [
            f"{words} {', '.join(f'{Path(str(fabric)).name} ({share:.0%})' for fabric, share in some.items())}"
            for words, some in ((f"at least {TARGET:.0%} on", reached), ("less on", missed))
            if len(some)
        ]
        sentences.append(f"verdict: {Path(str(trace)).name} on {ranks} ranks has an efficiency of {'; '.join(parts)}")
    return sentences


def _sweep_row(part: "pd.DataFrame") -> dict[str, str]:
    """Return the fastest of the configurations for a trace, a fabric and a world size as a row of a table."""
    row, *others = part.sort_values("iteration_ns", kind="stable").to_dict("records")
    # Those that take exactly as long have the same buckets, with few exceptions.
    tie = next((other for other in others if other["is_tie"] and other["iteration_ns"] > row["iteration_ns"]), None)
    return {
        "trace": Path(row["trace"]).name,
        "fabric": Path(row["fabric"]).name,
        "ranks": str(row["world_size"]),
        **_sweep_axes(row),
        "iteration ms": f"{row['iteration_ns'] / 1e6:.1f}",
        "90 % ms": f"{row['low_ns'] / 1e6:.1f} - {row['high_ns'] / 1e6:.1f}",
        "efficiency": f"{row['efficiency']:.0%}",
        "a tie with": ", ".join(_sweep_axes(tie).values()) if tie else "none",
    }


def _sweep_axes(row: Mapping[Hashable, Any]) -> dict[str, str]:
    return {"cap": options.cap_word(row["bucket_cap_mb"]), "order": row["order"], "hook": row["hook"]}
