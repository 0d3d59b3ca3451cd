"""Part (a): all-reduce times on more GPUs than in the input tables.

The simulator reads the input table of the most GPUs and splits each time into a part for latency and a part for
bytes. Each part then grows with the number of GPUs by a law of its own. In the simulator's own growth
(`Fabric.extrapolate`) the latency grows with log2 n or n - 1, and the bytes take 2 (n - 1) / n of the message at a
constant rate, as on a ring. A question of a case file may add the rates of the links and the latency of a tree.
"""

from collections.abc import Callable, Sequence
from math import log2
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator import Fabric
from simulator.fabric.measured_tables import (
    DEFAULT_LATENCY_LAW,
    LATENCY_LAWS,
    latency_law,
    segment_at,
    tables_by_world_size,
)

from .cases import AllReduceCase, LinkRate, MeasuredTable, Question, TreeLatency
from .comparison import CaseScore, Comparison

Sizes = NDArray[np.int64]
Times = NDArray[np.floating[Any]]
Law = Callable[[float], float]
"""Relative cost on a number of GPUs."""


def score(case: AllReduceCase) -> CaseScore:
    """One row for each question, number of GPUs and message size."""
    tables = {table.gpus: table for table in case.tables}
    rows: list[Comparison] = []
    for question in case.questions:
        inputs = [tables[gpus] for gpus in question.fit]
        for gpus in question.predict:
            truth = tables[gpus]
            sizes = np.array(truth.bytes)
            predicted = predict_ns(inputs, question, gpus, sizes)
            baselines = baselines_ns(inputs, gpus, sizes)
            rows += [
                Comparison(
                    part="a",
                    case=case.name,
                    group=f"{question.title}: {gpus} GPUs",
                    label=f"{size} bytes",
                    calibrated_from=f"{', '.join(map(str, question.fit))} GPUs",
                    predicted_ns=float(predicted[place]),
                    measured_ns=us * 1000,
                    baselines_ns={name: float(times[place]) for name, times in baselines.items()},
                    counts=question.counts and size >= case.from_bytes,
                )
                for place, (size, us) in enumerate(zip(truth.bytes, truth.us, strict=True))
            ]
    return CaseScore(tuple(rows))


def predict_ns(inputs: Sequence[MeasuredTable], question: Question, gpus: int, sizes: Sizes) -> Times:
    """Predicted all-reduce times on `gpus` GPUs.

    Args:
        inputs: The tables in `question.fit`.
        question: Only `rates` and `tree` are used.
        gpus: One of `question.predict`.
        sizes: Message sizes in bytes.

    Returns:
        Nanoseconds, one time for each size.
    """
    fabric = fabric_of(inputs)
    largest = max(fabric.world_sizes)
    segments = fabric.segments(largest)
    shares = np.array([segment_at(segments, size).latency_share(size) for size in sizes])
    law = tree_law(question.tree) if question.tree else measured_law(fabric)
    latency_factor = law(gpus) / law(largest)
    bytes_factor = ring_share(gpus) / ring_share(largest) * link_slowdown(question.rates, largest, gpus)
    return fabric.all_reduce_costs_ns(sizes, largest) * (shares * latency_factor + (1 - shares) * bytes_factor)


def baselines_ns(inputs: Sequence[MeasuredTable], gpus: int, sizes: Sizes) -> dict[str, Times]:
    """Baselines: the input table of the most GPUs times the ring's factor, and the simulator's own growth."""
    fabric = fabric_of(inputs)
    largest = max(fabric.world_sizes)
    ring = fabric.all_reduce_costs_ns(sizes, largest) * (ring_share(gpus) / ring_share(largest))
    grown = fabric.model_copy(update={"extrapolate": True})
    return {"ring factor": ring, "extrapolate": grown.all_reduce_costs_ns(sizes, gpus).astype(np.float64)}


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
    """The law of latency that the simulator finds in the measured tables."""
    return LATENCY_LAWS[latency_law(tables_by_world_size(fabric.all_reduce), DEFAULT_LATENCY_LAW["nccl"])]


def tree_law(tree: TreeLatency) -> Law:
    """Latency along a chain inside the node and a tree over the nodes, up and down (NCCL's `ncclTopoTuneModel`)."""

    def law(gpus: float) -> float:
        inside = min(gpus, tree.node_gpus) - 1
        nodes = max(gpus / tree.node_gpus, 1)
        return tree.base_us + 2 * (inside * tree.inside_us + log2(nodes) * tree.across_us)

    return law


def ring_share(gpus: int) -> float:
    """Half of the bytes that each GPU of a ring sends for an all-reduce, as a fraction of the message."""
    return 1 - 1 / gpus


def link_slowdown(rates: Sequence[LinkRate], known: int, gpus: int) -> float:
    """How many times longer a byte takes on `gpus` GPUs than on `known` GPUs; 1 without rates."""
    if not rates:
        return 1.0
    by_gpus = {rate.gpus: rate.gb_per_s for rate in rates}
    return by_gpus[known] / by_gpus[gpus]
