"""Published training steps as operations of a kind at a data sheet's rates: the input of `measured_utilisation`.

The tables lie in `data/`: published_steps.csv and published_devices.csv with their sources, and
published_operations.csv. The last one sums the operations of a batch by kind and by FLOPs per byte, in classes of a
factor of eight, counted with the formulas of `ddplab.operation_counter` (bfloat16: under autocast). The models are
those of timm 1.0.31 and torchvision 0.28 by their names, and transformers of the published sizes. A step without
counted operations or without a data sheet is not read. Steps of built-in models that `make gpu` measured come last.
"""

import csv
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from math import prod
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ddplab.simulator.catalogue import read_catalogue
from ddplab.simulator.workload.roofline import (
    EAGER_PACE_NS,
    arithmetic_terms,
    built_in_operations,
    find_device,
    memory_terms,
    merge,
)

DATA, RUNS = Path(__file__).parent / "data", Path(__file__).parent / "gpu"
STEP_BYTES = {"none": 0, "SGD": 12, "SGD momentum": 20, "RMSprop": 20, "Adam": 28, "AdamW": 28, "LAMB": 28}
"""Bytes that an optimiser moves for a float32 parameter; the step after accumulated batches is left out."""
FAMILIES = ("mpt", "bert", "resnext", "resnet", "regnet", "efficientnet", "mobilenet", "vit", "llama", "gpt2")


class Part(NamedTuple):
    """Operations of one kind and ratio: their milliseconds at the data sheet's rates, and what their rates depend on.

    The arithmetic rate depends on the terms of `arithmetic`, the memory's on those of `memory`.
    """

    kind: str
    arithmetic_ms: float
    memory_ms: float
    arithmetic: tuple[str, ...]
    memory: tuple[str, ...]


class Step(NamedTuple):
    """A published step.

    Attributes:
        model: The model; transformers of one size and several lengths of the sequence are one model.
        family: Models of one design.
        parameters: Number of parameters.
        device: Name in published_devices.csv.
        generation: That of the device.
        precision: fp32, tf32, fp16 or bf16.
        channels_last: Whether convolutions run on channels-last tensors.
        ms: The published time.
        host_ms: Time in which the host launches all kernels; 0 with a CUDA graph.
        parts: The operations.
    """

    model: str
    family: str
    parameters: int
    device: str
    generation: str
    precision: str
    channels_last: bool
    ms: float
    host_ms: float
    parts: tuple[Part, ...]

    @property
    def utilisation(self) -> float:
        """Part of the peak rate that the step reaches."""
        return sum(part.arithmetic_ms for part in self.parts) / self.ms

    @property
    def cell(self) -> tuple[object, ...]:
        """What several publications of one measurement share."""
        return self.model, self.device, self.precision, self.channels_last


def read(table: str) -> Iterator[dict[str, str]]:
    """Read the rows of `data/published_TABLE.csv`."""
    with (DATA / f"published_{table}.csv").open(newline="") as file:
        yield from csv.DictReader(file)


def read_steps() -> list[Step]:
    """Return the published steps whose operations are counted and whose device has a data sheet."""
    counts, sheets, steps = defaultdict(list), {row["name"]: _sheet(row) for row in read("devices")}, []
    for row in read("operations"):
        counts[row["model"], row["dtype"]].append(row)
    for row in read("steps"):
        counted = counts[row["operations"], "bfloat16" if row["precision"] in ("fp16", "bf16") else "float32"]
        generation, rates, gb_per_s = sheets.get(row["device"], ("", {}, 0))
        if counted and row["precision"] in rates:
            steps.append(_step(row, counted, generation, rates[row["precision"]], gb_per_s))
    return [*steps, *_measured_steps()]


AS_PUBLISHED = {"resnet50-224": "resnet50", "resnet152-224": "resnet152", "vit-b-16": "vit_base_patch16_224"}
"""Built-in models that published steps name otherwise."""


def _measured_steps() -> Iterator[Step]:
    """Yield the part `steps` of each run of `make gpu`, without the models that are not built in."""
    for path in sorted(RUNS.glob("nvidia-*/steps.json.gz")):
        device = path.parent.name.split("-")[1]
        for of_command in json.loads(gzip.decompress(path.read_bytes()))["values"].values():
            for name, row in of_command.items():
                model, batch, precision, *_ = name.split(", ")
                counted = built_in_operations(model, "bfloat16" if precision == "bf16" else None)
                if counted is None or counted.batch is None or "milliseconds" not in row:
                    continue
                sheet = find_device(f"{device}-{'bf16' if precision == 'weights' else precision}")
                generation = sheet.generation or ""
                operations = counted.with_batch(int(batch.removeprefix("batch ")) / counted.batch)
                done = merge([*operations.forward, *operations.loss, *operations.backward, *operations.step])
                named = AS_PUBLISHED.get(model, model.removesuffix("-checkpointed"))
                yield Step(
                    model=named,
                    family=next(name for name in FAMILIES if name in named),
                    parameters=sum(prod(one.shape) for one in operations.parameters),
                    device=device,
                    generation=generation,
                    precision=sheet.precision,
                    channels_last=False,
                    ms=median(row["milliseconds"]),
                    host_ms=sum(one.kernels for one in done) * EAGER_PACE_NS / 1e6,
                    parts=tuple(
                        Part(
                            kind=one.kind,
                            arithmetic_ms=one.flops / sheet.flops_per_s * 1e3,
                            memory_ms=one.bytes_moved / sheet.bytes_per_s * 1e3,
                            arithmetic=arithmetic_terms(one.kind, generation, sheet.precision) if one.flops else (),
                            memory=memory_terms(one.kind, generation, sheet.precision),
                        )
                        for one in done
                    ),
                )


def _sheet(row: dict[str, str]) -> tuple[str, dict[str, float], float]:
    """Return generation, dense TFLOP/s by precision and GB/s."""
    entry = read_catalogue().devices.get(row["name"])
    if entry is not None and entry.peaks is not None:
        return (
            row["generation"],
            {str(name): rate for name, rate in entry.peaks.tflops.items()},
            entry.memory.gb_per_s,
        )
    rates = {name: float(row[name]) for name in ("fp32", "tf32", "fp16") if row[name]}
    return row["generation"], {**rates, "bf16": rates["fp16"]}, float(row["gb_per_s"])


def _step(
    row: dict[str, str], counted: list[dict[str, str]], generation: str, tflops: float, gb_per_s: float
) -> Step:
    precision, channels_last = row["precision"], row["channels_last"] == "yes"
    forwards = 2 if row["recomputation"] == "full" else 1
    batches = int(row["batch_per_gpu"]) / int(counted[0]["batch"])
    shards = int(row["gpus"]) if "SHARD" in row["parallelism"] else 1

    def total(one: dict[str, str], what: str) -> int:
        return forwards * int(one[f"forward_{what}"]) + int(one[f"backward_{what}"])

    parts = [
        Part(
            kind=one["kind"],
            arithmetic_ms=batches * total(one, "flops") / tflops / 1e9,
            memory_ms=batches * total(one, "bytes") / gb_per_s / 1e6,
            arithmetic=arithmetic_terms(one["kind"], generation, precision) if total(one, "flops") else (),
            memory=memory_terms(one["kind"], generation, precision, channels_last=channels_last, fused=row["fused"]),
        )
        for one in counted
    ]
    step_bytes = STEP_BYTES.get(row["optimizer"], 0) * int(counted[0]["parameters"]) / shards
    terms = memory_terms("memory", generation, "fp32")
    parts.append(Part("optimiser", 0, step_bytes / gb_per_s / 1e6, (), terms))
    kernels = sum(total(one, "kernels") for one in counted)
    several_lengths = row["operations"].startswith(("mpt", "llama", "gpt2", "bert"))
    model = (
        row["operations"].rsplit("_", 1 + ("bert" in row["operations"]))[0] if several_lengths else row["operations"]
    )
    return Step(
        model=model,
        family=next((name for name in FAMILIES if name in model), model),
        parameters=int(counted[0]["parameters"]),
        device=row["device"],
        generation=generation,
        precision=precision,
        channels_last=channels_last,
        ms=float(row["step_ms"]),
        host_ms=0 if row["cuda_graph"] == "yes" else kernels * EAGER_PACE_NS / 1e6,
        parts=tuple(parts),
    )
