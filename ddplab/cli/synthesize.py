"""`ddplab synthesize`: makes traces for hardware that is not available, from a model or from a recorded trace."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from ..reference.files.value_ranges import YEAR_NS
from ..reference.files.writing import milliseconds
from ..reference.trace import Parameter, Trace
from ..simulator.catalogue import entry_of, read_catalogue
from ..simulator.workload.roofline import USUAL, data_sheets, find_device, with_precision
from ..simulator.workload.trace_synthesis import check_measured, rescale
from ..simulator.workload.trace_synthesis import synthesize as synthesize_trace
from . import shared_options as options
from .terminal_output import save_trace, say

HELP = {
    "device": "The device's data sheet: a device that `ddplab show` lists, such as h100 (in the precision of the "
    "model) or h100-bf16, or a JSON file with name, flops_per_s and bytes_per_s.",
    "step_ms": "Measured time of an iteration on one device, without communication, or of its forward pass, backward "
    "pass and optimiser; the trace is scaled to it.",
    "batch": "Samples per iteration. Default: those of the model.",
    "rescale": "Convert this trace, recorded without communication, in place of counting operations alone.",
    "from": "With --rescale: the device of the recording, as --device; `this` is this machine, which is measured.",
}
HOST_BOUND = 1.2
"""Ratio of the host's time to the roofline time above which the host limits an iteration."""


def synthesize(
    model: Annotated[
        str | None, Option(metavar="MODEL", help=options.HELP["model"], show_default="resnet50, or the trace's")
    ] = None,
    device: Annotated[str, Option(metavar="DEVICE", help=HELP["device"])] = "a100-40gb-tf32",
    step_ms: Annotated[str | None, Option(metavar="MS[,MS,MS]", help=HELP["step_ms"])] = None,
    batch: Annotated[int | None, Option(min=1, max=10**6, metavar="N", help=HELP["batch"])] = None,
    recorded: Annotated[Path | None, Option("--rescale", metavar="TRACE", help=HELP["rescale"])] = None,
    old: Annotated[str | None, Option("--from", metavar="DEVICE", help=HELP["from"], show_default="this")] = None,
    out: options.TraceOut = Path("out/synthetic.json.gz"),
) -> None:
    """Make a trace from a model and a data sheet, by counting the model's operations.

    Nothing is allocated or computed, so the model may be larger than this machine's memory. Times are those of the
    utilisation that published training reached on the device's generation, within a third; if you can, give the time
    of one measured iteration with --step-ms, or of its three parts, such as 30,55,5. On a device in bf16 or fp16, the
    model computes under autocast.

    With --rescale, a recorded trace of the model is converted from one device to another, with a roofline model of
    the operations between gradients. Differences between iterations and between ranks are kept. Traces recorded with
    communication are refused, because communication does not scale with the device.
    """
    if model is None:
        model = "resnet50" if recorded is None else Trace.load(recorded).workload.model
    options.check_outputs(out, inputs=[recorded, *options.files_of(model)])
    if recorded is not None:
        given = {"--step-ms": step_ms, "--batch": batch}
        options.refuse(given, "expected none with --rescale, which scales a trace of one batch; give another trace")
        _rescale(recorded, model, old or "this", device, out)
        return
    options.refuse({"--from": old}, "expected --rescale with it, the trace that was recorded on this device")
    if not device.endswith(".json"):
        device = read_catalogue().device_like(device) or device
        device = choose_precision(device, options.operations_of(model).parameters)
    sheet = find_device(device)
    operations = options.with_samples(options.operations_of(model, sheet.autocast), batch)
    measured_ns = read_step(step_ms)
    with options.naming("--step-ms"):
        check_measured(operations, sheet, measured_ns)
    trace = synthesize_trace(operations, sheet, **measured_ns)
    save_trace(trace, out, f"{model} on {device}, saved as {out}")
    at_peak, paced = (synthesize_trace(operations, one) for one in (sheet.model_copy(update={"pace_ns": 0}), sheet))
    peak_ns, paced_ns, ns = (one.ranks[0].iterations[0].duration_ns for one in (at_peak, paced, trace))
    usual = USUAL if sheet.generation is None else sheet.bounds(operations)
    say(judgement(peak_ns, paced_ns, None if step_ms is None else ns / 1e6, usual, trace.workload.doubt))


def read_step(text: str | None) -> dict[str, int]:
    """Parse a measured time of an iteration, or of its three parts: arguments of `trace_synthesis.synthesize`."""
    if text is None:
        return {}
    words = text.split(",")
    names = {1: ("step_ns",), 3: ("forward_ns", "backward_ns", "optimizer_ns")}.get(len(words), ())
    numbers = [float(word) if re.fullmatch(r"\d*\.?\d+", word.strip()) else math.inf for word in words]
    if not names or max(numbers) > YEAR_NS / 1e6:
        expected = "expected milliseconds, such as 90, or of forward pass, backward pass and optimiser: 30,55,5"
        raise ValueError(f"--step-ms: {expected}; got {text!r}")
    return {name: round(ms * 1e6) for name, ms in zip(names, numbers, strict=True)}


def _rescale(path: Path, model: str, old: str, new: str, out: Path) -> None:
    from ..operation_counter import measure_operations

    recorded = Trace.load(path)
    workload, parameters = recorded.workload, recorded.workload.parameters
    target = find_device(choose_precision(new, parameters))
    if old == "this":
        from ..calibration.device_rates import measure_device

        source = measure_device()
    else:
        source = find_device(choose_precision(old, parameters))
    known = entry_of(workload.device_name)
    is_own = source.name.startswith(known.product) if known else workload.device == "cpu" or old != "this"
    if not is_own and not old.endswith(".json"):
        raise ValueError(f"--from: expected the trace's device, {workload.device_name}, got {source.name}; name it")
    counted = (measure_operations(model, autocast=one.autocast) for one in (source, target))
    before, after = (options.with_samples(one, one.batch and workload.batch) for one in counted)
    rescaled = rescale(recorded, before, source, target, new_operations=after)
    save_trace(rescaled, out, f"{path} from {source.name} to {target.name}, saved as {out}")


def choose_precision(device: str, parameters: Sequence[Parameter]) -> str:
    """Return the data sheet of a device, named with or without precision, and print the choice if there was one.

    The precision is that of a model: the element type of most bytes of its parameters.
    """
    dtype = options.element_type(parameters)
    sheet = with_precision(device, dtype)
    if sheet != device:
        entry, _, precision = sheet.rpartition("-")
        needs = ' and torch.set_float32_matmul_precision("high") is usual' if precision == "tf32" else ""
        others = [name for name in data_sheets() if name.rpartition("-")[0] == entry and name != sheet]
        choice = f"; for another precision, name {' or '.join(others)}" if dtype == "float32" else ""
        say(f"{device} computes in {precision}, because the model's parameters are {dtype}{needs}{choice}")
    return sheet


def judgement(
    roofline_ns: int, paced_ns: int, step_ms: float | None, usual: tuple[float, float] = USUAL, doubt: str = ""
) -> str:
    """Compare the measured time of a step, if it is given, with the roofline, or with the pace of the host.

    `roofline_ns` is the time of an iteration by peak rates or, if the `usual` multiples of it are not `USUAL`, by
    measured utilisation; `paced_ns` the same if each kernel waits for the host to launch it. `doubt` is the trace's.
    """
    rates = (
        "at the peak rates of its data sheet" if usual == USUAL else "by the measured utilisation of its generation"
    )
    if paced_ns > HOST_BOUND * roofline_ns:
        if step_ms is None:
            advice = "measure an iteration and give its time with --step-ms"
        elif step_ms * 1e6 < paced_ns:
            advice = f"a step of {step_ms:.4g} ms needs CUDA graphs, torch.compile or a faster host"
        else:
            advice = doubt or f"the step takes {step_ms:.4g} ms"
        return (
            f"the host needs {milliseconds(paced_ns, '.3g')} ms to launch the kernels of an iteration one by one, "
            f"and the device {milliseconds(roofline_ns, '.3g')} ms to run them {rates}; {advice}"
        )
    roofline_ms, often = roofline_ns / 1e6, f"{usual[0]:.2g} to {usual[1]:.2g} times"
    if step_ms is None:
        return (
            f"no --step-ms: the iteration takes {roofline_ms:.3g} ms on this device {rates}; nine in ten real ones "
            f"take {often} as long, so measure one and give its time"
        )
    ratio = step_ms / roofline_ms
    sentence = f"the step of {step_ms:.4g} ms is {ratio:.2g} times the time on this device {rates}"
    unusual = not usual[0] <= ratio <= usual[1]
    return sentence + f"; {often} are usual, so check the batch, the precision and the device" * unusual
