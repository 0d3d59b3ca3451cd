"""Methods of the board: ddplab's own, the baselines of the score, and bare links.

Two of them show where the error of a simulator comes from. *Naive overlap* overlaps computation with all-reduces that
take as long as ours, one at a time, and has no other cost. *Links only* sends all gradients after the computation, at
the rate of the slowest link: no overlap, which is too slow, over links without latency, which are too fast.
"""

from functools import partial

from ddplab.simulator import Fabric, Prediction, predict
from ddplab.simulator.baseline_predictions import BASELINES, baselines_ns
from ddplab.simulator.fabric import Linear
from ddplab.simulator.fabric.algorithms import sent_share
from ddplab.simulator.inputs_with_default_costs import (
    COPY_ERROR,
    DEVICE_SPREAD,
    JITTER,
    SLOW_DOWN,
    SLOW_DOWN_ERROR,
    UNEXPLAINED,
    assume_gpu,
)
from ddplab.simulator.workload.variation import RECORDED, Variation

from .board import Answer, Row
from .part_h_profiles import added_ns

MERGE_NS = 25_000
"""Time to copy one gradient into a merged buffer on a GPU of (c): `copy_us` in cases/schedules_hkbu_*.toml."""
SLOWED = {"slow_down": SLOW_DOWN, "slow_down_error": SLOW_DOWN_ERROR, "unexplained": UNEXPLAINED}


def ours(row: Row) -> Answer:
    """Predict as the score does: with the usual costs of a GPU where none was measured."""
    if row.gpus == 1:  # nothing is sent
        return row.known_ms + added_ns(row.load_trace(), row.load_fabric()) / 1e6
    predicted = _predicted(row, row.gpus)
    factor = 1e-6 if row.known_gpus == 1 else row.known_ms / _predicted(row, row.known_gpus).iteration_ns
    answer_ms = predicted.iteration_ns * factor
    if row.part in "fg":  # an interval would need the errors of other runs
        return answer_ms
    low_ns, high_ns = predicted.interval_ns
    return answer_ms, low_ns * factor, high_ns * factor


def _predicted(row: Row, gpus: int) -> Prediction:
    fabric, variation = _assumed(row)
    trace = row.load_trace()
    return predict(trace, fabric, world_size=gpus, variation=variation, assume=False, **row.settings)


def _assumed(row: Row) -> tuple[Fabric, Variation]:
    """Return the fabric with assumed costs where none was measured, and the variation of iterations."""
    fabric = row.load_fabric()
    if row.part == "b":  # DDP's step on one GPU is known, so it has copies and launches
        return fabric.with_processor(**SLOWED), Variation(kind="slowest", device_spread=DEVICE_SPREAD, jitter=JITTER)
    if row.part == "c":
        is_merged = any(len(bucket) > 1 for bucket in row.settings["plan"])
        copies = Linear(fixed_ns=MERGE_NS if is_merged else 0.0)
        return fabric.with_processor(pack=copies, copy_error=COPY_ERROR, **SLOWED), RECORDED
    if row.part in "fgh":  # measured costs
        return fabric, RECORDED
    fabric, variation, _ = assume_gpu(row.load_trace(), fabric, Variation())
    if row.settings.get("grouping") == "fusion":  # these reducers do no more at a launch
        fabric = fabric.with_processor(launch_ns=0, stall_ns=0)
    if row.part == "e":
        variation = variation.model_copy(update={"jitter": 0.0})
    return fabric, variation


def _baseline(name: str, row: Row) -> Answer:
    """Predict by a baseline of the score; each has our all-reduces."""
    if row.gpus == 1:
        return row.known_ms
    of: dict[int, float] = {
        gpus: baselines_ns(row.load_trace(), _assumed(row)[0], world_size=gpus, **row.settings)[name]
        for gpus in {row.gpus, row.known_gpus} - {1}
    }
    return of[row.gpus] / 1e6 if row.known_gpus == 1 else of[row.gpus] * row.known_ms / of[row.known_gpus]


def perfect_scaling(row: Row) -> Answer:
    """Predict the known iteration."""
    return row.known_ms


no_overlap, naive_overlap, pipelined_overlap = (partial(_baseline, name) for name in BASELINES[1:])


def links_only(row: Row) -> Answer:
    """Predict all gradients at the rate of the slowest link after the computation, without latency and efficiency."""
    of = {gpus: row.known_ms + _bytes_ms(row, gpus) for gpus in (row.gpus, row.known_gpus)}
    return of[row.gpus] if row.known_gpus == 1 else of[row.gpus] * row.known_ms / of[row.known_gpus]


LARGE_BYTES = 2**30


def _bytes_ms(row: Row, gpus: int) -> float:
    """Milliseconds in which the links send all gradients; where only tables are known, at the rate of 1 GiB."""
    if gpus == 1:
        return 0.0
    fabric, sizes = row.load_fabric(), row.load_trace().sizes_bytes
    if fabric.topology is None:
        return sum(sizes) * fabric.all_reduce_ns(LARGE_BYTES, gpus) / LARGE_BYTES / 1e6
    used = (level for level in fabric.topology.in_use(gpus) if level.size > 1)
    return sent_share(gpus) * sum(sizes) * max(level.ns_per_byte for level in used) / 1e6
