"""`ddplab synthesize` and `ddplab rescale`: traces of machines that nobody has yet."""

from pathlib import Path
from typing import Annotated

import typer

from reference.trace import Trace

from ..workload.roofline import DEVICES, Operations, find_device
from ..workload.roofline import Device as DataSheet
from ..workload.synthesis import rescale as rescale_trace
from ..workload.synthesis import synthesize as synthesize_trace
from .options import Json, Model, check_outputs
from .output import describe_trace, show_table, write_json

Device = Annotated[str, typer.Option(help=f"A data sheet ({', '.join(DEVICES)}), or a JSON file of one.")]
Out = Annotated[Path, typer.Option(help="The trace; .gz compresses it.")]


def synthesize(
    model: Model = "resnet50",
    device: Device = "a100-40gb-tf32",
    step_ms: Annotated[
        float | None, typer.Option(min=0, help="One measured iteration on one device, without communication.")
    ] = None,
    out: Out = Path("out/synthetic.json.gz"),
    json_path: Json = None,
) -> None:
    """Make a trace from a model alone: its operations, counted without running them, and a data sheet.

    Nothing is allocated or computed, so the model may be larger than this machine. Peak rates are seldom reached:
    give one measured step by --step-ms where you can. A data sheet of your own is a JSON file with name,
    flops_per_s and bytes_per_s.
    """
    check_outputs(out, json_path)
    operations = _count(model)
    trace = synthesize_trace(
        operations, find_device(device), step_ns=None if step_ms is None else round(step_ms * 1e6)
    )
    _save(trace, out, f"{model} on {device}", json_path)


def rescale(
    trace: Annotated[Path, typer.Argument(help="A trace, recorded without communication.")],
    model: Model = "resnet50",
    old: Annotated[str, typer.Option("--from", help="The device that it was recorded on, as for --to.")] = "this",
    new: Annotated[
        str, typer.Option("--to", help=f"A data sheet ({', '.join(DEVICES)}), or a JSON file of one.")
    ] = "h100-tf32",
    out: Out = Path("out/rescaled.json.gz"),
    json_path: Json = None,
) -> None:
    """Rescale a recorded trace to another device, each gap between gradients by the roofline of its operations.

    Iterations and ranks keep their differences. `--from this` measures the rates of this machine first. A trace that
    was recorded with communication is refused, as that does not get faster with the device.
    """
    check_outputs(out, json_path)
    recorded, target = Trace.load(trace), find_device(new)
    source = _this_device() if old == "this" else find_device(old)
    rescaled = rescale_trace(recorded, _count(model), source, target)
    _save(rescaled, out, f"{trace} from {source.name} to {target.name}", json_path)


def _count(model: str) -> Operations:
    from ..measure.operation_counter import measure_operations

    return measure_operations(model)


def _this_device() -> DataSheet:
    from ..measure.device_rates import measure_device

    return measure_device()


def _save(trace: Trace, out: Path, title: str, json_path: Path | None) -> None:
    trace.save(out)
    summary = describe_trace(trace)
    show_table([summary], f"{title}, saved as {out}")
    write_json(json_path, {"trace": str(out), **summary})
