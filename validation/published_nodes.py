"""Inputs of parts (d) and (e): traces of published models, and fabrics of published nodes of GPUs.

The trace of a model follows from its operations and its GPU's data sheet, scaled to the measured iteration on one
GPU. On several GPUs, gradients are copied into buckets and out at the rate of the GPU's memory, collectives slow
computation down, and all GPUs wait for the slowest.
"""

from functools import cache

from ddplab.operation_counter import measure_operations
from reference.trace import Trace
from simulator import Fabric, Straggler
from simulator.fabric import Contention, Level, Linear, Processor, Topology
from simulator.workload.roofline import Device
from simulator.workload.trace_synthesis import synthesize

from .cases import Node, NodeInputs
from .part_a_all_reduces import fabric_of
from .part_b_iterations import expected_slowest

operations_of = cache(measure_operations)
"""Operations of a model by its `--model` name; each is counted once."""


def device_of(node: Node, tflops: float) -> Device:
    """Return the data sheet of a node's GPU, with its peak rate in the precision used."""
    return Device(
        name=node.name, flops_per_s=tflops * 1e12, bytes_per_s=node.memory_gb_per_s * 1e9, source=node.source
    )


def trace_of_model(model: str, device: Device, compute_ns: float, optimizer_ns: float | None = None) -> Trace:
    """Make a trace of an iteration without communication.

    Args:
        model: As for `--model`.
        device: The GPU's data sheet.
        compute_ns: Nanoseconds of the iteration.
        optimizer_ns: Part of it after the backward pass. None: a step of SGD at the rate of the GPU's memory.
    """
    optimizer = None if optimizer_ns is None else round(optimizer_ns)
    return synthesize(operations_of(model), device, step_ns=round(compute_ns), optimizer_ns=optimizer)


def fabric_of_node(node: Node, inputs: NodeInputs, gpus: int) -> Fabric:
    """Make the fabric of `gpus` GPUs of a node: measured all-reduces, or a ring at the rate of the data sheet.

    Raises:
        ValueError: The node has neither a table nor a rate for this number of GPUs.
    """
    if node.tables:
        fabric = fabric_of(node.tables)
    else:
        rates = {rate.gpus: rate.gb_per_s for rate in node.rates}
        if gpus not in rates:
            raise ValueError(f"nodes.{node.name}.rates: expected a rate for {gpus} GPUs, got {list(rates)}")
        level = Level(
            name=node.name,
            latency_ns=round(inputs.hop_us.value * 1000),
            bytes_per_s=rates[gpus] * inputs.link_efficiency.value * 1e9,
        )
        fabric = Fabric(topology=Topology(levels=(level,)), algorithm="ring")
    return fabric.model_copy(update={"processor": _processor(node, inputs)})


def _processor(node: Node, inputs: NodeInputs) -> Processor:
    # A copy reads and writes every byte; half of the fixed time is that of the copy in, half that of the copy out.
    copy = Linear(fixed_ns=inputs.copy_us.value * 500, ns_per_byte=2 / node.memory_gb_per_s)
    slowed = Contention(compute=inputs.compute_slowdown.value)
    return Processor(pack=copy, copy_out=copy, contention=(slowed,))


def slowest_of(gpus: int, inputs: NodeInputs) -> Straggler:
    """Return the expected slow-down of the slowest of `gpus` equal GPUs, as a straggler."""
    return Straggler(rank=0, factor=1 + inputs.gpu_spread.value * expected_slowest(gpus))
