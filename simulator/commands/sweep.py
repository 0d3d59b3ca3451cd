"""`ddplab sweep`: ask traces what iterations would cost in all combinations, as a table and a heat map."""

from collections.abc import Callable, Hashable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from matplotlib.figure import Figure

from reference.files import write_whole
from reference.trace import Trace

from ..answers.heat_map import draw_heat_map
from ..checks import overruled
from ..show import progress, show_table, write_json
from ..sweep import AXES, COLUMNS
from ..sweep import sweep as sweep_all
from .arguments import (
    FABRIC_FILE,
    FabricSettings,
    Hooks,
    Json,
    ProcessorFile,
    Settings,
    Stragglers,
    VariationSettings,
    check_outputs,
    read_counts,
    read_fabric,
    read_hooks,
    read_policy,
    read_stragglers,
    read_variation,
)
from .choices import CAPS, ChosenOrders, cap_json, cap_word, choose_caps, choose_orders
from .pictures import check_picture, save_picture

WRITERS: dict[str, Callable[[pd.DataFrame, BytesIO], object]] = {
    ".csv": lambda table, data: table.to_csv(data, index=False),
    ".parquet": lambda table, data: table.to_parquet(data, index=False),
    ".json": lambda table, data: table.to_json(data, orient="records", indent=1),
}
"""Endings of a sweep's table, and what writes it."""

VALUES = COLUMNS[len(AXES) :]
USUAL_CAPS = "1,5,25,100,single"
SHOWN_ROWS = 40


def sweep(
    traces: Annotated[list[Path], typer.Argument(help="Recorded traces.")],
    fabric: Annotated[list[Path], typer.Option(help=f"{FABRIC_FILE}; give it again to try several.")],
    world_sizes: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "2,4,8,16,32,64",
    caps: Annotated[str | None, typer.Option(help=CAPS, show_default=USUAL_CAPS)] = None,
    orders: ChosenOrders = None,
    hooks: Hooks = "none",
    policy: Settings = None,
    fabric_set: FabricSettings = None,
    processor: ProcessorFile = None,
    variation: VariationSettings = None,
    straggler: Stragglers = None,
    out: Annotated[Path, typer.Option(help="The table: .csv, .parquet or .json.")] = Path("out/sweep.csv"),
    heat_map: Annotated[Path | None, typer.Option(help="Draw the table here (.png, .svg).")] = None,
    rows: Annotated[str, typer.Option(help=f"Down the heat map: {', '.join(AXES)}.")] = "bucket_cap_mb",
    columns: Annotated[str, typer.Option(help="Along the heat map, as --rows.")] = "world_size",
    value: Annotated[
        str, typer.Option(help="What each cell of the heat map tells of its fastest configuration.")
    ] = "efficiency",
    jobs: Annotated[int | None, typer.Option(help="Replays at a time; default: as many as cores.")] = None,
    json_path: Json = None,
) -> None:
    """Predict all combinations of traces, fabrics, ranks, caps, orders and hooks; write them as one table.

    Each --fabric is tried by itself. The heat map has two of the axes along its sides, and in each cell the fastest
    of all else. Where speeds are constant thousands of combinations take a second; others are replayed on all cores.
    """
    if out.suffix not in WRITERS:
        raise ValueError(f"--out: expected a name that ends in {', '.join(WRITERS)}; got {out}")
    _check_heat_map(heat_map, rows, columns, value)
    check_outputs(out, heat_map, json_path)
    told = read_policy(policy)
    with progress("sweeping") as on_progress:
        table = sweep_all(
            {str(path): Trace.load(path) for path in traces},
            {str(path): read_fabric([path], fabric_set, processor) for path in fabric},
            world_sizes=read_counts("--world-sizes", world_sizes),
            bucket_caps_mb=choose_caps(caps, told, USUAL_CAPS),
            orders=choose_orders(orders, told),
            hooks=read_hooks(hooks),
            policy=told,
            variation=read_variation(variation),
            stragglers=read_stragglers(straggler),
            n_jobs=jobs,
            on_progress=on_progress,
        )
    table = table.assign(**overruled(told))
    _write_table(table, out)
    if heat_map is not None:
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        draw_heat_map(table, figure.add_subplot(), rows=rows, columns=columns, value=value)
        save_picture(figure, heat_map)
    _show_fastest(table)
    print(f"{len(table)} configurations in {out}")
    write_json(json_path, {"rows": _rows_json(table)})


def _check_heat_map(path: Path | None, rows: str, columns: str, value: str) -> None:
    """Before the work is done of which it could not be drawn."""
    check_picture("--heat-map", path)
    others = [axis for axis in AXES if axis != rows]
    for option, name, names in (("--rows", rows, AXES), ("--columns", columns, others), ("--value", value, VALUES)):
        if name not in names:
            raise ValueError(f"{option}: expected one of {', '.join(names)}; got {name!r}")


def _write_table(table: pd.DataFrame, path: Path) -> None:
    data = BytesIO()
    try:
        WRITERS[path.suffix](table, data)
    except ImportError:
        raise ValueError(
            f"{path}: Parquet needs pyarrow; run `pip install 'ddplab[parquet]'`, or choose .csv"
        ) from None
    write_whole(path, data.getvalue())


def _show_fastest(table: pd.DataFrame) -> None:
    best = table.loc[table.groupby(list(AXES[:3]), sort=False)["iteration_ns"].idxmin()]
    rows = [_row(row) for row in best.head(SHOWN_ROWS).to_dict("records")]
    show_table(rows, "the fastest at each world size")


def _row(row: Mapping[Hashable, Any]) -> dict[str, str]:
    """For a person, in milliseconds."""
    return {
        "trace": Path(row["trace"]).name,
        "fabric": Path(row["fabric"]).name,
        "ranks": str(row["world_size"]),
        "cap": cap_word(row["bucket_cap_mb"]),
        "order": row["order"],
        "hook": row["hook"],
        "iteration ms": f"{row['iteration_ns'] / 1e6:.1f}",
        "90 % ms": f"{row['low_ns'] / 1e6:.1f} - {row['high_ns'] / 1e6:.1f}",
        "efficiency": f"{row['efficiency']:.0%}",
    }


def _rows_json(table: pd.DataFrame) -> list[dict[Hashable, Any]]:
    """For programs; see `cap_json`."""
    return [row | {"bucket_cap_mb": cap_json(row["bucket_cap_mb"])} for row in table.to_dict("records")]
