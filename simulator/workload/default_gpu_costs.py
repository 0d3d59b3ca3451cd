"""Default costs of data parallelism on GPUs, for predictions without a calibration.

Copies into buckets and out of them run at the rate of the GPU's memory, a launch delays the computation, computation
is slower beside collectives, and GPUs of one model differ in speed. The figures come from published measurements and
profiles. They are rough: a calibration or a profile of the machine in question replaces them.
"""

import re
from typing import NamedTuple

from reference.trace import Trace

from ..fabric import Contention, Fabric, Linear, Processor
from .compute_times import Variation
from .trace_synthesis import BY_ROOFLINE

COPY_START_NS = 2_100
"""Fixed time of a copy of one gradient into its bucket, or out of it. A profile of DDP with ResNet-50 on 2 A100s
(HolisticTraceAnalysis, tests/data/nccl_parser_config): 0.94 ms an iteration for 161 gradients in both directions, of
which 0.26 ms at the rate of the memory."""
LAUNCH_NS = 11_000
"""Time that one more bucket adds to the computation. DDP on one V100 (pytorch/pytorch, benchmarks/distributed/ddp):
with buckets of 1 MB instead of 25 MB, an iteration of ResNet-50 has 30 buckets more and takes 0.32 ms longer, one of
ResNet-101 has 78 more and takes 0.93 ms longer."""
SLOW_DOWN = 1.189
"""Time of computation beside collectives as a multiple of the time alone: the average on A100, H100, MI210 and MI250
(arXiv 2507.03114, abstract)."""
DEVICE_SPREAD = 0.0148
"""Standard deviation of the speeds of GPUs of one model: 8 % from whisker to whisker of a box plot, which are 5.4
standard deviations (arXiv 2208.11035, abstract)."""


MEMORY_BYTES_PER_S = {
    r"g?b[23]00": 8.0e12,
    r"gh200": 4.0e12,
    r"h200": 4.8e12,
    r"h100": 3.35e12,
    r"a100\b.*\b80 ?gb": 2.039e12,
    r"a100": 1.555e12,
    r"v100": 0.9e12,
    r"l40s?": 0.864e12,
    r"l4": 0.3e12,
    r"a10g?": 0.6e12,
    r"t4": 0.32e12,
    r"rtx 4090": 1.008e12,
    r"rtx 3090": 0.936e12,
    r"mi35[05]x?": 8.0e12,
    r"mi325x?": 6.0e12,
    r"mi300[ax]?": 5.3e12,
    r"mi250x?": 3.2e12,
    r"mi210": 1.6e12,
}
"""Memory bandwidth in bytes per second, from the vendors' data sheets, by a pattern that matches whole words of a
GPU's name in lower case; the first that matches counts."""


def memory_of(device_name: str) -> float | None:
    """Return the memory bandwidth of the GPU that a trace's `device_name` names; None if it names no known GPU."""
    name = device_name.lower()
    return next((rate for words, rate in MEMORY_BYTES_PER_S.items() if re.search(rf"\b(?:{words})\b", name)), None)


def default_processor(bytes_per_s: float) -> Processor:
    """Return the default costs on a GPU with this memory bandwidth. A copy reads and writes every byte once."""
    copy = Linear(fixed_ns=COPY_START_NS, ns_per_byte=2e9 / bytes_per_s)
    return Processor(pack=copy, copy_out=copy, launch_ns=LAUNCH_NS, contention=(Contention(compute=SLOW_DOWN),))


class Assumed(NamedTuple):
    """What a prediction assumes about the GPU of a trace."""

    fabric: Fabric  # with the default costs of the GPU, if it had none
    variation: Variation  # with the usual spread of GPUs, if it was not chosen
    sentences: tuple[str, ...]  # what was assumed, for the user


def assume_gpu(trace: Trace, fabric: Fabric, variation: Variation, *, keep_processor: bool = False) -> Assumed:
    """Complete what a prediction for GPUs needs; nothing changes if the trace names no known GPU.

    Args:
        trace: The trace, whose workload names its device.
        fabric: The network. If it has processor costs, they stay as they are.
        variation: How iterations vary. If `device_spread` was set, it stays as it is.
        keep_processor: Whether costs of zero are meant.
    """
    device = trace.workload.device_name
    memory = memory_of(device)
    if memory is None:
        return Assumed(fabric, variation, ())
    sentences = []
    if not keep_processor and fabric.processor == Processor(hooks=fabric.processor.hooks):
        processor = default_processor(memory).model_copy(update={"hooks": fabric.processor.hooks})
        fabric = fabric.model_copy(update={"processor": processor})
        sentences.append(
            "assumed, because the fabric has no processor costs: copying a gradient takes "
            f"{COPY_START_NS / 1e3:g} us and its time at {memory / 1e9:.0f} GB/s, a bucket "
            f"{LAUNCH_NS / 1e3:.0f} us, and computation beside collectives {SLOW_DOWN - 1:.0%} longer"
        )
    if "device_spread" not in variation.model_fields_set:
        variation = variation.model_copy(update={"device_spread": DEVICE_SPREAD})
        sentences.append(
            f"assumed: GPUs of one model differ in speed by {DEVICE_SPREAD:.1%} (standard deviation), and an "
            "iteration waits for the slowest"
        )
    if device.endswith(BY_ROOFLINE):
        sentences.append(
            "the step time is that of a data sheet's peak rates, which no GPU reaches; in a longer step, "
            "communication is a smaller part"
        )
    return Assumed(fabric, variation, tuple(sentences))
