"""Merging: one fabric out of several whose measured tables complete each other."""

import reprlib
from collections.abc import Sequence
from typing import TypeVar

from .description import Description
from .topology import Topology

D = TypeVar("D", bound=Description)

ALIKE = ("concurrency", "scale", "slow_link")
"""Fields that change what a table means, so that tables under different ones are no one fabric's."""


def merge(fabrics: Sequence[D]) -> D:
    """The measured tables of all, the topology of the one that has any, and everything else of the first.

    Raises:
        ValueError: None, or two that do not fit together; one line, which names them by place and source.
    """
    if not fabrics:
        raise ValueError("fabrics: expected at least one to merge, got none")
    for number, fabric in enumerate(fabrics):
        if not isinstance(fabric, Description):
            raise ValueError(f"fabrics[{number}]: expected a Fabric, got {reprlib.repr(fabric)}")
    _check_alike(fabrics)
    _check_measured_once(fabrics)
    update = {
        "all_reduce": tuple(row for fabric in fabrics for row in fabric.all_reduce),
        "broadcast": tuple(row for fabric in fabrics for row in fabric.broadcast),
        "topology": _only_topology(fabrics),
        "source": "; ".join(dict.fromkeys(fabric.source for fabric in fabrics if fabric.source)),
    }
    return fabrics[0].model_copy(update=update)


def _check_alike(fabrics: Sequence[Description]) -> None:
    first = _named(fabrics, 0)
    for number, fabric in enumerate(fabrics):
        for name in ALIKE:
            expected, seen = getattr(fabrics[0], name), getattr(fabric, name)
            if seen != expected:
                raise ValueError(f"{_named(fabrics, number)}: {name}: expected {expected}, as of {first}, got {seen}")


def _check_measured_once(fabrics: Sequence[Description]) -> None:
    measured: dict[int, int] = {}
    for number, fabric in enumerate(fabrics):
        for world_size in sorted({row.world_size for row in (*fabric.all_reduce, *fabric.broadcast)}):
            if (before := measured.setdefault(world_size, number)) != number:
                raise ValueError(
                    f"{_named(fabrics, number)}: expected world sizes that no other measured, got {world_size}, "
                    f"which {_named(fabrics, before)} measured too; leave one of them out"
                )


def _only_topology(fabrics: Sequence[Description]) -> Topology | None:
    described = [number for number, fabric in enumerate(fabrics) if fabric.topology is not None]
    if len(described) > 1:
        first, second = (_named(fabrics, number) for number in described[:2])
        raise ValueError(f"{second}: topology: expected links of one fabric, got more, as {first} has some")
    return fabrics[described[0]].topology if described else None


def _named(fabrics: Sequence[Description], number: int) -> str:
    source = fabrics[number].source
    return f"fabrics[{number}] ({source})" if source else f"fabrics[{number}]"
