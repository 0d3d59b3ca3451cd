"""`ddplab predict` and `ddplab sweep`: ask a trace what an iteration would cost."""

import math
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from matplotlib.figure import Figure

from reference.bucketing import cap_name
from reference.files import write_whole
from reference.trace import Trace

from ..answers.heat_map import draw_heat_map
from ..answers.timeline_plot import draw_timeline
from ..iteration.policy import Policy
from ..prediction import Prediction, predict_policy
from ..show import progress, show_table, write_json
from ..sweep import AXES, COLUMNS, sweep
from .arguments import (
    Caps,
    FabricSettings,
    Hooks,
    Json,
    Orders,
    ProcessorFile,
    Settings,
    Stragglers,
    VariationSettings,
    WorldSize,
    check_outputs,
    read_caps_or_default,
    read_counts,
    read_fabric,
    read_hooks,
    read_orders,
    read_policy,
    read_stragglers,
    read_variation,
)

WRITERS: dict[str, Callable[[pd.DataFrame, BytesIO], object]] = {
    ".csv": lambda table, data: table.to_csv(data, index=False),
    ".parquet": lambda table, data: table.to_parquet(data, index=False),
    ".json": lambda table, data: table.to_json(data, orient="records", indent=1),
}
"""Endings of a sweep's table, and what writes it."""

VALUES = COLUMNS[len(AXES) :]
PICTURES = (".png", ".svg", ".pdf")
SHOWN_ROWS = 40


def predict(
    trace: Annotated[Path, typer.Argument(help="A recorded trace.")],
    fabric: Annotated[
        Path, typer.Option(help="A fabric file from `ddplab calibrate`, or a topology in YAML.")
    ] = Path("out/fabric.json"),
    world_size: WorldSize = 2,
    caps: Caps = "0.5,1,5,25,single",
    orders: Orders = "ready",
    hooks: Hooks = "none",
    policy: Settings = None,
    fabric_set: FabricSettings = None,
    processor: ProcessorFile = None,
    variation: VariationSettings = None,
    straggler: Stragglers = None,
    inputs: Annotated[
        str | None, typer.Option(help="Batches of each rank, comma-separated: the ranks train under Join.")
    ] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the fastest one's timeline here.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Draw the fastest one's timeline here (.png, .svg).")] = None,
    json_path: Json = None,
) -> None:
    """Predict the iteration time under each bucket cap, order and comm hook."""
    _check_picture("--timeline", timeline)
    check_outputs(perfetto, timeline, json_path)
    recorded, costs, told = Trace.load(trace), read_fabric(fabric, fabric_set, processor), read_policy(policy)
    choices = [
        told.model_copy(update={"bucket_cap_mb": cap, "order": order, "hook": hook})
        for cap in read_caps_or_default(caps)
        for order in read_orders(orders)
        for hook in read_hooks(hooks)
    ]
    predictions = [
        predict_policy(
            recorded,
            costs,
            world_size,
            choice,
            variation=read_variation(variation),
            stragglers=read_stragglers(straggler),
            inputs=None if inputs is None else read_counts("--inputs", inputs),
        )
        for choice in choices
    ]
    rows = [
        {
            "cap": _cap_name(choice.bucket_cap_mb),
            "order": choice.order,
            "hook": choice.hook.name,
            "buckets": str(len(prediction.buckets)),
            "iteration ms": f"{prediction.iteration_ns / 1e6:.1f}",
            "90 % ms": f"{prediction.interval_ns[0] / 1e6:.1f} - {prediction.interval_ns[1] / 1e6:.1f}",
            "computation ms": f"{prediction.compute_ns / 1e6:.1f}",
            "exposed ms": f"{prediction.exposed_comm_ns / 1e6:.1f}",
            "critical buckets": ", ".join(map(str, prediction.critical_buckets)) or "-",
        }
        for choice, prediction in zip(choices, predictions, strict=True)
    ]
    show_table(rows, f"{recorded.workload.model} on {world_size} ranks, predicted")
    fastest = min(predictions, key=lambda prediction: prediction.iteration_ns)
    _show_breakdown(fastest, told.sync_every)
    if perfetto is not None:
        fastest.save_perfetto(perfetto)
        print(f"timeline of the fastest in {perfetto}; open it in ui.perfetto.dev")
    if timeline is not None:
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        draw_timeline(fastest, figure.add_subplot())
        _save(figure, timeline)
    rows_json = [
        {**_asked(choice), **prediction.to_json()} for choice, prediction in zip(choices, predictions, strict=True)
    ]
    write_json(json_path, {"model": recorded.workload.model, "world_size": world_size, "rows": rows_json})


def sweep_command(
    traces: Annotated[list[Path], typer.Argument(help="Recorded traces.")],
    fabric: Annotated[
        list[Path], typer.Option(help="A fabric file, or a topology in YAML; give it again for several.")
    ],
    world_sizes: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "2,4,8,16,32,64",
    caps: Caps = "1,5,25,100,single",
    orders: Orders = "ready",
    hooks: Hooks = "none",
    policy: Settings = None,
    fabric_set: FabricSettings = None,
    processor: ProcessorFile = None,
    variation: VariationSettings = None,
    straggler: Stragglers = None,
    out: Annotated[Path, typer.Option(help="The table: .csv, .parquet or .json.")] = Path("out/sweep.csv"),
    heat_map: Annotated[Path | None, typer.Option(help="Draw ranks against caps here (.png, .svg).")] = None,
    value: Annotated[str, typer.Option(help="What the heat map shows: efficiency, iteration_ns, ...")] = "efficiency",
    jobs: Annotated[int | None, typer.Option(help="Replays at a time; default: as many as cores.")] = None,
    json_path: Json = None,
) -> None:
    """Predict all combinations of traces, fabrics, ranks, caps, orders and hooks; write them as one table."""
    if out.suffix not in WRITERS:
        raise ValueError(f"--out: expected a name that ends in {', '.join(WRITERS)}; got {out}")
    if value not in VALUES:
        raise ValueError(f"--value: expected one of {', '.join(VALUES)}; got {value!r}")
    _check_picture("--heat-map", heat_map)
    check_outputs(out, heat_map, json_path)
    with progress("sweeping") as on_progress:
        table = sweep(
            {str(path): Trace.load(path) for path in traces},
            {str(path): read_fabric(path, fabric_set, processor) for path in fabric},
            world_sizes=read_counts("--world-sizes", world_sizes),
            bucket_caps_mb=read_caps_or_default(caps),
            orders=read_orders(orders),
            hooks=read_hooks(hooks),
            policy=read_policy(policy),
            variation=read_variation(variation),
            stragglers=read_stragglers(straggler),
            n_jobs=jobs,
            on_progress=on_progress,
        )
    _write_table(table, out)
    if heat_map is not None:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        draw_heat_map(table, figure.add_subplot(), value=value)
        _save(figure, heat_map)
    best = table.loc[table.groupby(list(AXES[:3]), sort=False)["iteration_ns"].idxmin()]
    show_table([_best_row(row) for _, row in best.head(SHOWN_ROWS).iterrows()], "the fastest at each world size")
    print(f"{len(table)} configurations in {out}")
    write_json(json_path, {"rows": table.replace({float("inf"): None}).to_dict("records")})


def _cap_name(cap_mb: float | None) -> str:
    return "default" if cap_mb is None or math.isnan(cap_mb) else cap_name(cap_mb)


def _asked(choice: Policy) -> dict[str, object]:
    """JSON has no infinity: one single bucket is written as null; DDP's default as that word."""
    cap = choice.bucket_cap_mb
    return {
        "cap_mb": "default" if cap is None else None if cap == math.inf else cap,
        "order": choice.order,
        "hook": choice.hook.name,
    }


def _show_breakdown(prediction: Prediction, cycle: int) -> None:
    parts = {part: ns for part, ns in prediction.breakdown.items() if ns}
    row = {part.replace("_", " "): f"{ns / 1e6:.1f}" for part, ns in parts.items()}
    what = "iteration" if cycle == 1 else f"cycle of {cycle} iterations"
    show_table([row], f"where the fastest one's median {what} goes on its slowest rank, ms")


def _best_row(row: "pd.Series[Any]") -> dict[str, str]:
    return {
        "trace": Path(str(row["trace"])).name,
        "fabric": Path(str(row["fabric"])).name,
        "ranks": str(row["world_size"]),
        "cap": _cap_name(float(str(row["bucket_cap_mb"]))),
        "order": str(row["order"]),
        "hook": str(row["hook"]),
        "iteration ms": f"{float(str(row['iteration_ns'])) / 1e6:.1f}",
        "90 % ms": f"{float(str(row['low_ns'])) / 1e6:.1f} - {float(str(row['high_ns'])) / 1e6:.1f}",
        "efficiency": f"{float(str(row['efficiency'])):.0%}",
    }


def _write_table(table: pd.DataFrame, path: Path) -> None:
    data = BytesIO()
    try:
        WRITERS[path.suffix](table, data)
    except ImportError:
        raise ValueError(
            f"{path}: Parquet needs pyarrow; run `pip install 'ddplab[parquet]'`, or choose .csv"
        ) from None
    write_whole(path, data.getvalue())


def _check_picture(option: str, path: Path | None) -> None:
    if path is not None and path.suffix not in PICTURES:
        raise ValueError(f"{option}: expected a name that ends in {', '.join(PICTURES)}; got {path}")


def _save(figure: Figure, path: Path) -> None:
    data = BytesIO()
    figure.savefig(data, format=path.suffix.lstrip("."), dpi=120)
    write_whole(path, data.getvalue())
    print(f"drawn in {path}")
