"""`ddplab catalogue`: lists nodes, devices and models by name, with the sources of their figures."""

from typing import Annotated, Any

from typer import Argument

from simulator.catalogue import Catalogue, read_catalogue, unknown

from .shared_options import Json, check_outputs
from .terminal_output import show_table, write_json

NAME = "A node or device, whose figures are shown with their sources, or a model. All are listed without it."
OPTIONAL = ("iterations inside", "all-reduces inside", "product")
"""Columns to leave out on a narrow terminal, the first one first."""


def catalogue(
    name: Annotated[str | None, Argument(metavar="NAME", help=NAME, show_default=False)] = None,
    json_path: Json = None,
) -> None:
    """List nodes for --fabric, devices for --device, and models for --model.

    Rates of links are those that a large all-reduce reaches: of one GPU on NVLink, of one node on the network. The
    columns `inside` count the measured times, of the system or of nodes of the same build, that lie in the predicted
    interval of 90 %: all-reduces of 256 KiB and more, and iterations.
    """
    check_outputs(json_path)
    listed = read_catalogue()
    if name is None:
        models = _models()
        show_table([_node_row(listed, one) for one in listed.nodes], "nodes: --fabric NAME", optional=OPTIONAL)
        print()
        show_table(
            [_device_row(listed, one) for one in listed.devices],
            "devices: --device NAME in the precision of the model, or NAME-PRECISION; dense peak rates in TFLOPS",
        )
        print()
        show_table([_model_row(*one) for one in models.items()], "models: --model NAME")
    elif name in listed.nodes or name in listed.devices:
        entry = listed.nodes.get(name) or listed.devices[name]
        rows = [
            {"figure": field, "value": value, "source": f"{source.title}, {source.date}"}
            for field, (value, source) in listed.figures(name).items()
        ]
        show_table(rows, entry.product)
        models = {}
    else:
        models = _models()
        if name not in models:
            raise ValueError(unknown("name", name, [*listed.nodes, *listed.devices, *models]))
        models = {name: models[name]}
        show_table([_model_row(name, models[name])], "models: --model NAME")
    entries = listed.model_dump(mode="json", exclude_none=True, include={"sources", "latencies", "nodes", "devices"})
    write_json(json_path, entries | {"models": models})


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
        **{precision: f"{peaks[precision]:g}" if precision in peaks else "-" for precision in PRECISIONS},
    }


PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def _models() -> dict[str, dict[str, Any]]:
    """Return the size of each built-in model, without allocating its tensors."""
    import torch

    from reference.parameters import trainable_parameters

    from .. import models

    found = {}
    for name in models.BUILT_IN:
        with torch.device("meta"):
            module, loss_fn = models.build(name)
        parameters = trainable_parameters(module).values()
        found[name] = {
            "parameters": sum(parameter.numel() for parameter in parameters),
            "tensors": len(parameters),
            "gradient_bytes": sum(parameter.nbytes for parameter in parameters),
            "batch": getattr(loss_fn, "batch", None),
        }
    return found


def _model_row(name: str, model: dict[str, Any]) -> dict[str, str]:
    return {
        "name": name,
        "parameters": f"{model['parameters']:,}",
        "tensors": str(model["tensors"]),
        "MB of gradients": f"{model['gradient_bytes'] / 2**20:,.1f}",
        "batch": str(model["batch"]),
    }
