"""Part (a): all-reduce times on more GPUs than in the input tables.

The prediction is that of `Fabric(extrapolate=True)` with the input tables and, if links differ, their topology.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulator import Fabric
from simulator.fabric import topology_of
from simulator.fabric.algorithms import sent_share

from .cases import AllReduceCase, MeasuredTable, Question
from .comparison import CaseScore, Comparison

Sizes = NDArray[np.int64]
Times = NDArray[np.int64]
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
            predicted = predict_ns(inputs, question, gpus, sizes)
            ring = ring_ns(inputs, gpus, sizes)
            rows += [
                Comparison(
                    part="a",
                    case=case.name,
                    group=f"{question.title}: {gpus} GPUs",
                    label=f"{size} bytes",
                    calibrated_from=f"{', '.join(map(str, question.fit))} GPUs",
                    predicted_ns=float(predicted[place]),
                    measured_ns=us * 1000,
                    baselines_ns={RING_FACTOR: float(ring[place])},
                    counts=question.counts and size >= case.from_bytes,
                )
                for place, (size, us) in enumerate(compared)
            ]
    return CaseScore(tuple(rows))


def predict_ns(inputs: Sequence[MeasuredTable], question: Question, gpus: int, sizes: Sizes) -> Times:
    """Predicted all-reduce times on `gpus` GPUs.

    Args:
        inputs: The tables in `question.fit`.
        question: Only `topology` is used.
        gpus: One of `question.predict`.
        sizes: Message sizes in bytes.

    Returns:
        Nanoseconds, one time for each size.
    """
    links = None if question.topology is None else topology_of(question.topology)
    fabric = fabric_of(inputs).model_copy(update={"extrapolate": True, "topology": links})
    return fabric.all_reduce_costs_ns(sizes, gpus)


def ring_ns(inputs: Sequence[MeasuredTable], gpus: int, sizes: Sizes) -> NDArray[np.float64]:
    """The baseline *ring factor*: the input table of the most GPUs times the ratio of 2 (n - 1) / n."""
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
