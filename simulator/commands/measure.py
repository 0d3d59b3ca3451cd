"""`ddplab record` and `ddplab calibrate`: measure on this machine what predictions need."""

from pathlib import Path
from typing import Annotated

import typer

from ..show import describe_trace, progress, show_table, write_json
from .arguments import Json, LinkRate, Model, WorldSize, check_outputs, read_link_rate


def record(
    model: Model = "resnet50",
    world_size: WorldSize = 1,
    iterations: Annotated[int, typer.Option(min=1, help="Iterations to record, after 2 of warm-up.")] = 10,
    out: Annotated[Path, typer.Option(help="The trace; .gz compresses it.")] = Path("out/trace.json.gz"),
    json_path: Json = None,
) -> None:
    """Record when each gradient of a model is ready, all ranks at once, without communication.

    The ranks compute at the same time, as they will in training, but send nothing: an all-reduce would make every
    backward pass as long as the slowest one and hide what each rank takes. Prints sizes and times; the trace is what
    `predict`, `sweep` and `rescale` start from. To record a script of your own, see `reference.recorder`.
    """
    from reference.launch import RankPool

    from ..training import record_computation

    check_outputs(out, json_path)
    with progress() as on_progress, RankPool(world_size) as pool:
        on_progress("recording", 0, 1)
        trace = pool.run(record_computation, model, iterations)[0]
    trace.save(out)
    summary = describe_trace(trace)
    show_table([summary], f"{model}, recorded in {out}")
    write_json(json_path, {"trace": str(out), **summary})


def calibrate(
    model: Model = "resnet50",
    world_size: WorldSize = 2,
    hook: Annotated[
        list[str] | None,
        typer.Option(help="Also measure a comm hook: fp16, quantize_per_tensor, power_sgd:RANK, ...; repeatable."),
    ] = None,
    link_rate: LinkRate = None,
    out: Annotated[Path, typer.Option(help="The fabric file.")] = Path("out/fabric.json"),
    json_path: Json = None,
) -> None:
    """Measure collectives on this machine, and how they and the model's computation slow each other down.

    Real ranks run all-reduces and broadcasts of sizes up to all gradients of the model, alone and beside its
    computation; copies, launches, comm hooks and the rebuild too. All is measured repeatedly and the spread is kept:
    let nothing else run meanwhile. Take the model that you want to predict, or one that computes like it.
    """
    from reference.launch import RankPool

    from ..calibrate import calibrate as measure
    from ..calibration.summary import show_calibration

    check_outputs(out, json_path)
    with progress() as on_progress, RankPool(world_size, link_rate=read_link_rate(link_rate)) as pool:
        fabric = measure(pool, model, hooks=hook or (), on_progress=on_progress)
    fabric.save(out)
    show_calibration(fabric, model, f"{world_size} ranks, saved as {out}")
    write_json(json_path, fabric.model_dump())
