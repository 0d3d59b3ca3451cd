"""Part (a): all-reduce times on more GPUs than in the input tables.

The prediction is that of `Fabric(extrapolate=True)` with the input tables and, if links differ, their topology;
without tables, that of `Fabric.from_topology`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddplab.simulator import Fabric
from ddplab.simulator.fabric import topology_of
from ddplab.simulator.fabric.algorithms import sent_share

from .cases import AllReduceCase, MeasuredTable, Question
from .comparison import CaseScore, Comparison

Sizes = NDArray[np.int64]
RING_FACTOR = "ring factor"


def score(case: AllReduceCase) -> CaseScore:
    """One row for each question, number of GPUs and message size."""
    tables = {table.gpus: table for table in case.tables}
    rows: list[Comparison] = []
    for question in case.questions:
        inputs = [tables[gpus] for gpus in question.fit]
        for gpus in question.predict:
            compared = [
                (size, us)
                for size, us in zip(tables[gpus].bytes, tables[gpus].us, strict=True)
                if question.truth_below_bytes is None or size < question.truth_below_bytes
            ]
            sizes = np.array([size for size, _ in compared])
            predicted, (faster, slower) = predict_ns(inputs, question, gpus, sizes)
            ring = ring_ns(inputs, question, gpus, sizes)
            rows += [
                Comparison(
                    part="a",
                    case=case.name,
                    group=f"{question.title}: {gpus} GPUs",
                    label=f"{size} bytes",
                    calibrated_from=f"{', '.join(map(str, question.fit))} GPUs" if question.fit else "links",
                    predicted_ns=float(predicted[place]),
                    measured_ns=us * 1000,
                    baselines_ns={RING_FACTOR: float(ring[place])},
                    counts=question.counts and size >= case.from_bytes,
                    interval_ns=(predicted[place] / (1 + faster[place]), predicted[place] * (1 + slower[place])),
                    several_nodes=gpus > case.gpus_per_node,
                    added_later=case.added_later,
                )
                for place, (size, us) in enumerate(compared)
            ]
    return CaseScore(tuple(rows))


def predict_ns(
    inputs: Sequence[MeasuredTable], question: Question, gpus: int, sizes: Sizes
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Predicted all-reduce times on `gpus` GPUs.

    Args:
        inputs: The tables in `question.fit`.
        question: Only `topology` is used.
        gpus: One of `question.predict`.
        sizes: Message sizes in bytes.

    Returns:
        Nanoseconds, and their relative errors as `Fabric.relative_errors` has them.
    """
    links = None if question.topology is None else topology_of(question.topology)
    if links is not None and not inputs:
        fabric = Fabric.from_topology(links)
    else:
        fabric = fabric_of(inputs).model_copy(update={"extrapolate": True, "topology": links})
    return fabric.all_reduce_costs_ns(sizes, gpus), fabric.relative_errors(sizes, gpus)


def ring_ns(inputs: Sequence[MeasuredTable], question: Question, gpus: int, sizes: Sizes) -> NDArray[np.float64]:
    """The baseline *ring factor*: the input table of the most GPUs times the ratio of 2 (n - 1) / n.

    Without a table: 2 (n - 1) / n times the message, over the rate of the slowest link.
    """
    if not inputs:
        assert question.topology is not None
        slowest = min(level.bytes_per_s for level in topology_of(question.topology).levels)
        return sizes.astype(np.float64) * (sent_share(gpus) / slowest * 1e9)
    fabric = fabric_of(inputs)
    largest = max(fabric.world_sizes)
    costs_ns = fabric.all_reduce_costs_ns(sizes, largest).astype(np.float64)
    return costs_ns * (sent_share(gpus) / sent_share(largest))


def fabric_of(tables: Sequence[MeasuredTable]) -> Fabric:
    """The simulator's fabric of measured tables."""
    return Fabric.from_table(
        [
            (table.gpus, size, round(us * 1000))
            for table in tables
            for size, us in zip(table.bytes, table.us, strict=True)
        ]
    )
