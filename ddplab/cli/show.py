"""`ddplab show`: describes a trace, a fabric, a name of the catalogue, or all settings."""

import ast
import inspect
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer import Argument

from ..reference.trace import Trace
from ..simulator.catalogue import Catalogue, Precision, load_fabric, read_catalogue, unknown
from ..simulator.fabric import Fabric, LevelEntry, Linear, Processor, Sharing, Timing, TopologyFile
from ..simulator.fabric.algorithms import sent_share
from ..simulator.fabric.fabric import NOT_A_TRACE
from ..simulator.fabric.processor_costs import HookCost
from ..simulator.schedule.comm_hook_messages import HOOKS
from ..simulator.schedule.policy import Policy
from ..simulator.workload.roofline import Device, built_in_operations, counted_models
from ..simulator.workload.variation import Straggler, Variation
from .shared_options import Json, check_outputs
from .terminal_output import describe_trace, say, show_table, write_json

NAMES = (
    "A trace, a fabric file, a topology file, a log of nccl-tests, a node, a device, a model, or `settings`. Several "
    "fabrics are merged as by `predict`. Without a name, all nodes, devices and models are listed."
)
PARTS = {
    "compress": "before its collectives",
    "recompress": "between them",
    "decompress": "after them, per rank if gathered",
}
"""Parts of a comm hook's computation, and when each runs."""
OPTIONAL = ("iterations inside", "all-reduces inside", "product")
"""Columns to leave out on a narrow terminal, the first one first."""
WORD = "settings"
"""The name that lists all settings."""


def show(
    names: Annotated[list[str] | None, Argument(metavar="[NAME...]", help=NAMES, show_default=False)] = None,
    json_path: Json = None,
) -> None:
    """Describe a trace, a fabric or a name, or list all nodes, devices and models.

    Fabrics are shown by latency and bandwidth of all-reduces, with the processor's costs. Names are shown with the
    source of each figure. `ddplab show settings` lists every setting with its default, its unit and its source.

    Rates of links are those that a large all-reduce reaches: of one GPU on NVLink, of one node on the network. The
    columns `inside` count the measured times, of the system or of nodes of the same build, that lie in the predicted
    interval of 90 %: all-reduces of 256 KiB and more, and iterations.
    """
    given = names or []
    check_outputs(json_path, inputs=[Path(name) for name in given if Path(name).is_file()])
    listed = read_catalogue()
    name = given[0] if len(given) == 1 else ""
    named = {WORD, *counted_models()}
    alone = [] if name else [one for one in given if (_trace(one) if Path(one).exists() else one in named)]
    if alone:
        raise ValueError(f"NAME: expected one name or several fabrics, got {alone[0]!r} beside others; show it alone")
    if name not in {*counted_models(), *listed.devices} and not Path(name).exists():
        name = listed.node_like(name) or listed.bare_device(name) or name
    if not given:
        result = _show_catalogue(listed)
    elif name == WORD and not Path(name).exists():
        result = _show_settings()
    elif name in listed.nodes or name in listed.devices:
        result = _show_entry(listed, name)
    elif name and (name in counted_models() or not (Path(name).exists() or any(mark in name for mark in "/.:"))):
        result = _show_model(listed, name)
    elif name and (trace := _trace(name)) is not None:
        result = describe_trace(trace)
        show_table([result], f"{name}: {trace.workload.described}")
    else:
        result = show_fabric(Fabric.merged(*map(load_fabric, given)), ", ".join(given))
    write_json(json_path, result)


def _trace(name: str) -> Trace | None:
    """Load a trace; None: the file is a fabric. Errors in other files are those of fabrics."""
    try:
        load_fabric(name)
    except ValueError as error:
        if NOT_A_TRACE not in str(error):
            raise
        return Trace.load(name)
    return None


# Fabrics


def show_fabric(fabric: Fabric, name: str) -> dict[str, Any]:
    """Print all-reduces by message size for the measured world sizes and full groups of the topology."""
    # An unlimited level counts as two members.
    members = [level.members or 2 for level in fabric.topology.levels] if fabric.topology else []
    segments = [
        {
            "world_size": world_size,
            "origin": fabric.origin(world_size),
            "relative_error": float(fabric.relative_errors(np.array([segment.from_bytes]), world_size).max()) or None,
            **segment._asdict(),
        }
        for world_size in sorted({*fabric.world_sizes, *accumulate(members, mul)})
        for segment in fabric.segments(world_size)
    ]
    say(fabric.source or name)
    title = f"all-reduces, {fabric.concurrency} at a time; ± is the wider side of a 90 % band"
    show_table(list(map(_segment_row, segments)), title)
    _show_processor(fabric.processor)
    costs = fabric.model_dump(mode="json", include={"source", "library", "concurrency", "processor"})
    return costs | {"segments": segments}


def _segment_row(segment: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table for a segment; algbw and busbw are defined as in nccl-tests, without the latency."""
    ranks, slope, is_described = segment["world_size"], segment["ns_per_byte"], segment["origin"] == "described"
    return {
        "ranks": str(ranks),
        "costs are": segment["origin"],
        "±": f"{segment['relative_error']:.0%}" if segment["relative_error"] else "-",
        "from bytes": f"{segment['from_bytes']:,}",
        "latency us": f"{segment['alpha_ns'] / 1e3:.1f}" if segment["alpha_ns"] or is_described else "-",
        "algbw GB/s": f"{1 / slope:.3g}" if slope else "-",
        "busbw GB/s": f"{sent_share(ranks) / slope:.3g}" if slope else "-",
    }


def _show_processor(processor: Processor) -> None:
    if processor == Processor():
        say("the fabric has no processor costs; `ddplab calibrate` measures them")
        return
    measured = {name: getattr(processor, name) for name in processor.model_fields_set}
    rows = [
        {"name": name, "value": _cost(measured.get(name, 0)), "meaning": meaning.partition(";")[0]}
        for name, meaning in _meanings(Processor).items()
        if name != "hooks"
    ]
    show_table(rows, "processor costs")
    hooks = [
        {"hook": hook.name, "part": f"{part}, {PARTS[part]}", "ns per bucket": _cost(getattr(hook, part))}
        for hook in processor.hooks
        for part in PARTS
        if getattr(hook, part) != Linear()
    ]
    if hooks:
        show_table(hooks, "computation of comm hooks for a bucket")


def _cost(value: Linear | float) -> str:
    """Return a cost in words; 0 is also what older files have for a cost or an error that was not measured."""
    if isinstance(value, Linear):
        return f"{value.fixed_ns:,.0f} + {value.ns_per_byte:.3g} per byte"
    return "not measured" if value == 0 else f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


# The catalogue


def _show_catalogue(listed: Catalogue) -> dict[str, Any]:
    models = {name: _model(name) for name in counted_models()}
    show_table([_node_row(listed, one) for one in listed.nodes], "nodes: --fabric NAME", optional=OPTIONAL)
    print()
    show_table(
        [_device_row(listed, name) for name, one in listed.devices.items() if one.peaks],  # others only have memory
        "devices: --device NAME in the precision of the model, or NAME-PRECISION; dense peak rates in TFLOPS",
    )
    print()
    show_table([_model_row(*one) for one in models.items()], "models: --model NAME")
    entries = listed.model_dump(mode="json", exclude_none=True, include={"sources", "latencies", "nodes", "devices"})
    return entries | {"models": models}


def _show_entry(listed: Catalogue, name: str) -> dict[str, Any]:
    """Print the figures of a node or device; of a node also its all-reduces."""
    entry = listed.nodes.get(name) or listed.devices[name]
    rows = [
        {"figure": field, "value": value, "source": f"{source.title}, {source.date}"}
        for field, (value, source) in listed.figures(name).items()
    ]
    show_table(rows, entry.product)
    result = entry.model_dump(mode="json", exclude_none=True)
    if name in listed.nodes:
        print()
        result |= show_fabric(load_fabric(name), name)
    return result


def _show_model(listed: Catalogue, name: str) -> dict[str, Any]:
    if name not in counted_models():
        names = [*listed.nodes, *listed.devices, *counted_models(), WORD]
        raise ValueError(unknown("name", name, names, others="a file or"))
    model = _model(name)
    show_table([_model_row(name, model)], "models: --model NAME")
    return model


def _node_row(listed: Catalogue, name: str) -> dict[str, str]:
    node, levels = listed.nodes[name], {level.name: level for level in listed.topology(name).levels}
    return {
        "name": name,
        "GPUs": str(node.links["nvlink"].members),
        "device": node.device,
        **{f"{kind} GB/s": f"{levels[kind].bytes_per_s / 1e9:.3g}" if kind in levels else "-" for kind in node.links},
        "product": node.product,
        "all-reduces inside": node.inside.get("all_reduces", "-"),
        "iterations inside": node.inside.get("iterations", "-"),
    }


def _device_row(listed: Catalogue, name: str) -> dict[str, str]:
    device = listed.devices[name]
    peaks = device.peaks.tflops if device.peaks else {}
    return {
        "name": name,
        "product": device.product,
        "memory GB/s": f"{device.memory.gb_per_s:g}",
        **{precision: f"{peaks[precision]:g}" if precision in peaks else "-" for precision in get_args(Precision)},
    }


def _model(name: str) -> dict[str, Any]:
    """Return the size of a built-in model."""
    operations = built_in_operations(name)
    assert operations is not None
    parameters = operations.parameters
    return {
        "parameters": sum(prod(parameter.shape) for parameter in parameters),
        "tensors": len(parameters),
        "gradient_bytes": sum(parameter.size_bytes for parameter in parameters),
        "batch": operations.batch,
    }


def _model_row(name: str, model: dict[str, Any]) -> dict[str, str]:
    return {
        "name": name,
        "parameters": f"{model['parameters']:,}",
        "tensors": str(model["tensors"]),
        "MB of gradients": f"{model['gradient_bytes'] / 2**20:,.1f}",
        "batch": str(model["batch"]),
    }


# Settings

SETTINGS: dict[str, type[BaseModel]] = {
    "settings of the reducer: --set, arguments of `predict`": Policy,
    "variation between iterations: --set": Variation,
    "a slow rank: --straggler": Straggler,
    "costs of collectives: --set, fields of a fabric file": Fabric,
    "a measured collective: `all_reduce` and `broadcast` of a fabric file": Timing,
    "two collectives at a time: `sharing` of a fabric file": Sharing,
    "a topology file in YAML": TopologyFile,
    "a level of a topology file: `levels`": LevelEntry,
    "processor costs: `processor` of a fabric file": Processor,
    "computation of a comm hook: `hooks` of a processor": HookCost,
    "a cost that grows with the bytes: `pack`, `copy_out`, `compress`, ...": Linear,
    "a data sheet: --device, --from": Device,
}


def _show_settings() -> dict[str, Any]:
    for title, schema in SETTINGS.items():
        show_table(_field_rows(schema), title)
        print()
    say(f"comm hooks: {', '.join(HOOKS)}")
    say("nodes, devices and models by name: `ddplab show`")
    return {schema.__name__: _field_rows(schema) for schema in SETTINGS.values()}


def _field_rows(schema: type[BaseModel]) -> list[dict[str, str]]:
    meanings = _meanings(schema)
    return [
        {"name": name, "default": _default(field.default), "meaning": meanings[name]}
        for name, field in schema.model_fields.items()
    ]


def _meanings(schema: type[BaseModel]) -> dict[str, str]:
    """Return the text below each field of a class; pydantic would read them whenever the class is loaded."""
    definition: Any = ast.parse(inspect.getsource(schema)).body[0]
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return ""
    return "see below" if isinstance(value, BaseModel) else str(value)
