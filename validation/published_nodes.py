"""Inputs of parts (d) and (e): traces of published models, and fabrics of published nodes of GPUs.

The trace of a model follows from its operations and its GPU's data sheet, scaled to the measured iteration on one
GPU. All costs on several GPUs but those of the links are the usual ones, which `ddplab predict` assumes for a GPU.
"""

from functools import cache

from ddplab.operation_counter import measure_operations
from reference.trace import Trace
from simulator import Fabric
from simulator.fabric import Level, Topology
from simulator.workload.default_gpu_costs import Assumed, assume_gpu
from simulator.workload.roofline import Device
from simulator.workload.trace_synthesis import synthesize
from simulator.workload.variation import Variation

from .cases import Node, NodeInputs
from .part_a_all_reduces import fabric_of

operations_of = cache(measure_operations)
"""Operations of a model by its `--model` name; each is counted once."""


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
    """Return measured all-reduces of `gpus` GPUs, or a ring at the data sheet's rate, and the usual costs of the GPU.

    Raises:
        ValueError: The node has neither a table nor a rate for this number of GPUs.
    """
    if node.tables:
        return assume_gpu(trace, fabric_of(node.tables), Variation())
    rates = {rate.gpus: rate.gb_per_s for rate in node.rates}
    if gpus not in rates:
        raise ValueError(f"nodes.{node.name}.rates: expected a rate for {gpus} GPUs, got {list(rates)}")
    level = Level(
        name=node.name,
        latency_ns=round(inputs.hop_us.value * 1000),
        bytes_per_s=rates[gpus] * inputs.link_efficiency.value * 1e9,
    )
    return assume_gpu(trace, Fabric(topology=Topology(levels=(level,)), algorithm="ring"), Variation())
