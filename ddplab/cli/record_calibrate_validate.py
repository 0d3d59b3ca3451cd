"""`ddplab record`, `calibrate`, `validate` and `demo`: subcommands that run the real reducer."""

from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated

from typer import Option

from ..reference.files.writing import milliseconds
from ..reference.ranks.fork_server import start_server
from . import shared_options as options
from .show import show_fabric
from .terminal_output import progress, save_trace, show_report, show_table, write_json

NOISY_SPREAD = 1.0
"""Half-width of the band of repeated all-reduces, a fraction of the median, above which the machine is noisy."""
HELP = {
    "alone": options.HELP["processes"].format(1),
    "iterations": "Iterations to record, after 2 warm-up iterations.",
    "hook": "Also measure this comm hook: fp16, quantize_per_tensor, power_sgd:RANK, ... May be repeated.",
    "plan": "Train torch's default buckets and those of this plan, which `tune` has written, instead of --caps.",
    "repeat": "Turns of each configuration; a turn measures 3 iterations.",
    "torch": "Also train each configuration with torch's class, in turns with ours.",
    "out": "Folder for trace, fabric file, predictions and report.",
}


def record(
    model: options.Model = "resnet50",
    world_size: Annotated[int | None, Option(min=1, metavar="N", help=HELP["alone"], show_default=False)] = None,
    backend: options.Backend = None,
    iterations: Annotated[int, Option(min=1, max=100_000, metavar="N", help=HELP["iterations"])] = 10,
    out: options.TraceOut = Path("out/trace.json.gz"),
) -> None:
    """Record when each gradient of a model is ready, on all ranks, without communication.

    The ranks compute at the same time, as in training, but send nothing: with all-reduces, every rank would take as
    long as the slowest one. The trace is the input of `predict`, `plan` and `tune`. To record a script of your
    own, see `ddplab.reference.recorder`.
    """
    start_server()  # it imports torch while this process does
    from ..reference.launch import RankPool, default_backend, world_size_or
    from ..training_runs import record_computation

    options.check_outputs(out, inputs=options.files_of(model))
    ranks = world_size or world_size_or(1)
    backend = backend or default_backend(ranks)
    with progress() as on_progress, RankPool(ranks, backend=backend, pinned=True) as pool:
        on_progress(f"recording on {ranks} rank{'s' * (ranks > 1)}", 0, 1)
        trace = pool.run(record_computation, model, iterations)[0]
    save_trace(trace, out, f"{model}, recorded in {out}")


def calibrate(
    model: options.Model = "resnet50",
    world_size: options.Processes = None,
    backend: options.Backend = None,
    hook: Annotated[list[str] | None, Option(metavar="HOOK", help=HELP["hook"])] = None,
    out: Annotated[Path, Option(metavar="PATH", help="Where to write the fabric file.")] = options.FABRIC,
) -> None:
    """Measure collectives on this machine, and how much they and the model's computation slow each other down.

    Real ranks run all-reduces and broadcasts of up to the size of all gradients, alone and next to the model's
    computation. Copies, launches, comm hooks and the rebuild of buckets are measured too. Nothing else should run on
    the machine meanwhile: the spread of repeated measurements widens the predicted intervals. Choose the model that
    you want to predict, or a similar one.
    """
    start_server()  # it imports torch while this process does
    from ..calibration.calibrate import calibrate as measure
    from ..reference.launch import RankPool, default_backend, world_size_or

    options.check_outputs(out, inputs=options.files_of(model))
    ranks = world_size or world_size_or(2)
    pool = RankPool(ranks, backend=backend or default_backend(ranks), pinned=True)
    with progress() as on_progress, pool:
        fabric = measure(pool, model, hooks=hook or (), on_progress=on_progress)
    fabric.save(out)
    print(f"{ranks} rank{'s' * (ranks > 1)}, saved as {out}")
    show_fabric(fabric, str(out))
    if median(row.spread for row in fabric.all_reduce) > NOISY_SPREAD:
        print("all-reduces varied, probably because other programs ran; calibrate again while nothing else runs")
    more = f"--set extrapolate=true --world-size {4 * ranks}" if ranks > 1 else "--world-size 1"
    print(
        f"next: ddplab predict TRACE --fabric {out} {more}\n"
        f"TRACE is what `ddplab record --model {model} --out TRACE` writes"
    )


def validate(
    model: options.Model = "resnet50",
    world_size: options.Processes = None,
    backend: options.Backend = None,
    caps: options.Caps = None,
    orders: options.Orders = None,
    hooks: options.Hooks = "none",
    plan: Annotated[Path | None, Option(metavar="PATH", help=HELP["plan"])] = None,
    repeat: Annotated[int, Option(min=1, metavar="N", help=HELP["repeat"])] = 10,
    torch: Annotated[bool, Option("--torch", help=HELP["torch"])] = False,  # noqa: FBT002 - an option
    out: Annotated[Path, Option(metavar="FOLDER", help=HELP["out"])] = Path("out/validate"),
    json_path: options.Json = None,
) -> None:
    """Record, calibrate, write predictions to disk, then train and compare.

    The table has the errors of the prediction and of four baselines, the predicted interval and how many iterations
    lie inside, and the noise floor of repeated measurements. The folder contains the trace, the fabric file,
    predictions.json (written before the first run) and report.json.

    With --plan, the gain of the plan over torch's default buckets stands below the table.
    """
    start_server()  # it imports torch while this process does
    from ..prediction_errors import Cap, Configuration
    from ..reference.launch import RankPool, default_backend, world_size_or
    from ..simulator.tuning.bucket_plan import BucketPlan
    from ..train_and_compare import validate as run

    options.check_outputs(json_path, inputs=[plan, *options.files_of(model)], folder=out)
    if plan is not None:
        options.refuse({"--caps": caps, "--orders": orders}, "expected either this or --plan")
    planned = None if plan is None else BucketPlan.load(plan)
    of_caps: list[Cap] = ["default", "plan"]
    if plan is None:
        caps_mb = options.read_caps(options.PREDICT_CAPS if caps is None else caps)
        of_caps = ["default" if cap is None else cap for cap in caps_mb]
    axes = product(of_caps, options.read_orders("ready" if orders is None else orders), options.read_hooks(hooks))
    targets = [Configuration(cap, order, hook.name) for cap, order, hook in axes]
    ranks = world_size or world_size_or(2)
    pool = RankPool(ranks, backend=backend or default_backend(ranks), pinned=True)
    with progress() as on_progress, pool:
        result = run(
            pool, model, targets, out=out, repeat=repeat, with_torch=torch, plan=planned, on_progress=on_progress
        )
    show_report(result)
    write_json(json_path, result.to_json())


def demo(
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder for timeline and results.")] = Path("out/demo"),
) -> None:
    """Check predictions against the real reducer in virtual time: seconds, and exact to the nanosecond.

    ddplab's reducer trains ResNet-50 on 8 emulated V100s over 10 Gbit/s: buckets, gradients and collectives are real,
    the devices take recorded times, and nothing sleeps. `validate` compares predictions with training by the clock.
    """
    from ..demo import EXAMPLE
    from ..demo import demo as run

    options.check_outputs(*(out / name for name in ("trace.json.gz", "fabric.json", "perfetto.json", "demo.json")))
    with progress("emulating") as _:
        rows = run(out)
    title = f"{EXAMPLE}, emulated: iteration of the real reducer and its prediction"
    cells = [
        {
            "cap": row["cap"],
            "order": row["order"],
            "reducer ms": milliseconds(row["reducer_ns"], ".3f"),
            "predicted ms": milliseconds(row["predicted_ns"], ".3f"),
            "difference ns": str(row["predicted_ns"] - row["reducer_ns"]),
            **{name: f"{ns / row['reducer_ns'] - 1:+.0%}" for name, ns in row["baselines_ns"].items()},
        }
        for row in rows
    ]
    show_table(cells, title, optional=("order", "perfect scaling"))
    largest_ns = max(abs(row["reducer_ns"] - row["predicted_ns"]) for row in rows)
    print(f"largest difference between the reducer and the prediction: {largest_ns} ns")
    write_json(out / "demo.json", {"rows": rows})
    print(f"written to {out}: demo.json; perfetto.json, the timeline with the default cap, for ui.perfetto.dev")
    print(f"next: ddplab predict {out}/trace.json.gz --fabric {out}/fabric.json --world-size 8 --set device_spread=0")
