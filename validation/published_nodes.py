"""Inputs of parts (d) and (e): traces of published models, and fabrics of published nodes of GPUs.

The trace of a model follows from its operations and its GPU's data sheet, scaled to the measured iteration on one
GPU. All costs on several GPUs but those of the links are the usual ones, which `ddplab predict` assumes for a GPU.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from ddplab.reference.files.reading import read_bytes
from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric
from ddplab.simulator.fabric import Level, Topology
from ddplab.simulator.inputs_with_default_costs import Assumed, assume_gpu
from ddplab.simulator.workload.roofline import Device, Operations
from ddplab.simulator.workload.trace_synthesis import synthesize
from ddplab.simulator.workload.variation import Variation

from .cases import BucketCapsCase, Node, NodeInputs, ScalingCase, WeakScalingCase, load_case
from .part_a_all_reduces import fabric_of

CASES = Path(__file__).parent / "cases"
OPERATIONS = Path(__file__).with_name("published_operations.json.gz")
"""Gzipped JSON: by model of the cases, the fields of `Operations`; `count_built_in_models` writes it."""


def models_of_cases() -> list[str]:
    """Return the `--model` names of the cases, of which parts (d), (e) and (i) have some."""
    names = set()
    for case in map(load_case, CASES.glob("*.toml")):
        if isinstance(case, ScalingCase):
            names |= {run.model for run in case.inputs.one_gpu}
        elif isinstance(case, BucketCapsCase):
            names |= {reducer.model for reducer in case.inputs.reducers}
        elif isinstance(case, WeakScalingCase):
            names |= {run.model for run in case.inputs.runs}
    return sorted(names)


@cache
def counted_operations() -> dict[str, Any]:
    """Return the content of the file."""
    counted: dict[str, Any] = json.loads(read_bytes(OPERATIONS))
    return counted


@cache
def operations_of(model: str) -> Operations:
    """Return the operations of a model by its `--model` name: from the file, or counted if the file has none."""
    if (known := counted_operations().get(model)) is not None:
        return Operations.model_validate_json(json.dumps(known))
    from ddplab.operation_counter import measure_operations  # loads torch

    return measure_operations(model)


def device_of(node: Node, tflops: float) -> Device:
    """Return the data sheet of a node's GPU, with its peak rate in the precision used."""
    return Device(name=node.name, flops_per_s=tflops * 1e12, bytes_per_s=node.memory_gb_per_s * 1e9)


@cache
def trace_of_model(model: str, device: Device, compute_ns: float, optimizer_ns: float | None = None) -> Trace:
    """Make a trace of an iteration without communication; once for the same arguments.

    Args:
        model: As for `--model`.
        device: The GPU's data sheet.
        compute_ns: Nanoseconds of the iteration.
        optimizer_ns: Part of it after the backward pass. None: a step of SGD at the rate of the GPU's memory.
    """
    optimizer = None if optimizer_ns is None else round(optimizer_ns)
    return synthesize(operations_of(model), device, step_ns=round(compute_ns), optimizer_ns=optimizer)


def assume_on_node(trace: Trace, node: Node, inputs: NodeInputs, gpus: int) -> Assumed:
    """Return the links of `gpus` GPUs of a node, and the usual costs of the GPU."""
    return assume_gpu(trace, fabric_of_node(node, inputs, gpus), Variation())


def fabric_of_node(node: Node, inputs: NodeInputs, gpus: int) -> Fabric:
    """Return measured all-reduces of `gpus` GPUs, or a ring at the part of the data sheet's rate that these reach.

    Raises:
        ValueError: The node has neither a table nor a rate for this number of GPUs.
    """
    if node.tables:
        return fabric_of(node.tables)
    rates = {rate.gpus: rate.gb_per_s for rate in node.rates}
    if gpus not in rates:
        raise ValueError(f"nodes.{node.name}.rates: expected a rate for {gpus} GPUs, got {list(rates)}")
    level = Level(
        name=node.name,
        latency_ns=round(inputs.hop_us.value * 1000),
        bytes_per_s=rates[gpus] * inputs.link_efficiency.value * 1e9,
    )
    return Fabric(topology=Topology(levels=(level,)), algorithm="ring")
