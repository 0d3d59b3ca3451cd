"""`ddplab fabric` and `ddplab knobs`: show a fabric, and list every setting with its unit and source."""

from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from typer import Argument, Option

from simulator.fabric import Fabric, LevelEntry, Linear, Processor, Sharing, Timing, TopologyFile
from simulator.fabric.algorithms import sent_share
from simulator.fabric.processor_costs import HookCost
from simulator.schedule.comm_hook_messages import HOOKS
from simulator.schedule.policy import Policy
from simulator.workload.compute_times import Straggler, Variation
from simulator.workload.roofline import Device

from .shared_options import FABRIC_FILE, FabricSettings, Json, ProcessorFile, check_outputs, read_counts, read_fabric
from .terminal_output import show_hooks, show_table, write_json

FILES = f"{FABRIC_FILE}. Several files are merged into one fabric."
WORLD_SIZES = "World sizes to show."
SHOWN = "measured world sizes, and full groups of the topology"


def fabric(
    files: Annotated[list[Path], Argument(metavar="FILE", help=FILES)],
    world_sizes: Annotated[str | None, Option(metavar="N,...", help=WORLD_SIZES, show_default=SHOWN)] = None,
    fabric_set: FabricSettings = None,
    processor: ProcessorFile = None,
    json_path: Json = None,
) -> None:
    """Show the latency and bandwidth of all-reduces by message size, and the processor costs.

    Several files are merged, as by `predict`: the result has the measured tables of all files, the topology of the
    file that has one, and everything else from the first file.
    """
    check_outputs(json_path, inputs=[*files, processor])
    shown = read_fabric(files, fabric_set, processor)
    if world_sizes is None:  # an unlimited level counts as two members
        members = [level.members or 2 for level in shown.topology.levels] if shown.topology else []
        sizes = sorted({*shown.world_sizes, *accumulate(members, mul)})
    else:
        sizes = read_counts("--world-sizes", world_sizes)
    segments = [
        {
            "world_size": world_size,
            "origin": shown.origin(world_size),
            "relative_error": float(shown.relative_errors(np.array([segment.from_bytes]), world_size)[0]),
            **segment._asdict(),
        }
        for world_size in sizes
        for segment in shown.segments(world_size)
    ]
    print(shown.source or ", ".join(map(str, files)))
    title = f"all-reduces, {shown.concurrency} at a time; ± is half of a 90 % band"
    show_table(list(map(_segment_row, segments)), title)
    _show_processor(shown.processor)
    costs = shown.model_dump(mode="json", include={"source", "library", "concurrency", "processor"})
    write_json(json_path, costs | {"segments": segments})


def _segment_row(segment: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table for a segment; algbw and busbw are defined as in nccl-tests, without the latency."""
    ranks, slope = segment["world_size"], segment["ns_per_byte"]
    return {
        "ranks": str(ranks),
        "costs are": segment["origin"],
        "±": f"{segment['relative_error']:.0%}",
        "from bytes": f"{segment['from_bytes']:,}",
        "latency us": f"{segment['alpha_ns'] / 1e3:.1f}",
        "algbw GB/s": f"{1 / slope:.3g}" if slope else "-",
        "busbw GB/s": f"{sent_share(ranks) / slope:.3g}" if slope else "-",
    }


def _show_processor(processor: Processor) -> None:
    if processor == Processor():
        print("the fabric has no processor costs; `ddplab calibrate` measures them")
        return
    rows = [
        {"name": name, "value": _cost(getattr(processor, name)), "meaning": str(field.description).split(";")[0]}
        for name, field in Processor.model_fields.items()
        if name != "hooks"
    ]
    show_table(rows, "processor costs")
    show_hooks(processor, "computation of comm hooks for a bucket")


def _cost(value: Linear | float) -> str:
    if isinstance(value, Linear):
        return f"{value.fixed_ns:,.0f} + {value.ns_per_byte:.3g} per byte"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


KNOBS: dict[str, type[BaseModel]] = {
    "settings of the reducer: --policy, arguments of `predict`": Policy,
    "variation between iterations: --variation": Variation,
    "a slow rank: --straggler": Straggler,
    "costs of collectives: --fabric-set, fields of a fabric file": Fabric,
    "a measured collective: `all_reduce` and `broadcast` of a fabric file": Timing,
    "two collectives at a time: `sharing` of a fabric file": Sharing,
    "a topology file in YAML": TopologyFile,
    "a level of a topology file: `levels`": LevelEntry,
    "processor costs: `processor` of a fabric file": Processor,
    "computation of a comm hook: `hooks` of a processor": HookCost,
    "a cost that grows with the bytes: `pack`, `copy_out`, `compress`, ...": Linear,
    "a data sheet: --device, --from, --to": Device,
}


def knobs(json_path: Json = None) -> None:
    """List every setting with its default, its unit and the source of its value."""
    check_outputs(json_path)
    for title, schema in KNOBS.items():
        show_table(_field_rows(schema), title)
        print()
    print(f"comm hooks: {', '.join(HOOKS)}\nnodes, devices and models by name: `ddplab catalogue`")
    write_json(json_path, {schema.__name__: _field_rows(schema) for schema in KNOBS.values()})


def _field_rows(schema: type[BaseModel]) -> list[dict[str, str]]:
    return [
        {"name": name, "default": _default(field.default), "meaning": field.description or ""}
        for name, field in schema.model_fields.items()
    ]


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return ""
    return "see below" if isinstance(value, BaseModel) else str(value)
