"""The command `ddplab`: record, calibrate, predict, validate, demo.

This is where the parts meet: commands read arguments, call one function, and show what it returned. Whatever
needs torch is imported by the command that needs it.
"""

import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from reference.bucketing import ORDERS, Order, cap_name
from reference.errors import Error
from reference.files import check_writable
from reference.trace import Trace

from .fabric import Fabric
from .prediction import predict as predict_iteration
from .report import Configuration
from .show import describe_trace, progress, show_report, show_table, write_json

app = typer.Typer(
    help="Record data-parallel training, predict it under other buckets and networks, check the predictions.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    str, typer.Option(help="Built-in name (resnet50, resnet18, mlp, transformer, small-tensors) or module:callable.")
]
WorldSize = Annotated[int, typer.Option(min=1, help="Number of ranks.")]
Caps = Annotated[str, typer.Option(help="Bucket caps in MB, comma-separated; `single` means one single bucket.")]
Orders = Annotated[
    str,
    typer.Option(
        help="Bucket orders, comma-separated: ready (as gradients come), reverse, forward (of registration)."
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the result here, for programs.")]


def main() -> None:
    """Run the command; what the user can mend is told in one line."""
    sys.path.insert(0, os.getcwd())  # so that --model finds the user's own module, as `python -m` would
    try:
        app()
    except (Error, ValueError, OSError) as error:
        sys.exit(f"ddplab: {error}")


@app.command()
def record(
    model: Model = "resnet50",
    world_size: WorldSize = 1,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations to record, after 2 of warm-up.")] = 10,
    out: Annotated[Path, typer.Option(help="The trace; .gz compresses it.")] = Path("out/trace.json.gz"),
    json_path: Json = None,
) -> None:
    """Record when each gradient of a model is ready, all ranks at once, without communication."""
    from reference.launch import RankPool

    from .training import record_computation

    _check_outputs(out, json_path)

    with progress() as on_progress, RankPool(world_size) as pool:
        on_progress("recording", 0, 1)
        trace = pool.run(record_computation, model, iterations)[0]
    trace.save(out)
    summary = describe_trace(trace)
    show_table([summary], f"{model}, recorded in {out}")
    write_json(json_path, {"trace": str(out), **summary})


@app.command()
def calibrate(
    model: Model = "resnet50",
    world_size: WorldSize = 2,
    out: Annotated[Path, typer.Option(help="The fabric file.")] = Path("out/fabric.json"),
    json_path: Json = None,
) -> None:
    """Measure collectives on this machine, and how they and the model's computation slow each other down."""
    from reference.launch import RankPool

    from .calibrate import calibrate as measure

    _check_outputs(out, json_path)
    with progress() as on_progress, RankPool(world_size) as pool:
        fabric = measure(pool, model, on_progress=on_progress)
    fabric.save(out)
    factors = {row.size_bytes: row.factor for row in fabric.sharing}
    broadcasts = {row.size_bytes: row.ns for row in fabric.broadcast}
    rows = [
        {
            "bytes": f"{row.size_bytes:,}",
            "all-reduce ms": f"{row.ns / 1e6:.3f}",
            "two at a time": f"x {factors[row.size_bytes]:.2f}",
            "broadcast ms": f"{broadcasts[row.size_bytes] / 1e6:.3f}",
        }
        for row in fabric.all_reduce
    ]
    processor = fabric.processor
    show_table(rows, f"{world_size} ranks, saved as {out}")
    print(
        f"while a collective runs, computation of {model} takes x {processor.compute_slowdown:.2f}; "
        f"while it computes, a collective takes x {processor.collective_slowdown:.2f}"
    )
    write_json(json_path, fabric.model_dump())


@app.command()
def predict(
    trace: Annotated[Path, typer.Argument(help="A recorded trace.")],
    fabric: Annotated[Path, typer.Option(help="A fabric file, from `ddplab calibrate`.")] = Path("out/fabric.json"),
    world_size: WorldSize = 2,
    caps: Caps = "0.5,1,5,25,single",
    orders: Orders = "ready",
    perfetto: Annotated[Path | None, typer.Option(help="Write the fastest one's timeline here.")] = None,
    json_path: Json = None,
) -> None:
    """Predict the iteration time under each bucket cap and order."""
    _check_outputs(perfetto, json_path)
    recorded, costs = Trace.load(trace), Fabric.load(fabric)
    predictions = {
        (cap, order): predict_iteration(recorded, costs, world_size=world_size, bucket_cap_mb=cap, order=order)
        for cap in _caps(caps)
        for order in _orders(orders)
    }
    rows = [
        {
            "cap": cap_name(cap),
            "order": order,
            "buckets": str(len(prediction.buckets)),
            "iteration ms": f"{prediction.iteration_ns / 1e6:.1f}",
            "90 % ms": f"{prediction.interval_ns[0] / 1e6:.1f} - {prediction.interval_ns[1] / 1e6:.1f}",
            "computation ms": f"{prediction.compute_ns / 1e6:.1f}",
            "exposed ms": f"{prediction.exposed_comm_ns / 1e6:.1f}",
        }
        for (cap, order), prediction in predictions.items()
    ]
    show_table(rows, f"{recorded.workload.model} on {world_size} ranks, predicted")
    if perfetto is not None:
        fastest = min(predictions.values(), key=lambda prediction: prediction.iteration_ns)
        fastest.save_perfetto(perfetto)
        print(f"timeline of the fastest: open {perfetto} in ui.perfetto.dev")
    rows_json = [
        {**Configuration(cap, order).to_json(), **prediction.to_json()}
        for (cap, order), prediction in predictions.items()
    ]
    write_json(json_path, {"model": recorded.workload.model, "world_size": world_size, "rows": rows_json})


@app.command()
def validate(
    model: Model = "resnet50",
    world_size: WorldSize = 2,
    caps: Caps = "0.5,1,5,25,single",
    orders: Orders = "ready",
    repeat: Annotated[int, typer.Option(min=1, help="Turns of each configuration, 2 iterations each.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for trace, fabric, predictions, report.")] = Path("out/validate"),
    json_path: Json = None,
) -> None:
    """Record, calibrate, write predictions to disk, then train for real and compare."""
    from reference.launch import RankPool

    from .validate import validate as run

    _check_outputs(out / "report.json", json_path)
    configurations = [Configuration(cap, order) for cap in _caps(caps) for order in _orders(orders)]
    with progress() as on_progress, RankPool(world_size) as pool:
        report = run(pool, [model], configurations, out=out, repeat=repeat, on_progress=on_progress)
    show_report(report)
    write_json(json_path, report.to_json())


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything that it makes.")] = Path("out/demo"),
    json_path: Json = None,
) -> None:
    """Train ResNet-50 and an MLP on two ranks, predicted first: about 3 minutes on two cores."""
    from .demo import demo as run

    _check_outputs(out / "report.json", json_path)
    with progress() as on_progress:
        report = run(out, on_progress=on_progress)
    show_report(report)
    print(f"in {out}: report.csv, report.json, demo.png; for each model trace.json.gz, fabric.json, perfetto.json")
    write_json(json_path, report.to_json())


# Reading arguments


def _caps(text: str) -> list[float]:
    caps = []
    for word in text.split(","):
        try:
            cap = math.inf if word.strip() == "single" else float(word)
        except ValueError:
            cap = math.nan
        if not cap > 0:
            raise ValueError(f"--caps: expected sizes in MB above 0, or `single`, separated by commas; got {word!r}")
        caps.append(cap)
    return caps


def _orders(text: str) -> list[Order]:
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in ORDERS]:
        raise ValueError(f"--orders: expected {', '.join(ORDERS)}, separated by commas; got {unknown[0]!r}")
    return [order for word in words for order in ORDERS if order == word]


def _check_outputs(*paths: Path | None) -> None:
    """Before any work: what will be written can be."""
    for path in paths:
        if path is not None:
            check_writable(path)
