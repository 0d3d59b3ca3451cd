"""`ddplab fabric`: what a fabric file says, as latency and bandwidth."""

from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any

import typer

from ..calibration.summary import contention_rows, hook_rows
from ..fabric import Fabric, Linear, Processor
from ..show import show_table, write_json
from .arguments import FABRIC_FILE, FabricSettings, Json, ProcessorFile, read_counts, read_fabric


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
