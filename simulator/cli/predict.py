"""`ddplab predict` and `ddplab sweep`: iteration times of one trace, or of all combinations."""

from collections.abc import Callable, Hashable, Mapping
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from matplotlib.figure import Figure

from reference.schema import write_atomically
from reference.trace import Trace

from ..answers.heat_map import draw_heat_map
from ..answers.timeline_plot import draw_timeline
from ..argument_checks import overruled
from ..prediction import Prediction, predict_policy
from ..schedule.policy import Policy
from ..sweep import AXES, COLUMNS
from ..sweep import sweep as sweep_all
from .options import (
    CAPS,
    FABRIC_FILE,
    OPTIONS,
    ChosenOrders,
    FabricSettings,
    Hooks,
    Json,
    ProcessorFile,
    Settings,
    Stragglers,
    VariationSettings,
    WorldSize,
    cap_json,
    cap_word,
    check_outputs,
    check_picture,
    choose_caps,
    choose_orders,
    read_counts,
    read_fabric,
    read_hooks,
    read_policy,
    read_stragglers,
    read_variation,
    save_picture,
)
from .output import progress, show_table, write_json

FABRIC = Path("out/fabric.json")
PREDICT_CAPS = "0.5,1,5,25,single"
SPARED = ("hook", "critical buckets", "computation ms", "buckets")
"""Columns that a narrow terminal does without."""


def predict(
    trace: Annotated[Path, typer.Argument(help="A recorded trace.")],
    fabric: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"{FABRIC_FILE}; give it again to merge measured tables: what else they hold is the first one's.",
            show_default=str(FABRIC),
        ),
    ] = None,
    world_size: WorldSize = 2,
    caps: Annotated[str | None, typer.Option(help=CAPS, show_default=PREDICT_CAPS)] = None,
    orders: ChosenOrders = None,
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
    """Predict the iteration time under each bucket cap, order and comm hook.

    Each row has the median iteration, an interval that holds 90 % of them, computation alone, what data
    parallelism adds to that (copies, slower computation, waiting), and the buckets on the critical path; of the
    fastest row also where its time goes. A trace of one rank does for any world size. What is not known and so counts
    as free is told.
    """
    check_picture("--timeline", timeline)
    check_outputs(perfetto, timeline, json_path)
    told = read_policy(policy)
    choices = _choices(told, caps, orders, hooks)
    recorded, costs = Trace.load(trace), read_fabric(fabric or [FABRIC], fabric_set, processor)
    ask = partial(
        predict_policy,
        *(recorded, costs, world_size),
        variation=read_variation(variation),
        stragglers=read_stragglers(straggler),
        inputs=None if inputs is None else read_counts("--inputs", inputs, least=0),
    )
    predictions = [ask(choice) for choice in choices]
    model = recorded.workload.model
    show_table(
        list(map(_prediction_row, choices, predictions)), f"{model} on {world_size} ranks, predicted", optional=SPARED
    )
    for sentence in dict.fromkeys(sentence for one in predictions for sentence in one.counted_as_free):
        print(sentence)
    fastest = min(predictions, key=lambda prediction: prediction.iteration_ns)
    _show_breakdown(fastest, told.sync_every)
    _save_timelines(fastest, perfetto, timeline)
    rows = list(map(_row_json, choices, predictions))
    write_json(json_path, {"model": model, "world_size": world_size, "rows": rows})


def _choices(told: Policy, caps: str | None, orders: str | None, hooks: str) -> list[Policy]:
    tried = product(choose_caps(caps, told, PREDICT_CAPS), choose_orders(orders, told), read_hooks(hooks))
    return [told.model_copy(update=dict(zip(OPTIONS, values, strict=True))) for values in tried]


def _asked(choice: Policy) -> dict[str, Any]:
    """The axes of a choice; where another field of the policy decides, its name."""
    asked = {"bucket_cap_mb": choice.bucket_cap_mb, "order": choice.order, "hook": choice.hook.name}
    return asked | overruled(choice)


def _prediction_row(choice: Policy, prediction: Prediction) -> dict[str, str]:
    """For a person, in milliseconds."""
    asked = _asked(choice)
    return {
        "cap": cap_word(asked["bucket_cap_mb"]),
        "order": asked["order"],
        "hook": asked["hook"],
        "buckets": str(len(prediction.buckets)),
        "iteration ms": f"{prediction.iteration_ns / 1e6:.1f}",
        "90 % ms": f"{prediction.interval_ns[0] / 1e6:.1f} - {prediction.interval_ns[1] / 1e6:.1f}",
        "computation ms": f"{prediction.compute_ns / 1e6:.1f}",
        "added ms": f"{prediction.exposed_comm_ns / 1e6:.1f}",
        "critical buckets": ", ".join(map(str, prediction.critical_buckets)) or "none",
    }


def _row_json(choice: Policy, prediction: Prediction) -> dict[str, Any]:
    """For programs; see `cap_json`."""
    asked = _asked(choice)
    return {"cap_mb": cap_json(asked.pop("bucket_cap_mb")), **asked, **prediction.to_json()}


def _show_breakdown(prediction: Prediction, cycle: int) -> None:
    parts = {part: ns for part, ns in prediction.breakdown.items() if ns}
    row = {part.replace("_", " "): f"{ns / 1e6:.1f}" for part, ns in parts.items()}
    what = "iteration" if cycle == 1 else f"cycle of {cycle} iterations"
    show_table([row], f"where the fastest one's median {what} goes on its slowest rank, ms")
    if prediction.epoch_end_ns:
        print(f"after the last iteration all ranks get one's model: {prediction.epoch_end_ns / 1e6:.1f} ms")


def _save_timelines(prediction: Prediction, perfetto: Path | None, picture: Path | None) -> None:
    if perfetto is not None:
        prediction.save_perfetto(perfetto)
        print(f"timeline of the fastest in {perfetto}; open it in ui.perfetto.dev")
    if picture is not None:
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        draw_timeline(prediction, figure.add_subplot())
        save_picture(figure, picture)


WRITERS: dict[str, Callable[[pd.DataFrame, BytesIO], object]] = {
    ".csv": lambda table, data: table.to_csv(data, index=False),
    ".parquet": lambda table, data: table.to_parquet(data, index=False),
    ".json": lambda table, data: table.to_json(data, orient="records", indent=1),
}
"""Endings of a sweep's table, and what writes it."""

VALUES = COLUMNS[len(AXES) :]
SWEEP_CAPS = "1,5,25,100,single"
SHOWN_ROWS = 40


def sweep(
    traces: Annotated[list[Path], typer.Argument(help="Recorded traces.")],
    fabric: Annotated[list[Path], typer.Option(help=f"{FABRIC_FILE}; give it again to try several.")],
    world_sizes: Annotated[str, typer.Option(help="Numbers of ranks, comma-separated.")] = "2,4,8,16,32,64",
    caps: Annotated[str | None, typer.Option(help=CAPS, show_default=SWEEP_CAPS)] = None,
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
            bucket_caps_mb=choose_caps(caps, told, SWEEP_CAPS),
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
    write_atomically(path, data.getvalue())


def _show_fastest(table: pd.DataFrame) -> None:
    best = table.loc[table.groupby(list(AXES[:3]), sort=False)["iteration_ns"].idxmin()]
    rows = [_sweep_row(row) for row in best.head(SHOWN_ROWS).to_dict("records")]
    show_table(rows, "the fastest at each world size")


def _sweep_row(row: Mapping[Hashable, Any]) -> dict[str, str]:
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
