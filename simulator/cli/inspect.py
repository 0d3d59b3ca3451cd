"""`ddplab fabric` and `ddplab knobs`: what a fabric file contains, and every setting with its unit and source."""

from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from ..fabric import Contention, Fabric, LevelEntry, Linear, Processor, Sharing, Timing, TopologyFile
from ..fabric.processor import HookCost
from ..schedule.comm_hooks import HOOKS
from ..schedule.policy import Policy
from ..workload.compute_times import Straggler, Variation
from ..workload.roofline import DEVICES, Device
from .options import FABRIC_FILE, FabricSettings, Json, ProcessorFile, read_counts, read_fabric
from .output import contention_rows, hook_rows, show_table, write_json


def fabric(
    files: Annotated[
        list[Path],
        typer.Argument(help=f"{FABRIC_FILE}; several are merged into one."),
    ],
    world_sizes: Annotated[
        str | None,
        typer.Option(help="Numbers of ranks, comma-separated.", show_default="those measured, full groups of links"),
    ] = None,
    fabric_set: FabricSettings = None,
    processor: ProcessorFile = None,
    json_path: Json = None,
) -> None:
    """Show what all-reduces cost, as latency and bandwidth by size of message, and what the processor pays.

    Several files are merged as `predict` merges them: measured tables of all, links of the one that has any, all else
    of the first.
    """
    known = read_fabric(files, fabric_set, processor)
    sizes = _telling_sizes(known) if world_sizes is None else read_counts("--world-sizes", world_sizes)
    segments = [segment for world_size in sizes for segment in _segments(known, world_size)]
    print(known.source or ", ".join(map(str, files)))
    show_table(list(map(_row, segments)), f"all-reduces, {known.concurrency} at a time")
    _show_processor(known.processor)
    write_json(json_path, _as_json(known) | {"segments": segments})


def _telling_sizes(known: Fabric) -> list[int]:
    """World sizes that were measured, and each full group of described links: of two, where it takes any number."""
    levels = known.topology.levels if known.topology else ()
    return sorted({*known.world_sizes, *accumulate((level.members or 2 for level in levels), mul)})


def _segments(known: Fabric, world_size: int) -> list[dict[str, Any]]:
    """What is known of a world size, once for each of its segments."""
    origin, error = known.origin(world_size), known.relative_error(world_size)
    return [
        {"world_size": world_size, "origin": origin, "relative_error": error, **segment._asdict()}
        for segment in known.segments(world_size)
    ]


def _row(segment: dict[str, Any]) -> dict[str, str]:
    """Bandwidths as nccl-tests has them: message by time, and times 2 (n - 1) / n, which a link carries."""
    ranks, slope = segment["world_size"], segment["ns_per_byte"]
    return {
        "ranks": str(ranks),
        "costs are": segment["origin"],
        "±": f"{segment['relative_error']:.0%}",
        "from bytes": f"{segment['from_bytes']:,}",
        "latency us": f"{segment['alpha_ns'] / 1e3:.1f}",
        "algbw GB/s": f"{1 / slope:.3g}" if slope else "-",
        "busbw GB/s": f"{2 * (ranks - 1) / ranks / slope:.3g}" if slope else "-",
    }


def _show_processor(processor: Processor) -> None:
    if processor == Processor():
        print("no costs of the processor; `ddplab calibrate` measures them")
        return
    fields = [(name, field) for name, field in Processor.model_fields.items() if name not in ("contention", "hooks")]
    show_table(
        [
            {"name": name, "value": _cost(getattr(processor, name)), "meaning": str(field.description).split(";")[0]}
            for name, field in fields
        ],
        "what collectives cost the processor",
    )
    if contention := contention_rows(processor):
        show_table(contention, "computation and collectives beside each other take, of their times alone")
    if hooks := list(hook_rows(processor)):
        show_table(hooks, "what comm hooks compute for a bucket")


def _cost(value: Linear | float) -> str:
    if isinstance(value, Linear):
        return f"{value.fixed_ns:,.0f} + {value.ns_per_byte:.3g} a byte"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _as_json(known: Fabric) -> dict[str, Any]:
    return known.model_dump(mode="json", include={"source", "library", "concurrency", "processor"})


KNOBS: dict[str, type[BaseModel]] = {
    "what the reducer is told: --policy, arguments of `predict`": Policy,
    "how iterations differ: --variation": Variation,
    "a slow rank: --straggler": Straggler,
    "what collectives cost: --fabric-set, fields of a fabric file": Fabric,
    "a measured collective": Timing,
    "two collectives at a time": Sharing,
    "a topology file, YAML": TopologyFile,
    "one of its levels": LevelEntry,
    "what collectives cost the processor: `processor` of a fabric file": Processor,
    "computation beside collectives: `contention` of a processor": Contention,
    "what a comm hook computes: `hooks` of a processor": HookCost,
    "the two numbers of such a cost: `pack`, `copy_out`, `compress`, ...": Linear,
    "a data sheet: --device, --from, --to": Device,
}


def knobs(json_path: Json = None) -> None:
    """List everything that can be asked, with units and where the figures come from."""
    for title, record in KNOBS.items():
        show_table(_rows(record), title)
        print()
    print(f"comm hooks: {', '.join(HOOKS)}\ndata sheets: {', '.join(DEVICES)}")
    write_json(json_path, {record.__name__: _rows(record) for record in KNOBS.values()})


def _rows(record: type[BaseModel]) -> list[dict[str, str]]:
    return [
        {
            "name": name,
            "default": _default(field.default),
            "meaning": field.description or "",
        }
        for name, field in record.model_fields.items()
    ]


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return ""
    return "see below" if isinstance(value, BaseModel) else str(value)
