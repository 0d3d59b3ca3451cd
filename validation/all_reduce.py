"""Part (a): all-reduces at numbers of GPUs that nobody measured, from those that somebody did.

The simulator reads the largest known table and splits each time into latency and bytes; each of the two then grows
by its own law. The simulator's own growth (`Fabric.extrapolate`) takes log2 n or n - 1 for the latency, and for the
bytes a ring's 2 (n - 1) / n at one rate throughout. A question may tell more: the rates of the links, and the
start-up of a tree over nodes.
"""

from collections.abc import Callable, Sequence
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator import Fabric
from simulator.fabric.tables import DEFAULT_LATENCY_LAW, LATENCY_LAWS, latency_law, segment_at, tables_by_world_size

from .all_reduce_case import AllReduceCase, MeasuredTable, Question, Rate, TreeLatency
from .rows import Scored, ScoreRow

Sizes = NDArray[np.int64]
Times = NDArray[np.floating[Any]]
Law = Callable[[float], float]


def score(case: AllReduceCase) -> Scored:
    """A row for each question, number of GPUs and size of message."""
    tables = {table.gpus: table for table in case.tables}
    rows: list[ScoreRow] = []
    for question in case.questions:
        known = [tables[gpus] for gpus in question.fit]
        for gpus in question.predict:
            truth = tables[gpus]
            sizes = np.array(truth.bytes)
            predicted = foretold_ns(known, question, gpus, sizes)
            yardsticks = yardsticks_ns(known, gpus, sizes)
            rows += [
                ScoreRow(
                    part="a",
                    case=case.name,
                    group=f"{question.title}: {gpus} GPUs",
                    what=f"{size} bytes",
                    calibrated=_listed(question.fit),
                    predicted_ns=float(predicted[place]),
                    measured_ns=us * 1000,
                    yardsticks_ns={name: float(times[place]) for name, times in yardsticks.items()},
                    counts=question.counts and size >= case.from_bytes,
                )
                for place, (size, us) in enumerate(zip(truth.bytes, truth.us, strict=True))
            ]
    return Scored(tuple(rows))


def foretold_ns(known: Sequence[MeasuredTable], question: Question, gpus: int, sizes: Sizes) -> Times:
    """Nanoseconds of all-reduces over `gpus` GPUs, by size; of the question only rates and tree are read."""
    fabric = fabric_of(known)
    largest = max(fabric.world_sizes)
    pieces = fabric.segments(largest)
    shares = np.array([segment_at(pieces, size).latency_share(size) for size in sizes])
    law = tree_law(question.tree) if question.tree else measured_law(fabric)
    latency = law(gpus) / law(largest)
    bytes_ = ring_share(gpus) / ring_share(largest) * slower(question.rates, largest, gpus)
    return fabric.all_reduce_costs_ns(sizes, largest) * (shares * latency + (1 - shares) * bytes_)


def yardsticks_ns(known: Sequence[MeasuredTable], gpus: int, sizes: Sizes) -> dict[str, Times]:
    """The largest known table by the ring's factor alone, and the simulator's own growth."""
    fabric = fabric_of(known)
    largest = max(fabric.world_sizes)
    ring = fabric.all_reduce_costs_ns(sizes, largest) * (ring_share(gpus) / ring_share(largest))
    grows = fabric.model_copy(update={"extrapolate": True})
    return {"ring factor": ring, "extrapolate": grows.all_reduce_costs_ns(sizes, gpus).astype(np.float64)}


def fabric_of(tables: Sequence[MeasuredTable]) -> Fabric:
    """The simulator's fabric of measured tables."""
    return Fabric.from_table(
        [
            (table.gpus, size, round(us * 1000))
            for table in tables
            for size, us in zip(table.bytes, table.us, strict=True)
        ]
    )


def measured_law(fabric: Fabric) -> Law:
    """The law that the latencies of the known tables follow, as the simulator reads it."""
    return LATENCY_LAWS[latency_law(tables_by_world_size(fabric.all_reduce), DEFAULT_LATENCY_LAW["nccl"])]


def tree_law(tree: TreeLatency) -> Law:
    """Up a chain inside the node and a tree over the nodes, and down again (NCCL's `ncclTopoTuneModel`)."""

    def law(gpus: float) -> float:
        inside = min(gpus, tree.node_gpus) - 1
        nodes = max(gpus / tree.node_gpus, 1)
        return tree.base_us + 2 * (inside * tree.inside_us + log2(nodes) * tree.across_us)

    return law


def ring_share(gpus: int) -> float:
    """Part of the message that each GPU of a ring sends, but for the 2 that all have."""
    return 1 - 1 / gpus


def slower(rates: Sequence[Rate], known: int, gpus: int) -> float:
    """How many times as long a byte takes with the links that `gpus` GPUs use; 1 where no rates are told."""
    if not rates:
        return 1.0
    by_gpus = {rate.gpus: rate.gb_per_s for rate in rates}
    return by_gpus[known] / by_gpus[gpus]


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers))} GPUs"
