"""Forecasts of steps on one GPU from names alone, written before a GPU here had run them, and their score.

For each training of the part `steps` of `make gpu`, the step with its 90 % interval and the peak of tensors, on an
H100 and on an H200. Model, batch size and data sheet are all that `ddplab plan` and `synthesize` then know.

`python -m validation.one_gpu_forecasts --write` writes them to `forecasts/`, once. Without it, the command prints
them beside what `make gpu` measured, and the score.
"""

import csv
import gzip
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from math import nan
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.gpu import parts
from benchmarks.training_steps import cases, parser
from ddplab.memory_counter import measure_memory
from ddplab.operation_counter import measure_operations
from ddplab.simulator.capacity.memory import memory_use
from ddplab.simulator.schedule.policy import Policy
from ddplab.simulator.workload.roofline import Operations, find_device
from ddplab.simulator.workload.trace_synthesis import synthesize

FILE = Path(__file__).parent / "forecasts" / "one_gpu_steps.csv"
RUNS = Path(__file__).parent / "gpu"
GPUS = "h100", "h200"
OF_WEIGHTS = {"validation.published_models:retinanet": "fp16"}
"""Precision of a model's weights if it is not bf16."""
RETINANET_BATCH = 32


class Forecast(NamedTuple):
    """A step of a module on one GPU.

    Attributes:
        gpu: Name in the catalogue.
        model: As for `--model`.
        batch: Samples of a step.
        precision: See `benchmarks.training_steps`.
        step_ms: The forecast.
        low_ms: Lower end of the 90 % interval.
        high_ms: Upper end.
        peak_mb: Peak of tensors, in 1e6 bytes; not a number if it was not counted.
    """

    gpu: str
    model: str
    batch: int
    precision: str
    step_ms: float
    low_ms: float
    high_ms: float
    peak_mb: float


def forecasts() -> Iterator[Forecast]:
    """Predict all steps."""
    (part,) = (one for one in parts(dry=False) if one.name == "steps")
    for gpu in GPUS:
        for command in part.commands:
            options = parser().parse_args(shlex.split(command)[1:])
            for model, batch, precision, *_ in cases(options):
                yield _forecast(gpu, model, batch, precision)


def _forecast(gpu: str, model: str, batch: int | None, precision: str) -> Forecast:
    sheet = find_device(f"{gpu}-{OF_WEIGHTS.get(model, 'bf16') if precision == 'weights' else precision}")
    counted = _counted(model, None if precision == "weights" else sheet.autocast)
    operations = counted if batch is None else counted.with_batch(batch / (counted.batch or RETINANET_BATCH))
    trace = synthesize(operations, sheet)
    ms, (low, high) = trace.ranks[0].iterations[0].duration_ns / 1e6, trace.workload.compute_bounds
    use = memory_use(trace, Policy(), "sgd")
    peak_mb = ((use.peak_bytes or nan) - (use.parts["buckets"] or 0)) / 1e6  # the module alone has none
    size = batch or counted.batch or RETINANET_BATCH
    return Forecast(gpu, model, size, precision, *(round(one, 3) for one in (ms, low * ms, high * ms, peak_mb)))


@cache
def _counted(model: str, autocast: str | None) -> Operations:
    operations = measure_operations(model, autocast=autocast)
    return operations.model_copy(update={"memory": measure_memory(model, autocast=autocast)})


def read(path: Path = FILE) -> list[Forecast]:
    """Read written forecasts."""
    with path.open(newline="") as file:
        return [
            Forecast(**{name: Forecast.__annotations__[name](value) for name, value in row.items()})
            for row in csv.DictReader(file)
        ]


class Outcome(NamedTuple):
    """A forecast and what was measured: the median step in milliseconds, and the peak of tensors in 1e6 bytes."""

    forecast: Forecast
    step_ms: float
    peak_mb: float

    @property
    def is_inside(self) -> bool:
        """Whether the step lies in the interval."""
        return self.forecast.low_ms <= self.step_ms <= self.forecast.high_ms


def outcomes(rows: Sequence[Forecast]) -> list[Outcome]:
    """Return the forecasts whose step a run of `make gpu` measured."""
    found = []
    for gpu in GPUS:
        measured: dict[str, dict[str, Any]] = {}
        for path in sorted(RUNS.glob(f"nvidia-{gpu}-*/steps.json.gz")):
            for of_command in json.loads(gzip.decompress(path.read_bytes()))["values"].values():
                measured |= of_command
        for one in rows:
            row = measured.get(f"{one.model}, batch {one.batch}, {one.precision}, sgd, module")
            if one.gpu == gpu and row is not None and "milliseconds" in row:
                found.append(Outcome(one, median(row["milliseconds"]), row["peak allocated"] / 1e6))
    return found


def write(path: Path, rows: Sequence[Forecast]) -> None:
    """Write forecasts as a CSV file.

    Raises:
        FileExistsError: There are some already; a forecast is not changed.
    """
    with path.open("x", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Forecast._fields)
        writer.writerows(rows)


def main(arguments: Sequence[str]) -> None:
    """Write the forecasts, or print them beside what was measured."""
    if list(arguments) == ["--write"]:
        write(FILE, list(forecasts()))
        return
    known = outcomes(read())
    for one in known:
        said, inside = one.forecast, "" if one.is_inside else "  outside"
        name = f"{said.gpu} {said.model.rpartition(':')[2]} {said.batch} {said.precision}"
        band = f"{said.step_ms:9.2f} ({said.low_ms:.1f} to {said.high_ms:.1f})"
        peak = f"peak {one.peak_mb:,.0f} MB, {said.peak_mb / one.peak_mb - 1:+.1%}"
        print(f"{name:45} {one.step_ms:9.2f} ms  forecast {band}{inside}  {peak}")
    if known:
        ratios = sorted(max(a, 1 / a) for a in (one.forecast.step_ms / one.step_ms for one in known))
        print(f"{len(known)} steps, {sum(one.is_inside for one in known)} inside, median factor {median(ratios):.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
