"""Summary: a calibration for whoever ran it."""

from collections.abc import Iterator

from ..fabric import Fabric, Linear, Processor
from ..show import show_table

RESTLESS = 0.1
"""Part of the all-reduces that are outliers on a machine that is not quiet."""
PARTS = {
    "compress": "before its collectives",
    "recompress": "between them",
    "decompress": "after them",
}
"""Of a hook, and when it does them."""


def show_calibration(fabric: Fabric, model: str, title: str) -> None:
    """Tables of collectives and of comm hooks, and sentences on the rest; `±` is half of a 90 % band.

    Outliers are all-reduces that took over twice the median: a machine that has many is not quiet.

    Args:
        fabric: As `calibrate` returned it.
        model: Whose computation it was measured with.
        title: Of the first table.
    """
    show_table(collective_rows(fabric), title, spared=("outliers", "± ", "broadcast ms"))
    outliers, repeats = sum(row.outliers for row in fabric.all_reduce), sum(row.repeats for row in fabric.all_reduce)
    if outliers > RESTLESS * repeats:
        print(
            f"{outliers} of {repeats} all-reduces took over twice the median: something else used the machine; "
            "calibrate again without it"
        )
    processor = fabric.processor
    if rows := list(hook_rows(processor)):
        show_table(rows, f"comm hooks compute, for a bucket of the gradients of {model}")
    if rows := contention_rows(processor):
        show_table(rows, f"computation of {model} and collectives beside each other take, of their times alone")
    print(
        f"issuing a collective takes {processor.launch_ns / 1e3:.0f} us, computation stays slow for "
        f"{processor.lingers_ns / 1e6:.1f} ms after one, the search for unused parameters "
        f"{processor.search_ns_per_parameter / 1e3:.1f} us a parameter, "
        f"the rebuild of buckets {processor.rebuild_ns / 1e6:.1f} ms"
    )


def collective_rows(fabric: Fabric) -> list[dict[str, str]]:
    """One a message size."""
    factors = {row.size_bytes: row.factor for row in fabric.sharing}
    broadcasts = {row.size_bytes: row for row in fabric.broadcast}
    return [
        {
            "bytes": f"{row.size_bytes:,}",
            "all-reduce ms": f"{row.ns / 1e6:.3f}",
            "±": f"{row.spread:.0%}",
            "outliers": f"{row.outliers} of {row.repeats}",
            "two at a time": f"x {factors[row.size_bytes]:.2f}",
            "broadcast ms": f"{broadcasts[row.size_bytes].ns / 1e6:.3f}",
            "± ": f"{broadcasts[row.size_bytes].spread:.0%}",
        }
        for row in fabric.all_reduce
    ]


def contention_rows(processor: Processor) -> list[dict[str, str]]:
    """One a message size and number in flight."""
    return [
        {
            "bytes": f"{row.size_bytes:,}",
            "in flight": f"{row.running}",
            "computation": f"x {row.compute:.2f}",
            "±": f"{row.compute_error:.0%}",
            "a collective": f"x {row.collective:.2f}",
            "± ": f"{row.collective_error:.0%}",
        }
        for row in processor.contention
    ]


def hook_rows(processor: Processor) -> Iterator[dict[str, str]]:
    """One a hook and part of it that costs anything."""
    for hook in processor.hooks:
        parts: dict[str, Linear] = {part: getattr(hook, part) for part in PARTS}
        for part, cost in parts.items():
            if cost != Linear():
                yield {
                    "hook": hook.name,
                    "part": f"{part}, {PARTS[part]}",
                    "a bucket us": f"{cost.fixed_ns / 1e3:.0f}",
                    "a MiB us": f"{cost.ns_per_byte * 2**20 / 1e3:.0f}",
                    "GB/s": f"{1 / cost.ns_per_byte:.2f}" if cost.ns_per_byte else "",
                }
