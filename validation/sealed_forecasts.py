"""Forecasts that were written before anyone here could know the truth, and their score.

For each one-node result of MLPerf Training v5.0 and v5.1 (RetinaNet; `data/mlperf_retinanet.csv`) on B200, GB200 and
H200, the step on 2 to 64 nodes with the same batch a GPU. The inputs are the measured step of the one node, given as
`ddplab predict --measured` takes it, and the links of the catalogue: dgx-b200 and dgx-h200, with as many GPUs in a
node as the system has. GB200 nodes share one NVLink domain, of up to 64 GPUs.

`python -m validation.sealed_forecasts` prints the forecasts, and `--write` writes them to `forecasts/`, once.
`python -m validation.sealed_forecasts TRUTHS.csv` scores them: a truth has the columns round, org, system, nodes and
step_ms.
"""

import csv
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, predict
from ddplab.simulator.catalogue import read_catalogue
from ddplab.simulator.workload.roofline import find_device
from ddplab.simulator.workload.trace_synthesis import synthesize

from .published_nodes import operations_of

FILE = Path(__file__).parent / "forecasts" / "retinanet.csv"
RESULTS = Path(__file__).parent / "data" / "mlperf_retinanet.csv"
NODES = 2, 4, 8, 16, 64
ROUNDS = "v5.0", "v5.1"
LINKS = {"B200": "dgx-b200", "H200": "dgx-h200"}
"""Node of the catalogue by a part of the name of the GPU."""
NVLINK_DOMAIN = 64
"""GPUs of one NVLink domain of GB200, of 72, that 64 nodes of four GPUs fill evenly."""
SETTINGS: dict[str, Any] = {"bucket_cap_mb": 25, "broadcast_buffers": False, "gradient_as_bucket_view": True}
"""Of the published results, by their configurations."""


class Forecast(NamedTuple):
    """A step on several nodes.

    Attributes:
        round: Round of MLPerf Training.
        org: Submitter.
        system: Its system of one node.
        gpu: The GPU's name.
        batch_per_gpu: Images on each GPU.
        one_node_ms: Measured step on one node.
        nodes: Number of nodes.
        gpus: Number of GPUs.
        step_ms: The forecast.
        low_ms: Lower end of the 90 % interval.
        high_ms: Upper end.
    """

    round: str
    org: str
    system: str
    gpu: str
    batch_per_gpu: int
    one_node_ms: float
    nodes: int
    gpus: int
    step_ms: float
    low_ms: float
    high_ms: float


def forecasts() -> list[Forecast]:
    """Predict all steps."""
    with RESULTS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["round"] in ROUNDS and row["nodes"] == "1"]
    return [_forecast(row, nodes) for row in rows if any(name in row["gpu"] for name in LINKS) for nodes in NODES]


def _forecast(row: dict[str, str], nodes: int) -> Forecast:
    in_node, ms = int(row["gpus"]), float(row["step_ms_median"])
    step, low, high = _predicted(row["gpu"], in_node, int(row["batch_per_gpu"]), ms, nodes)
    about = row["round"], row["org"], row["system"], row["gpu"], int(row["batch_per_gpu"]), ms
    return Forecast(*about, nodes, nodes * in_node, *(round(one / 1e6, 3) for one in (step, low, high)))


@cache
def _predicted(gpu: str, in_node: int, batch: int, ms: float, nodes: int) -> tuple[float, float, float]:
    """Return nanoseconds of the step, and both ends of its interval."""
    name = next(name for name in LINKS if name in gpu)
    members = min(NVLINK_DOMAIN, nodes * in_node) if "GB200" in gpu else in_node
    links = read_catalogue().topology(LINKS[name])
    levels = (links.levels[0].model_copy(update={"members": members}), *links.levels[1:])
    fabric = Fabric.from_topology(links.model_copy(update={"levels": levels}))
    trace = _trace(name.lower(), batch, round(ms * 1e6))
    measured = {in_node: round(ms * 1e6)}
    found = predict(trace, fabric, world_size=nodes * in_node, measured=measured, **SETTINGS)
    return found.iteration_ns, *found.interval_ns


@cache
def _trace(device: str, batch: int, step_ns: int) -> Trace:
    """Return a step of RetinaNet that takes as long as on the one node; a measured step corrects it."""
    operations = operations_of("validation.published_models:retinanet").model_copy(update={"batch": 32})
    return synthesize(operations.with_batch(batch / 32), find_device(f"{device}-fp16"), step_ns=step_ns)


def read(path: Path = FILE) -> list[Forecast]:
    """Read written forecasts."""
    with path.open(newline="") as file:
        return [
            Forecast(**{name: Forecast.__annotations__[name](value) for name, value in row.items()})
            for row in csv.DictReader(file)
        ]


def write(path: Path, rows: Sequence[Forecast]) -> None:
    """Write forecasts as a CSV file.

    Raises:
        FileExistsError: There are some already; a forecast is not changed.
    """
    with path.open("x", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Forecast._fields)
        writer.writerows(rows)


class Outcome(NamedTuple):
    """How good forecasts were: rows with a truth, the part inside the interval, and the mean error without sign."""

    rows: int
    inside: float
    mean_error: float


def score(rows: Sequence[Forecast], truths: Path) -> Outcome:
    """Compare forecasts with truths.

    Args:
        rows: The forecasts.
        truths: CSV file with the columns round, org, system, nodes and step_ms; other columns are ignored.

    Raises:
        ValueError: A column is missing, or there is no truth of any forecast.
    """
    with truths.open(newline="") as file:
        reader = csv.DictReader(file)
        if missing := {"round", "org", "system", "nodes", "step_ms"} - set(reader.fieldnames or ()):
            raise ValueError(f"{truths}: expected columns round, org, system, nodes, step_ms; no {sorted(missing)}")
        known = {
            (one["round"], one["org"], one["system"], int(one["nodes"])): float(one["step_ms"]) for one in reader
        }
    pairs = [(one, known[key]) for one in rows if (key := (one.round, one.org, one.system, one.nodes)) in known]
    if not pairs:
        raise ValueError(f"{truths}: expected truths of forecasts in {FILE.name}, by round, org, system and nodes")
    inside = sum(one.low_ms <= ms <= one.high_ms for one, ms in pairs)
    errors = [abs(one.step_ms / ms - 1) for one, ms in pairs]
    return Outcome(len(pairs), inside / len(pairs), sum(errors) / len(errors))


def main(arguments: Sequence[str]) -> None:
    """Print, write or score the forecasts."""
    if list(arguments) == ["--write"]:
        write(FILE, forecasts())
    elif arguments:
        outcome = score(read(), Path(arguments[0]))
        print(f"{outcome.rows} truths: {outcome.inside:.0%} inside, mean error {outcome.mean_error:.1%}")
    else:
        for one in read():
            print(*one, sep=", ")


if __name__ == "__main__":
    main(sys.argv[1:])
