"""`ddplab validate` and `ddplab demo`: predict, then train for real, and compare."""

from pathlib import Path
from typing import Annotated

import typer

from ..report import Configuration
from ..show import progress, show_report, write_json
from .arguments import (
    Caps,
    Hooks,
    Json,
    LinkRate,
    Model,
    Orders,
    WorldSize,
    check_outputs,
    read_caps,
    read_hooks,
    read_link_rate,
    read_orders,
)


def validate(
    model: Model = "resnet50",
    world_size: WorldSize = 2,
    caps: Caps = "0.5,1,5,25,single",
    orders: Orders = "ready",
    hooks: Hooks = "none",
    repeat: Annotated[
        int,
        typer.Option(min=1, help="Turns of each configuration, 3 iterations each."),
    ] = 3,
    link_rate: LinkRate = None,
    out: Annotated[Path, typer.Option(help="Folder for trace, fabric, predictions, report.")] = Path("out/validate"),
    json_path: Json = None,
) -> None:
    """Record, calibrate, write predictions to disk, then train for real and compare.

    Errors are told by the clock, and paired with the machine's speed beside each run; then whether configurations
    are ranked rightly, how many iterations lie inside the interval, and what three simpler rules would have said. OUT
    gets the trace, the calibration, predictions.json as it was before the first run, report.json and report.csv.
    """
    from reference.launch import RankPool

    from ..validate import validate as run

    check_outputs(out / "report.json", json_path)
    configurations = [
        Configuration(cap, order, hook.name)
        for cap in read_caps(caps)
        for order in read_orders(orders)
        for hook in read_hooks(hooks)
    ]
    with progress() as on_progress, RankPool(world_size, link_rate=read_link_rate(link_rate)) as pool:
        report = run(pool, [model], configurations, out=out, repeat=repeat, on_progress=on_progress)
    show_report(report)
    write_json(json_path, report.to_json())


def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything that it makes.")] = Path("out/demo"),
    json_path: Json = None,
) -> None:
    """Train ResNet-50 and an MLP on two ranks, predicted first: 5 to 7 minutes on two cores.

    What `validate` does, for two models under 13 bucket configurations each, with a picture and timelines.
    """
    from ..demo import demo as run

    check_outputs(out / "report.json", json_path)
    with progress() as on_progress:
        report = run(out, on_progress=on_progress)
    show_report(report)
    print(
        f"in {out}: predictions.json (written before the training), report.csv, report.json, demo.png; "
        "for each model trace.json.gz, fabric.json, perfetto.json"
    )
    write_json(json_path, report.to_json())
