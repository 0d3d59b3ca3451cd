"""`ddplab predict`: iteration times for each combination of bucket cap, order and comm hook, and what limits them.

Several traces, fabrics or world sizes are compared as one table and a heat map.
"""

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ..reference.trace import Trace
from ..simulator.capacity.cost import at_most
from ..simulator.capacity.digits import percent
from ..simulator.capacity.judgement import (
    contradiction_sentence,
    efficiency_sentence,
    limit_sentence,
    network_sentence,
    ranking,
    width_sentence,
)
from ..simulator.capacity.limits import TARGET, Limits
from ..simulator.capacity.system import System
from ..simulator.cost_terms import Effect, Inputs, explain, leave_out, origins
from ..simulator.fabric import Fabric
from ..simulator.predicted_iteration import Prediction
from ..simulator.prediction import predict as predict_one
from ..simulator.profiler_import.trace_of_profile import HOST_BOUND, host_bound
from ..simulator.schedule.policy import Policy
from ..simulator.step_costs import counted_as_free
from ..simulator.sweep import AXES, sweep
from ..simulator.workload.compute_times import check_stragglers
from ..simulator.workload.default_gpu_costs import assume_gpu
from . import shared_options as options
from .shared_options import cells_of_axes, values_of_axes
from .terminal_output import progress, show_table, write_json

if TYPE_CHECKING:
    import pandas as pd

SPARED = ("hook", "critical buckets", "computation ms", "buckets")
"""Columns to leave out on a narrow terminal, the first one first."""
SHOWN_ROWS = 40
"""Rows of a table of several traces, fabrics or world sizes, and verdicts, that are printed."""
HELP = {
    "traces": "Traces of `record`, `import` or `synthesize`.",
    "fabric": f"{options.FABRIC_FILE}. Files of several options are merged into one fabric; names with commas "
    "between them are compared.",
    "world_size": "Numbers of ranks.",
    "heat_map": "Plot a heat map to this file (.png, .svg, .pdf).",
}


def predict(
    traces: Annotated[list[Path], Argument(metavar="TRACE...", help=HELP["traces"])],
    fabric: Annotated[
        list[Path] | None, Option(metavar="PATH,...", help=HELP["fabric"], show_default=str(options.FABRIC))
    ] = None,
    world_size: Annotated[str, Option(metavar="N,...", help=HELP["world_size"])] = "2",
    caps: options.Caps = None,
    orders: options.Orders = None,
    hooks: options.Hooks = "none",
    changes: options.Changes = None,
    straggler: options.Stragglers = None,
    measured: options.Measured = None,
    without: options.Without = None,
    explains: options.Explain = False,  # noqa: FBT002
    timeline: options.Timeline = None,
    heat_map: Annotated[Path | None, Option(metavar="PATH", help=HELP["heat_map"])] = None,
    json_path: options.Json = None,
) -> None:
    """Predict the iteration time for each combination of bucket cap, order and comm hook.

    The table shows the median iteration time, an interval that contains 90 % of the iterations, the time of
    computation alone, the time that data parallelism adds (copies, slower computation, waiting), and the buckets on
    the critical path. Costs that are unknown are listed below the table, followed by a breakdown of the fastest
    configuration, the two largest parts of its iteration, and the configurations that are as fast within the
    intervals. The verdict says how much of the ranks' time becomes training, and how fast the network must be for
    90 %. A trace of one rank is enough for any world size.

    With several traces, fabrics or world sizes, or with --heat-map, the table has the fastest configuration for each
    of them, and the verdict names the fabrics that suffice. The axes of the heat map are the first two of trace,
    fabric, ranks, bucket cap, order and hook that have several values; each cell shows the efficiency of its fastest
    configuration.
    """
    chosen = options.fabric_choices(fabric or [options.FABRIC])
    if timeline is None or timeline.suffix != ".json":
        options.check_picture("--timeline", timeline)
    options.check_picture("--heat-map", heat_map)
    files = [path for paths in chosen.values() for path in paths]
    options.check_outputs(timeline, heat_map, json_path, inputs=[*traces, *files])
    world_sizes = options.read_world_sizes(world_size)
    asked = options.read_settings(changes)
    stragglers, anchors = options.read_stragglers(straggler), options.read_measured(measured)
    if heat_map is not None or max(len(traces), len(chosen), len(world_sizes)) > 1:
        of_one = {"--without": without, "--explain": explains, "--timeline": timeline}
        options.refuse(of_one, "expected one trace, one --fabric and one --world-size, and no --heat-map")
        if max(len(traces), len(chosen)) > 1:
            options.refuse({"--measured": measured}, "expected one trace and one --fabric, the measured ones")
        _predict_many(
            {str(path): Trace.load(path) for path in traces},
            {name: asked.fabric(paths) for name, paths in chosen.items()},
            world_sizes,
            options.combined(asked.policy, caps, orders, hooks),
            asked.policy,
            heat_map,
            json_path,
            variation=asked.variation,
            stragglers=stragglers,
            measured=anchors,
        )
        return
    (path,), (paths,), (ranks,) = traces, chosen.values(), world_sizes
    check_stragglers(ranks, stragglers)
    base, policies = asked.policy, options.combined(asked.policy, caps, orders, hooks)
    left_out = without.split(",") if without else []
    recorded, given_fabric = Trace.load(path), asked.fabric(paths)
    given = Inputs(given_fabric, asked.variation, base)
    costs, varied, assumed = assume_gpu(recorded, given_fabric, asked.variation)
    with options.naming("--without"):
        costs, varied, _ = leave_out(left_out, Inputs(costs, varied, base))
        policies = [leave_out(left_out, Inputs(costs, varied, one)).policy for one in policies]
    run = policies[0] if len(policies) == 1 else base
    first = System(str(path), recorded, Inputs(costs, varied, policies[0]), stragglers, anchors, run, assume=False)
    systems = [replace(first, given=Inputs(costs, varied, one)) for one in policies]
    with options.naming("--measured") if anchors else nullcontext():
        predictions = [one.at(ranks) for one in systems]
    model = recorded.workload.model
    title = f"{recorded.workload.described}, on {ranks} ranks, predicted"
    show_table(list(map(_prediction_row, policies, predictions)), title, optional=SPARED)
    best = ranking(predictions).fastest
    fastest, system = predictions[best], systems[best]
    if found := contradiction_sentence(fastest):
        print(found)
    moves = [anchor.sentence() for anchor in fastest.anchors]
    assumed = *assumed, *(sentence for one in predictions for sentence in one.assumed)
    from_where = origins(recorded, given, Inputs(costs, varied, policies[0]), ranks)
    print(origins_sentence(from_where))
    for sentence in (*moves, *assumptions("the trace", recorded, assumed, [costs], policies)):
        print(sentence)
    parts = {part.replace("_", " "): f"{ns / 1e6:.1f}" for part, ns in fastest.breakdown.items() if ns}
    span = "iteration" if base.sync_every == 1 else f"cycle of {base.sync_every} iterations"
    show_table([parts], f"fastest configuration: parts of the median {span} on the slowest rank, ms")
    if explains:
        settings: dict[str, Any] = {"world_size": ranks, "stragglers": stragglers}
        effects = explain(
            recorded, given_fabric, policy=policies[best], variation=asked.variation, without=left_out, **settings
        )
        title = "the terms of the fastest configuration, each with what it adds; --without TERM leaves it out"
        show_table(list(map(_effect_row, effects)), title, optional=("source",))
    if timeline is not None:
        _save_timeline(fastest, timeline, recorded, policies[best])
    rows = [values_of_axes(one) | prediction.to_json() for one, prediction in zip(policies, predictions, strict=True)]
    if sentence := width_sentence(fastest.shares_of_width):
        print(sentence)
    print(conclusion(policies, predictions))
    result: dict[str, Any] = {"model": model, "world_size": ranks, "rows": rows, "assumed": list(assumed)}
    result["origins"] = from_where
    if ranks > 1:
        limits = Limits(system, ranks)
        need = limits.needed_rate()
        print(limit_sentence(limits))
        print(f"verdict: {efficiency_sentence(system, ranks)}; {network_sentence(limits, need)}")
        result["verdict"] = {
            "efficiency": fastest.efficiency,
            "limit": limits.limit,
            "saved_ns": limits.saved_ns,
            "target": need.target,
            "needed_multiple_of_rates": need.multiple,
            "message_bytes": need.message_bytes,
            "bus_gb_per_s": need.bus_gb_per_s,
            "needed_bus_gb_per_s": need.needed_gb_per_s,
        }
    write_json(json_path, result)


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


def counted(buckets: Sequence[int], total: int) -> str:
    """Return bucket indices as a count with their range, such as `3 of 35 (2-4)`."""
    count = f"{len(buckets)} of {total}"
    if not buckets:
        return count
    first, last = min(buckets), max(buckets)
    return f"{count} ({first if first == last else f'{first}-{last}'})"


def _effect_row(effect: Effect) -> dict[str, str]:
    return {
        "term": effect.term,
        "adds ms": f"{effect.adds_ns / 1e6:.2f}",
        "origin": effect.origin,
        "width": f"{effect.width:.0%}",
        "source": effect.evidence,
    }


def assumptions(
    name: str, trace: Trace, assumed: Sequence[str], fabrics: Sequence[Fabric], policies: Sequence[Policy]
) -> list[str]:
    """Return what predictions from a trace assume, and which costs count as free; one sentence each."""
    sentences = [*assumed]
    if (share := host_bound(trace)) > HOST_BOUND and not all(policy.cuda_graph for policy in policies):
        sentences.insert(
            0, f"{name} is host-bound: its GPU waited for its host {share:.0%} of the time; counted as computation"
        )
    free = (sentence for fabric in fabrics for policy in policies for sentence in counted_as_free(policy, fabric))
    return list(dict.fromkeys([*sentences, *free]))


def origins_sentence(origins: Mapping[str, str]) -> str:
    """Name the costs that are measured, described, extrapolated and assumed."""
    parts = [
        f"{', '.join(name for name, one in origins.items() if one == origin)} {origin}"
        for origin in dict.fromkeys(origins.values())
        if origin != "none"
    ]
    return f"origin of the costs: {'; '.join(parts)}"


def conclusion(policies: Sequence[Policy], predictions: Sequence[Prediction]) -> str:
    """Describe the fastest configuration, and which others tie with it."""
    best, ties = ranking(predictions)
    policy, fastest = policies[best], predictions[best]
    sentences = [f"fastest: {_in_words(policy)}, {fastest.iteration_ns / 1e6:.1f} ms"]
    differing = [
        place
        for place, one in enumerate(predictions)
        if place != best and (one.buckets != fastest.buckets or policies[place].hook != policy.hook)
    ]

    def compared(place: int) -> str:
        return (
            f"{_in_words(policies[place])} (+{(predictions[place].iteration_ns - fastest.iteration_ns) / 1e6:.1f} ms)"
        )

    if len(differing) < len(predictions) - 1:
        sentences.append(f"{len(predictions) - 1 - len(differing)} others have the same buckets")
    if tied := [compared(place) for place in ties if place in differing]:
        sentences.append(f"a tie within the errors of the costs with {'; '.join(tied)}")
    elif differing:
        second = min(differing, key=lambda place: predictions[place].iteration_ns)
        sentences.append(f"its lead over {compared(second)} exceeds the errors of the costs")
    return "; ".join(sentences)


def _in_words(policy: Policy) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in cells_of_axes(policy).items())


def _save_timeline(prediction: Prediction, path: Path, recorded: Trace, policy: Policy) -> None:
    if path.suffix == ".json":
        prediction.save_perfetto(path)
        print(f"timeline of the fastest configuration written to {path}; open it in ui.perfetto.dev")
        return
    from matplotlib.figure import Figure  # loading matplotlib takes longer than a prediction

    from ..simulator.results.memory_plot import draw_memory
    from ..simulator.results.timeline_plot import draw_timeline

    with_memory = recorded.workload.memory is not None and policy.grouping == "buckets" and policy.sync_every == 1
    figure = Figure(figsize=(11, 7.5 if with_memory else 4.5), layout="constrained")
    axes = figure.subplots(1 + with_memory, sharex=True, squeeze=False)[:, 0]
    draw_timeline(prediction, axes[0])
    if with_memory:
        draw_memory(prediction, recorded, policy, axes[1])
    options.save_picture(figure, path)


# Several traces, fabrics or world sizes


def _predict_many(
    traces: Mapping[str, Trace],
    fabrics: Mapping[str, Fabric],
    world_sizes: Sequence[int],
    policies: Sequence[Policy],
    base: Policy,
    heat_map: Path | None,
    json_path: Path | None,
    **how: Any,
) -> None:
    """Predict all combinations; print the fastest configuration for each trace, fabric and world size, and verdicts.

    `policies` are all combinations of bucket caps, orders and hooks, and `base` is what they have in common. `how`
    has further arguments of `sweep`.
    """
    caps_mb, orders, hooks = (list(dict.fromkeys(getattr(one, axis) for one in policies)) for axis in AXES[3:])
    axes: dict[str, Any] = {"world_sizes": world_sizes, "bucket_caps_mb": caps_mb, "orders": orders, "hooks": hooks}
    with progress("predicting") as on_progress:
        table = sweep(traces, fabrics, **axes, policy=base, on_progress=on_progress, **how)
    by_hook = [base.model_copy(update={"hook": one}) for one in hooks]
    sentences = []  # what the predictions assume, with the most ranks
    for (name, trace), fabric in product(traces.items(), fabrics.values()):
        one = predict_one(trace, fabric, world_size=max(world_sizes), policy=by_hook[0], variation=how["variation"])
        sentences += assumptions(_short(name), trace, one.assumed, [assume_gpu(trace, fabric).fabric], by_hook)
    table = table.assign(**base.overruled)
    if heat_map is not None:
        _draw(table, heat_map)
    shown = [_row(part) for _, part in table.groupby(list(AXES[:3]), sort=False)]
    show_table(shown[:SHOWN_ROWS], "the fastest configuration at each world size", optional=("hook", "order"))
    found = verdicts(table)
    for sentence in (*dict.fromkeys(sentences), *found[:SHOWN_ROWS]):
        print(sentence)
    for many, what in ((len(shown), "rows of the table"), (len(found), "verdicts")):
        if many > SHOWN_ROWS:
            print(f"{many - SHOWN_ROWS} more {what} not shown; at most {SHOWN_ROWS} are printed")
    records = table.astype(object).where(table.notna(), None).to_dict("records")
    rows_json = [row | {"bucket_cap_mb": options.cap_json(row["bucket_cap_mb"])} for row in records]
    write_json(json_path, {"rows": rows_json})


def heat_map_axes(table: "pd.DataFrame") -> tuple[str, str]:
    """Return the axes for rows and columns: the first two of the table with several values, the longer as columns.

    Without two of them, bucket caps and world sizes are shown.
    """
    axes = [axis for axis in AXES if table[axis].nunique(dropna=False) > 1]
    axes = [*axes, *(axis for axis in ("bucket_cap_mb", "world_size") if axis not in axes)][:2]
    rows, columns = sorted(axes, key=lambda axis: table[axis].nunique(dropna=False))
    return ("bucket_cap_mb", "world_size") if {rows, columns} == {"bucket_cap_mb", "world_size"} else (rows, columns)


def _draw(table: "pd.DataFrame", path: Path) -> None:
    from matplotlib.figure import Figure  # loading matplotlib takes longer than most predictions

    from ..simulator.results.heat_map import draw_heat_maps

    rows, columns = heat_map_axes(table)
    figure = Figure(layout="constrained")
    maps = draw_heat_maps(table, figure, rows=rows, columns=columns)
    figure.set_size_inches(8, 4.5 * len(maps))
    options.save_picture(figure, path)


def verdicts(table: "pd.DataFrame") -> list[str]:
    """Return on which fabrics each trace reaches the target efficiency at each world size; one sentence each."""
    sentences = []
    for (trace, ranks), part in table.groupby(["trace", "world_size"], sort=False):
        best = part.loc[part.groupby("fabric", sort=False)["efficiency"].idxmax()]
        answers: dict[str, list[str]] = {"yes": [], "open": [], "no": []}
        for row in best.to_dict("records"):
            low, high = row["efficiency_low"], row["efficiency_high"]
            answers[at_most((-high, -low), -TARGET)].append(f"{_short(str(row['fabric']))} ({percent(low, high)})")
        words = {"yes": f"at least {TARGET:.0%} on", "open": f"around {TARGET:.0%} on", "no": "less on"}
        parts = [f"{words[answer]} {', '.join(names)}" for answer, names in answers.items() if names]
        sentences.append(f"verdict: {_short(str(trace))} on {ranks} ranks has an efficiency of {'; '.join(parts)}")
    return sentences


def _row(part: "pd.DataFrame") -> dict[str, str]:
    """Return the fastest of the configurations for a trace, a fabric and a world size as a row of a table."""
    row, *others = part.sort_values("iteration_ns", kind="stable").to_dict("records")
    # Those that take exactly as long have the same buckets, with few exceptions.
    tie = next((other for other in others if other["is_tie"] and other["iteration_ns"] > row["iteration_ns"]), None)
    return {
        "trace": _short(row["trace"]),
        "fabric": _short(row["fabric"]),
        "ranks": str(row["world_size"]),
        **_axes(row),
        "iteration ms": f"{row['iteration_ns'] / 1e6:.1f}",
        "90 % ms": f"{row['low_ns'] / 1e6:.1f} - {row['high_ns'] / 1e6:.1f}",
        "efficiency": f"{row['efficiency']:.0%}",
        "a tie with": ", ".join(_axes(tie).values()) if tie else "none",
    }


def _short(name: str) -> str:
    """Return the name of a file without its folder; of several merged ones, each."""
    return " + ".join(Path(one).name for one in name.split(options.MERGED))


def _axes(row: Mapping[Hashable, Any]) -> dict[str, str]:
    return {"cap": options.cap_word(row["bucket_cap_mb"]), "order": row["order"], "hook": row["hook"]}
