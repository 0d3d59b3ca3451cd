"""Forecasts for clusters, written on 2026-11-29, before anyone here could know the truth, and their score.

All-reduces on 4, 8 and 32 nodes from the names of nodes whose published logs have fewer nodes, or other ones; and
steps of BERT-Large of MLPerf Training on more nodes, from a published step on few (v4.1 and v5.0; fp16 gradients, in
CUDA graphs). The published runs do not overlap; they are predicted with overlapped buckets of 288 MB, which are those
of MLPerf's Stable Diffusion.

`python -m validation.cluster_forecasts` prints the forecasts, and `--write` writes them to `forecasts/`, once.
`python -m validation.cluster_forecasts TRUTHS.csv` scores them: a truth has the columns model, node, gpus, bytes and
us; `model` is all-reduce or bert-large, and the bytes of a step are its batch per GPU.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddplab.simulator import predict
from ddplab.simulator.catalogue import load_fabric
from ddplab.simulator.workload.roofline import find_device
from ddplab.simulator.workload.trace_synthesis import synthesize

from .published_nodes import operations_of

FILE = Path(__file__).parent / "forecasts" / "clusters.csv"
LOGS = ("gcp-a3-mega", "dgx-h100", "dgx-b200", "aws-p4d", "aws-p5", "oci-mi300x")
NODES = 4, 8, 32
SIZES = 2 ** np.arange(18, 31, 2)
KNOWN_STEPS = (
    ("dgx-b200", "b200-fp16", 48, 8, 65.68),
    ("dgx-b200", "b200-fp16", 48, 16, 69.871),
    ("dgx-h200", "h200-fp16", 24, 16, 55.943),
    ("dgx-h200", "h200-fp16", 48, 8, 96.503),
    ("dgx-h100", "h100-fp16", 48, 8, 98.974),
)
"""Node, device, batch per GPU, GPUs and milliseconds: mlcommons/training_results_v5.0 and v4.1, BERT, by the systems
Dell XE9680L B200, Supermicro AS-4126GS (two nodes), HPE Cray XD670 (two nodes), Dell XE9680 and NVIDIA Eos."""
SETTINGS: dict[str, Any] = {
    "bucket_cap_mb": 288,
    "cuda_graph": True,
    "gradient_as_bucket_view": True,
    "hook": "fp16",
}


class Forecast(NamedTuple):
    """A time on a cluster, in microseconds.

    Attributes:
        model: "all-reduce", or the model that trains.
        node: Name in the catalogue.
        known_gpus: GPUs of the known step; 0: names alone.
        gpus: Number of GPUs.
        bytes: Bytes of the message, or samples per GPU.
        us: The forecast.
        low_us: Lower end of the 90 % interval.
        high_us: Upper end.
    """

    model: str
    node: str
    known_gpus: int
    gpus: int
    bytes: int
    us: float
    low_us: float
    high_us: float


def forecasts() -> Iterator[Forecast]:
    """Predict all-reduces, then steps."""
    for node in LOGS:
        fabric = load_fabric(node)
        for nodes in NODES:
            us = fabric.all_reduce_costs_ns(SIZES, 8 * nodes) / 1e3
            faster, slower = 1 + fabric.relative_errors(SIZES, 8 * nodes)
            for size, one, low, high in zip(SIZES.tolist(), us, us / faster, us * slower, strict=True):
                yield Forecast(
                    "all-reduce", node, 0, 8 * nodes, size, *(round(float(t), 1) for t in (one, low, high))
                )
    for node, device, batch, known, ms in KNOWN_STEPS:
        operations = operations_of("bert-large")
        trace = synthesize(operations.with_batch(batch / (operations.batch or 1)), find_device(device))
        for nodes in (2, *NODES):
            if 8 * nodes > known:
                measured = {known: round(ms * 1e6)}
                found = predict(trace, load_fabric(node), world_size=8 * nodes, measured=measured, **SETTINGS)
                times = (round(ns / 1e3, 1) for ns in (found.iteration_ns, *found.interval_ns))
                yield Forecast("bert-large", node, known, 8 * nodes, batch, *times)


def read(path: Path = FILE) -> list[Forecast]:
    """Read written forecasts."""
    with path.open(newline="") as file:
        return [
            Forecast(**{name: Forecast.__annotations__[name](value) for name, value in row.items()})
            for row in csv.DictReader(file)
        ]


def score(rows: list[Forecast], truths: Path) -> tuple[int, float, float]:
    """Return the number of forecasts with a truth, the part inside the interval, and the mean error without sign.

    Raises:
        ValueError: There is no truth of any forecast.
    """
    with truths.open(newline="") as file:
        known = {
            (one["model"], one["node"], int(one["gpus"]), int(one["bytes"])): float(one["us"])
            for one in csv.DictReader(file)
        }
    pairs = [(one, known[key]) for one in rows if (key := (one.model, one.node, one.gpus, one.bytes)) in known]
    if not pairs:
        raise ValueError(f"{truths}: expected a truth of at least one forecast, got none")
    inside = sum(one.low_us <= truth <= one.high_us for one, truth in pairs)
    return len(pairs), inside / len(pairs), sum(abs(one.us / truth - 1) for one, truth in pairs) / len(pairs)


def main() -> None:
    """Print, write or score the forecasts."""
    asked = sys.argv[1:]
    if asked and asked != ["--write"]:
        count, inside, error = score(read(), Path(asked[0]))
        print(f"{count} forecasts with a truth: {inside:.0%} inside, mean error {error:.1%}")
        return
    made = list(forecasts())
    for one in made:
        print(*one)
    if asked:
        with FILE.open("x", newline="") as file:  # a forecast is not changed
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Forecast._fields)
            writer.writerows(made)


if __name__ == "__main__":
    main()
