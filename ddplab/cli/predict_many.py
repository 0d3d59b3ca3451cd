"""Predictions for several traces, fabrics or world sizes: the table of the fastest, a heat map, and verdicts."""

from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference.trace import Trace
from simulator.fabric import Fabric
from simulator.prediction import predict
from simulator.profiler_import.trace_of_profile import HOST_BOUND, host_bound
from simulator.results.scaling_verdict import TARGET
from simulator.schedule.policy import Policy
from simulator.step_costs import counted_as_free
from simulator.sweep import AXES, sweep
from simulator.workload.default_gpu_costs import assume_gpu
from simulator.workload.variation import Straggler, Variation

from . import shared_options as options
from .terminal_output import progress, show_table, write_json

if TYPE_CHECKING:
    import pandas as pd

SHOWN_ROWS = 40
SPARED = ("hook", "order")
"""Columns to leave out on a narrow terminal, the first one first."""


def predict_many(
    traces: Mapping[str, Trace],
    fabrics: Mapping[str, Fabric],
    world_sizes: Sequence[int],
    policies: Sequence[Policy],
    *,
    base: Policy,
    variation: Variation,
    stragglers: Sequence[Straggler],
    measured: Mapping[int, int] | None,
    heat_map: Path | None,
    json_path: Path | None,
) -> None:
    """Predict all combinations, and print the fastest configuration for each trace, fabric and world size.

    Args:
        traces: By name.
        fabrics: By name.
        world_sizes: Numbers of ranks.
        policies: All combinations of bucket caps, orders and hooks.
        base: What the policies have in common.
        variation: As for `sweep`.
        stragglers: As for `sweep`.
        measured: As for `sweep`.
        heat_map: Where to draw the table. None: nowhere.
        json_path: Where to write it. None: nowhere.
    """
    if max(len(traces), len(fabrics)) > 1:
        options.refuse({"--measured": measured}, "expected one trace and one --fabric, those of the measured runs")
    caps_mb, orders, hooks = (list(dict.fromkeys(getattr(one, axis) for one in policies)) for axis in AXES[3:])
    with progress("predicting") as on_progress:
        table = sweep(
            traces,
            fabrics,
            world_sizes=world_sizes,
            bucket_caps_mb=caps_mb,
            orders=orders,
            hooks=hooks,
            policy=base,
            variation=variation,
            stragglers=stragglers,
            measured=measured,
            on_progress=on_progress,
        )
    by_hook = [base.model_copy(update={"hook": one}) for one in hooks]
    sentences = _assumed(traces, fabrics, max(world_sizes), variation, by_hook)
    table = table.assign(**base.overruled)
    if heat_map is not None:
        _draw(table, heat_map)
    shown = [_row(part) for _, part in table.groupby(list(AXES[:3]), sort=False)]
    show_table(shown[:SHOWN_ROWS], "the fastest configuration at each world size", optional=SPARED)
    found = verdicts(table)
    for sentence in (*sentences, *found[:SHOWN_ROWS]):
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

    from simulator.results.heat_map import draw_heat_maps

    rows, columns = heat_map_axes(table)
    figure = Figure(layout="constrained")
    maps = draw_heat_maps(table, figure, rows=rows, columns=columns)
    figure.set_size_inches(8, 4.5 * len(maps))
    options.save_picture(figure, path)


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


def _assumed(
    traces: Mapping[str, Trace],
    fabrics: Mapping[str, Fabric],
    world_size: int,
    variation: Variation,
    policies: Sequence[Policy],
) -> list[str]:
    """Return what the predictions assume, as for one of them; for all traces and fabrics, with the most ranks."""
    sentences = []
    for (name, trace), fabric in product(traces.items(), fabrics.values()):
        one = predict(trace, fabric, world_size=world_size, policy=policies[0], variation=variation)
        sentences += assumptions(_short(name), trace, one.assumed, [assume_gpu(trace, fabric).fabric], policies)
    return list(dict.fromkeys(sentences))


def verdicts(table: "pd.DataFrame") -> list[str]:
    """Return on which fabrics each trace reaches the target efficiency at each world size; one sentence each."""
    sentences = []
    for (trace, ranks), part in table.groupby(["trace", "world_size"], sort=False):
        best = part.groupby("fabric", sort=False)["efficiency"].max()
        reached, missed = best[best >= TARGET], best[best < TARGET]
        parts = [
            f"{words} {', '.join(f'{_short(str(fabric))} ({share:.0%})' for fabric, share in some.items())}"
            for words, some in ((f"at least {TARGET:.0%} on", reached), ("less on", missed))
            if len(some)
        ]
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
