"""`ddplab predict`: iteration times for each combination of bucket cap, order and comm hook, and what limits them.

Several world sizes are compared as one table.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from ..reference.files.writing import milliseconds, write_atomically
from ..reference.trace import Trace
from ..simulator.capacity import judgement
from ..simulator.capacity.limits import Limits
from ..simulator.cost_terms import TERMS, TERMS_OF_PARTS, Effect, assumed_with_effect, effects, leave_out, origins
from ..simulator.fabric import Fabric
from ..simulator.inputs_with_default_costs import Inputs, complete
from ..simulator.predicted_iteration import Prediction
from ..simulator.prediction import System
from ..simulator.schedule.policy import Policy
from ..simulator.step_costs import counted_as_free
from ..simulator.workload.compute_times import HOST_BOUND, check_stragglers, host_bound
from . import shared_options as options
from .terminal_output import say, show_table, write_json

SPARED = ("hook", "critical buckets", "computation ms", "buckets")
"""Columns to leave out on a narrow terminal, the first one first."""
SHOWN_ROWS = 40
"""World sizes whose rows are printed."""
PICTURES = (".png", ".svg", ".pdf")
"""Endings of the names of pictures."""
HELP = {
    "straggler": "A rank that computes FACTOR times as long; may be repeated. random:FACTOR chooses a rank in each "
    "iteration.",
    "without": f"Leave out terms of the model: {', '.join(TERMS)}.",
    "explain": "Show what each term of the model adds to the fastest configuration, where its value comes from, and "
    "its part of the width of the interval.",
    "timeline": "Write the timeline of the fastest configuration: a picture (.png, .svg, .pdf), or a Chrome trace "
    "for ui.perfetto.dev (.json).",
}


def predict(
    trace: options.TraceFile,
    fabric: options.FabricFiles = None,
    world_size: Annotated[list[str] | None, Option(metavar="N,...", help="Numbers of ranks. Default: 2.")] = None,
    caps: options.Caps = None,
    orders: options.Orders = None,
    hooks: options.Hooks = "none",
    changes: options.Changes = None,
    straggler: Annotated[list[str] | None, Option(metavar="RANK:FACTOR", help=HELP["straggler"])] = None,
    measured: options.Measured = None,
    without: Annotated[str | None, Option(metavar="TERM,...", help=HELP["without"])] = None,
    explains: Annotated[bool, Option("--explain", help=HELP["explain"])] = False,  # noqa: FBT002 - an option
    timeline: Annotated[Path | None, Option(metavar="PATH", help=HELP["timeline"])] = None,
    json_path: options.Json = None,
) -> None:
    """Predict the iteration time for each combination of bucket cap, order and comm hook.

    The table shows the median iteration time, an interval that contains 90 % of the iterations, the time of
    computation alone, the time that data parallelism adds (copies, slower computation, waiting), and the buckets on
    the critical path. Costs that are unknown are listed below the table, followed by a breakdown of the fastest
    configuration, the two largest parts of its iteration, and the configurations that are as fast within the
    intervals. The verdict says how much of the ranks' time becomes training, and how fast the network must be for
    90 %. A trace of one rank is enough for any world size.

    With several world sizes, the table has the fastest configuration for each. `ddplab plan` compares fabrics.
    """
    files = fabric or [options.FABRIC]
    if timeline is not None and timeline.suffix not in (*PICTURES, ".json"):
        raise ValueError(f"--timeline: expected a name that ends in {', '.join(PICTURES)} or .json, got {timeline}")
    if timeline is not None and timeline.suffix in PICTURES:
        import matplotlib  # noqa: F401 - without the package, nothing is printed but the error
    options.check_outputs(timeline, json_path, inputs=[trace, *files])
    world_sizes = options.read_world_sizes("--world-size", world_size or ["2"])
    asked = options.read_settings(changes)
    stragglers, anchors = options.read_stragglers(straggler), options.read_measured(measured)
    if len(world_sizes) > 1:
        options.refuse({"--explain": explains, "--timeline": timeline}, "expected one --world-size")
    check_stragglers(min(world_sizes), stragglers)
    policies = options.combined(asked.policy, caps, orders, hooks)
    inputs = complete(
        *(Trace.load(trace), asked.fabric(files)),
        policy=policies[0] if len(policies) == 1 else asked.policy,
        variation=asked.variation,
        stragglers=stragglers,
        measured=anchors,
    )
    left_out = without.split(",") if without else []
    with options.naming("--without"):
        inputs = leave_out(left_out, inputs)
        each = [leave_out(left_out, inputs._replace(policy=one)) for one in policies]
    from_where = origins(each[0], world_sizes[0], *each[1:]) if len(world_sizes) == 1 else {}
    each = [one._replace(assumed=assumed_with_effect(one, from_where), measured_policy=inputs.policy) for one in each]
    system = System(inputs._replace(measured_policy=inputs.policy))
    predictions = {ranks: [system.at(ranks, one) for one in each] for ranks in world_sizes}
    model = inputs.trace.workload.model
    if len(world_sizes) > 1:
        write_json(json_path, {"model": model, "rows": _show_sizes(each, predictions, left_out)})
        return
    (ranks,) = world_sizes
    shown = _show_one(each, predictions[ranks], ranks, left_out, from_where, explains=explains, timeline=timeline)
    write_json(json_path, {"model": model, "world_size": ranks, **shown})


def _show_one(
    each: Sequence[Inputs],
    predictions: Sequence[Prediction],
    ranks: int,
    left_out: Sequence[str],
    from_where: Mapping[str, str],
    *,
    explains: bool,
    timeline: Path | None,
) -> dict[str, Any]:
    """Print the predictions for one world size, the parts of the fastest one and its verdict; return all as JSON."""
    policies, (best, _) = [one.policy for one in each], judgement.ranking(predictions)
    inputs, fastest = each[best], predictions[best]
    trace, policy = inputs.trace, inputs.policy
    title = f"{trace.workload.described}, on {ranks} rank{'s' * (ranks > 1)}, predicted"
    show_table(list(map(_prediction_row, policies, predictions)), title, optional=SPARED)
    moves = [anchor.sentence() for anchor in fastest.anchors]
    assumed = _say_basis(each, predictions, left_out, [origins_sentence(from_where), *moves])
    parts = {part.replace("_", " "): milliseconds(ns) for part, ns in fastest.breakdown.items() if ns}
    span = "iteration" if policy.sync_every == 1 else f"cycle of {policy.sync_every} iterations"
    show_table([parts], f"fastest configuration: parts of the median {span} on the slowest rank, ms")
    if explains:
        title = "the terms of the fastest configuration, with what each adds, and the parts that it lengthens"
        if shown := [_effect_row(effect, fastest.breakdown) for effect in effects(inputs, ranks)]:
            show_table(shown, f"{title}; --without TERM leaves it out", optional=("source",))
        else:
            say("no term of the model has an effect on the fastest configuration")
    if timeline is not None:
        _save_timeline(fastest, timeline, trace, policy)
    if not fastest.contradictions:
        say(judgement.width_sentence(fastest.shares_of_width))
    say(conclusion(policies, predictions))
    rows = [options.values_of_axes(one) | found.to_json() for one, found in zip(policies, predictions, strict=True)]
    result: dict[str, Any] = {"rows": rows, "assumed": assumed, "origins": from_where}
    if ranks > 1:
        limits = Limits(System(inputs), ranks)
        need = limits.needed_rate()
        say(judgement.limit_sentence(limits))
        of_network = "" if "collectives" in left_out else f"; {judgement.network_sentence(limits, need)}"
        low, high = fastest.efficiency_interval
        work = f"{judgement.band(low * ranks, high * ranks)} that train alone ({judgement.percent(low, high)})"
        say(f"verdict: {ranks:,} GPUs do the work of {work}{of_network}")
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
    return result


def _say_basis(
    each: Sequence[Inputs], predictions: Sequence[Prediction], left_out: Sequence[str], further: Sequence[str]
) -> list[str]:
    """Say what predictions rest on, with `further` sentences; return what is assumed, one sentence each."""
    first, assumed = each[0], list(dict.fromkeys(sentence for one in predictions for sentence in one.assumed))
    say(judgement.contradiction_sentence(predictions[0], first.fabric))
    say(f"left out: {', '.join(left_out)}" if left_out else "")
    for sentence in (*further, *assumptions(first.trace, assumed, first.fabric, [one.policy for one in each])):
        say(sentence)
    return assumed


def _show_sizes(
    each: Sequence[Inputs], predictions: Mapping[int, Sequence[Prediction]], left_out: Sequence[str]
) -> list[dict[str, Any]]:
    """Print the fastest configuration for each world size, and what is assumed; return all predictions as JSON."""
    shown, policies = [], [one.policy for one in each]
    for ranks, some in predictions.items():
        best, differing, ties = _ranked(policies, some)
        cells = [options.cells_of_axes(policies[place]).items() for place in (best, *ties[:1])]
        tie = ", ".join(" ".join(cell) for cell in cells[-1] if cell not in cells[0]) or "-"
        row = {"ranks": str(ranks), **_prediction_row(policies[best], some[best])}
        row |= {"efficiency": judgement.percent(*some[best].efficiency_interval)}
        row |= {"a tie with": tie} if differing else {}
        shown.append(row)
    show_table(shown[:SHOWN_ROWS], "the fastest configuration at each world size", optional=SPARED)
    if len(shown) > SHOWN_ROWS:
        say(f"{len(shown) - SHOWN_ROWS} more rows of the table not shown; at most {SHOWN_ROWS} are printed")
    most = max(predictions)
    moves = [f"on {most} rank{'s' * (most > 1)}: {anchor.sentence()}" for anchor in predictions[most][0].anchors]
    _say_basis(each, [one for some in predictions.values() for one in some], left_out, moves)
    return [
        options.values_of_axes(policy) | {"world_size": ranks} | prediction.to_json()
        for ranks, some in predictions.items()
        for policy, prediction in zip(policies, some, strict=True)
    ]


def _prediction_row(policy: Policy, prediction: Prediction) -> dict[str, str]:
    return {
        **options.cells_of_axes(policy),
        "buckets": str(len(prediction.buckets)),
        "iteration ms": milliseconds(prediction.iteration_ns),
        "90 % ms": f"{milliseconds(prediction.interval_ns[0])} - {milliseconds(prediction.interval_ns[1])}",
        "computation ms": milliseconds(prediction.compute_ns),
        "added ms": milliseconds(prediction.iteration_ns - prediction.compute_ns),
        "critical buckets": counted(prediction.critical_buckets, len(prediction.buckets)),
    }


def counted(buckets: Sequence[int], total: int) -> str:
    """Return bucket indices as a count with their range, such as `3 of 35 (2-4)`."""
    first, last = min(buckets, default=0), max(buckets, default=0)
    places = f" ({first if first == last else f'{first}-{last}'})"
    return f"{len(buckets)} of {total}{places * bool(buckets)}"


def _effect_row(effect: Effect, breakdown: Mapping[str, int]) -> dict[str, str]:
    parts = [part for part, terms in TERMS_OF_PARTS.items() if effect.term in terms and breakdown[part]]
    return {
        "term": effect.term,
        "adds ms": milliseconds(effect.adds_ns, ".2f"),
        "origin": effect.origin,
        "width": f"{effect.width:.0%}",
        "part": ", ".join(parts).replace("_", " "),
        "source": effect.evidence,
    }


def assumptions(trace: Trace, assumed: Sequence[str], fabric: Fabric, policies: Sequence[Policy]) -> list[str]:
    """Return what predictions from a trace assume, and which costs count as free; one sentence each."""
    waits = (share := host_bound(trace)) > HOST_BOUND and not all(policy.cuda_graph for policy in policies)
    wait = f"the trace is host-bound: its GPU waited for its host {share:.0%} of the time; counted as computation"
    free = (sentence for policy in policies for sentence in counted_as_free(policy, fabric))
    return list(dict.fromkeys([*([wait] if waits else []), *assumed, *free]))


def origins_sentence(origins: Mapping[str, str]) -> str:
    """Name the costs that are measured, described, extrapolated and assumed."""
    parts = [
        f"{', '.join(name for name, one in origins.items() if one == origin)} {origin}"
        for origin in dict.fromkeys(origins.values())
        if origin != "none"
    ]
    return f"origin of the costs: {'; '.join(parts)}"


def _ranked(policies: Sequence[Policy], predictions: Sequence[Prediction]) -> tuple[int, list[int], list[int]]:
    """Return the place of the fastest, of those with other buckets or hooks, and which of these tie with it."""
    best, ties = judgement.ranking(predictions)
    policy, fastest = policies[best], predictions[best]
    each = enumerate(zip(policies, predictions, strict=True))
    differing = [place for place, (one, its) in each if its.buckets != fastest.buckets or one.hook != policy.hook]
    return best, differing, [place for place in ties if place in differing]


def conclusion(policies: Sequence[Policy], predictions: Sequence[Prediction]) -> str:
    """Describe the fastest configuration, and which others tie with it."""
    best, differing, ties = _ranked(policies, predictions)
    policy, fastest = policies[best], predictions[best]
    sentences = [f"fastest: {_in_words(policy)}, {milliseconds(fastest.iteration_ns)} ms"]

    def compared(place: int) -> str:
        ns = predictions[place].iteration_ns - fastest.iteration_ns
        longer = milliseconds(ns) if ns >= 50_000 else milliseconds(ns, ".1g")  # never +0.0
        return f"{_in_words(policies[place])} (+{longer} ms)"

    if others := len(predictions) - 1 - len(differing):
        sentences.append(f"{others} other{'s have' if others > 1 else ' has'} the same buckets")
    if ties:
        sentences.append(f"a tie within the errors of the costs with {'; '.join(map(compared, ties))}")
    elif differing:
        second = min(differing, key=lambda place: predictions[place].iteration_ns)
        known = "known " if fastest.counted_as_free else ""
        sentences.append(f"its lead over {compared(second)} exceeds the errors of the {known}costs")
    return "; ".join(sentences)


def _in_words(policy: Policy) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in options.cells_of_axes(policy).items())


def _save_timeline(prediction: Prediction, path: Path, recorded: Trace, policy: Policy) -> None:
    if path.suffix == ".json":
        prediction.save_perfetto(path)
        say(f"timeline of the fastest configuration written to {path}; open it in ui.perfetto.dev")
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
    data = BytesIO()
    figure.savefig(data, format=path.suffix.lstrip("."), dpi=120)
    write_atomically(path, data.getvalue())
    say(f"plot written to {path}")
