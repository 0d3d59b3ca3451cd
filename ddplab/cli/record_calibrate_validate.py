"""`ddplab record`, `calibrate`, `validate` and `demo`: subcommands that run real ranks on this machine."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

from typer import Option

from reference.fork_server import start_server
from reference.trace import Trace

from . import shared_options as options
from .terminal_output import progress, save_trace, show_report, show_table, write_json

TURNS, EMULATED_TURNS = 10, 3
"""Turns of each configuration by default; iterations of a processor that computes vary more."""
SHOWN_TURNS = f"{TURNS}, or {EMULATED_TURNS} with --emulate"
HELP = {
    "alone": options.HELP["processes"].format(1),
    "iterations": "Iterations to record, after 2 warm-up iterations.",
    "hook": "Also measure this comm hook: fp16, quantize_per_tensor, power_sgd:RANK, ... May be repeated.",
    "emulate": "Instead of a model, train emulated devices that take the times of a trace.",
    "calibrate_at": "With --emulate: calibrate the network with these numbers of ranks, and extrapolate it.",
    "repeat": "Turns of each configuration; a turn measures 3 iterations.",
    "calibrations": "Calibrate N times, each time before an equal share of the turns; the prediction is the mean "
    "of N.",
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
    own, see `reference.recorder`.
    """
    start_server()  # it imports torch while this process does
    from reference.launch import RankPool, default_backend, world_size_or

    from ..validation.training_runs import record_computation

    options.check_outputs(out, inputs=options.files_of(model))
    ranks = world_size or world_size_or(1)
    backend = backend or default_backend(ranks)
    with progress() as on_progress, RankPool(ranks, backend=backend, pinned=True) as pool:
        on_progress("recording", 0, 1)
        trace = pool.run(record_computation, model, iterations)[0]
    save_trace(trace, out, f"{model}, recorded in {out}")


def calibrate(
    model: options.Model = "resnet50",
    world_size: options.Processes = None,
    backend: options.Backend = None,
    hook: Annotated[list[str] | None, Option(metavar="HOOK", help=HELP["hook"])] = None,
    link_rate: options.LinkRate = None,
    out: Annotated[Path, Option(metavar="PATH", help="Where to write the fabric file.")] = options.FABRIC,
) -> None:
    """Measure collectives on this machine, and how much they and the model's computation slow each other down.

    Real ranks run all-reduces and broadcasts of up to the size of all gradients, alone and next to the model's
    computation. Copies, launches, comm hooks and the rebuild of buckets are measured too. Nothing else should run on
    the machine meanwhile: the spread of repeated measurements widens the predicted intervals. Choose the model that
    you want to predict, or a similar one.
    """
    start_server()  # it imports torch while this process does
    from reference.launch import RankPool, default_backend, world_size_or

    from ..calibration.calibrate import REPEATS
    from ..calibration.calibrate import calibrate as measure
    from ..calibration.device_spread import spread_of, time_iterations_alone
    from .terminal_output import show_calibration

    options.check_outputs(out, inputs=options.files_of(model))
    rate, _ = options.read_links(link_rate, None)
    ranks = world_size or world_size_or(2)
    pool = RankPool(ranks, backend=backend or default_backend(ranks), link_rate=rate, pinned=True)
    with progress() as on_progress, pool:
        spread = spread_of(pool.run(time_iterations_alone, model, REPEATS))
        fabric = measure(pool, model, hooks=hook or (), on_progress=on_progress)
    fabric.save(out)
    show_calibration(fabric, model, f"{ranks} ranks, saved as {out}")
    print(
        f"devices differ in speed by {spread.between_devices:.1%}, iterations of one device by "
        f"{spread.between_iterations:.1%} (standard deviations)"
    )
    print(
        f"next: ddplab predict TRACE --fabric {out} --set extrapolate=true --world-size {4 * ranks} "
        f"--set device_spread={spread.between_devices:.4f}"
    )
    print(f"TRACE is what `ddplab record --model {model} --out TRACE` writes")


def validate(
    model: options.ChosenModel = None,
    emulate: Annotated[Path | None, Option(metavar="TRACE", help=HELP["emulate"])] = None,
    dilation: options.Dilation = 1.0,
    byte_scale: options.ByteScale = 1.0,
    world_size: options.Processes = None,
    backend: options.Backend = None,
    calibrate_at: Annotated[str | None, Option(metavar="N,...", help=HELP["calibrate_at"])] = None,
    caps: options.Caps = "0.5,1,5,25,single",
    orders: options.Orders = "ready",
    hooks: options.Hooks = "none",
    repeat: Annotated[int | None, Option(min=1, metavar="N", help=HELP["repeat"], show_default=SHOWN_TURNS)] = None,
    calibrations: Annotated[int, Option(min=1, metavar="N", help=HELP["calibrations"])] = 1,
    torch: Annotated[bool, Option("--torch", help=HELP["torch"])] = False,  # noqa: FBT002 - an option
    link_rate: options.LinkRate = None,
    uplinks: options.UplinksText = None,
    out: Annotated[Path, Option(metavar="FOLDER", help=HELP["out"])] = Path("out/validate"),
    json_path: options.Json = None,
) -> None:
    """Record, calibrate, write predictions to disk, then train and compare.

    The report has the errors of the prediction and of four baselines, the number of pairs of configurations that
    were ranked wrongly, and the fraction of iterations inside the predicted interval. Errors are given by the clock,
    and paired: after correction for the change of the machine's speed, which is measured next to each run. The folder
    contains the trace, the fabric file, predictions.json (written before the first run), report.json and report.csv.

    With --emulate, the devices sleep for the recorded times and make real gradients, so the machine's speed does not
    matter as long as it is fast enough. That is checked: there is no report if the processor has too little idle
    time, sleeps end too late, or devices and network slow each other down.
    """
    start_server()  # it imports torch while this process does
    from reference.launch import RankPool, default_backend, spread_members, world_size_or

    from ..validation.validate import validate as run
    from ..validation.validate_emulated import calibrate_network, extrapolated, validate_emulated
    from ..validation.validation_report import Configuration

    options.check_outputs(json_path, inputs=[emulate, *options.files_of(model or "")], folder=out)
    if emulate is None:
        given = {
            "--dilation": dilation != 1,
            "--byte-scale": byte_scale != 1,
            "--calibrate-at": calibrate_at is not None,
        }
        options.refuse(given, "expected --emulate with it, because a real model has its own speed and size")
    elif torch:
        raise ValueError("--torch: expected a real model, because an emulated device needs ddplab's reducer")
    elif calibrations > 1:
        raise ValueError(
            "--calibrations: expected 1 with --emulate, because the speed of an emulated device does not change; "
            f"got {calibrations}"
        )
    elif model is not None:
        raise ValueError(f"--model: expected either --model or --emulate, got both {model} and {emulate}")
    turns = repeat or (TURNS if emulate is None else EMULATED_TURNS)
    if calibrations > turns:
        raise ValueError(f"--calibrations: expected at most --repeat, which is {turns}, got {calibrations}")
    axes = product(options.read_caps(caps), options.read_orders(orders), options.read_hooks(hooks))
    configurations = [Configuration(cap, order, hook.name) for cap, order, hook in axes]
    scale = options.read_scale(dilation, byte_scale)
    trace = None if emulate is None else Trace.load(emulate)
    rate, between_nodes = options.read_links(link_rate, uplinks, scale)
    calibrated_at = [] if calibrate_at is None else options.read_counts("--calibrate-at", calibrate_at, least=2)
    if len(set(calibrated_at)) < len(calibrated_at):
        raise ValueError(f"--calibrate-at: expected different numbers of ranks, got {calibrate_at}")

    ranks = world_size or world_size_or(2)
    backend = backend or ("gloo" if emulate else default_backend(ranks))

    def pool(count: int) -> RankPool:
        # An emulated device hardly needs a core; ranks that compute keep theirs.
        members = spread_members(count)
        return RankPool(
            count, backend=backend, link_rate=rate, uplinks=between_nodes, pinned=trace is None, members=members
        )

    with progress() as on_progress:
        if trace is None:
            measure = partial(run, model=model or "resnet50", calibrations=calibrations, with_torch=torch)
        else:
            fabrics = []
            for count in calibrated_at:
                with pool(count) as few:
                    one = calibrate_network(few, trace, configurations, scale=scale, on_progress=on_progress)
                    fabrics.append(one)
            calibrated = extrapolated(fabrics, ranks) if fabrics else None
            measure = partial(validate_emulated, trace=trace, scale=scale, calibrated=calibrated)
        with pool(ranks) as all_ranks:
            result = measure(all_ranks, configurations=configurations, out=out, repeat=turns, on_progress=on_progress)
    show_report(result, extrapolated=bool(calibrated_at))
    write_json(json_path, result.to_json())


def demo(
    out: Annotated[Path, Option(metavar="FOLDER", help="Folder for all results.")] = Path("out/demo"),
    json_path: options.Json = None,
) -> None:
    """Check predictions in three ways, from exact to noisy: about 3 minutes on two cores.

    First ResNet-50 on 8 emulated V100s in virtual time: the reducer takes the predicted time to the nanosecond. Then
    on 4 emulated V100s by the clock: the devices sleep, the reducer and the network are real. Then a real ResNet-18
    on 2 ranks, which the processor computes.
    """
    from ..validation.demo import demo as run
    from ..validation.demo import ladder_sentences, ladder_table

    options.check_outputs(out / "demo.png", json_path)
    with progress() as on_progress:
        ladder = run(out, on_progress=on_progress)
    reports = [None if report is None else report.to_json() for report in ladder]
    title = "iteration of the real reducer and its prediction, in ms; errors of the prediction, and of two baselines"
    show_table(ladder_table(reports), title, optional=("ranks", "order", "perfect scaling"))
    for sentence in ladder_sentences(reports):
        print(sentence)
    files = "demo.png, perfetto.json, and a folder for each of the three with report.csv and report.json"
    print(f"written to {out}: {files}")
    write_json(json_path, dict(zip(ladder._fields, reports, strict=True)))
