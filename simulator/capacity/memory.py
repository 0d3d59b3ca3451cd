"""Memory: whether training fits on a GPU: bytes by what holds them, what the GPU then has in use, its capacity."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Literal, get_args

from ...reference.trace import StepMemory, Trace
from ..catalogue import RESCALED_FROM, entry_of, read_catalogue
from ..schedule.policy import Policy
from ..workload.compute_times import largest_shard

Optimizer = Literal["sgd", "momentum", "adam", "adam-fp32"]
OPTIMIZERS: tuple[Optimizer, ...] = get_args(Optimizer)
STATES: dict[Optimizer, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adam-fp32": 3}
"""Tensors that an optimiser keeps for each parameter, in the parameter's element type; with adam-fp32 they are two
averages and a copy of the parameter, in float32."""
TEMPORARIES: dict[Optimizer, int] = {"sgd": 0, "momentum": 0, "adam": 1, "adam-fp32": 1}
"""Tensors that the step of torch's optimiser makes for each parameter at a time: AdamW's peak on one H100 was exactly
that (validation/gpu, memory)."""
GIB = 2**30
WORKSPACE_BYTES = 68_000_000
"""What the libraries of matrix products keep on a Hopper GPU."""
USABLE = 0.985
"""Part of a GPU's nominal memory, in GiB, that its driver offers: 0.990 on an H100 of 80, 0.992 on an H200 of 141."""
COUNT_ERROR = 0.03
"""Relative error of the counted peak: the largest of 16 steps of four models on one H100 was 2.1 %."""
FRAGMENTS = 0.83, 1.25
"""Memory that torch's allocator had reserved at the peak, as multiples of what tensors needed: 1.01 to 1.25 in 48
runs on an H100. Fused kernels keep fewer tensors than the plain operations that are counted: a U-Net of MLPerf
Training v5.0 in 16 bits 10 to 18 % less."""
MOST_SAMPLES = 2**24
"""Largest batch that is tried."""
CONTEXT_BYTES = 800_000_000, 1_600_000_000
"""CUDA's context and libraries: without NCCL, and with it (1.4 GB), in the same runs; and whole blocks that small
jobs keep, as ViT-L/16 with a batch of 4 (rasbt/pytorch-memory-optim@f6eddcd2)."""


@dataclass(frozen=True)
class MemoryUse:
    """What training holds on each GPU."""

    parts: dict[str, int | None]
    """Bytes by what holds them; None: not known. `peak_bytes` is not their sum: peaks do not coincide."""
    peak_bytes: int | None  #: most bytes of tensors at one time; None: activations are not known
    band_bytes: tuple[int, int | None]
    """What the GPU has in use at the peak, at least and at most, with fragments and CUDA's context. The upper end is
    None if activations are not known."""
    capacity_bytes: int | None  #: what the GPU offers; None: not known
    largest_batch: int | None
    """The largest batch per GPU that certainly fits. None: not known; 0: not even one sample does."""
    on_gpu: bool  #: whether training is on a GPU; the memory of a processor is not known, and not asked for
    has_run: bool
    """Whether training with this batch, buckets and at least this optimiser's states was recorded on such a GPU."""

    @property
    def answer(self) -> Literal["fits", "does not fit", "unknown"]:
        """Whether training fits on the GPU."""
        low, high = self.band_bytes
        if self.has_run:
            return "fits"
        if self.capacity_bytes is None:
            return "unknown"
        if low > self.capacity_bytes:
            return "does not fit"
        return "fits" if high is not None and high <= self.capacity_bytes else "unknown"


def optimizers_of(trace: Trace, known: Optimizer | None) -> list[Optimizer]:
    """Return the optimiser, or those that may be used, the one with the fewest states first.

    Only parameters of less than float32 have states in float32.
    """
    if known is not None:
        return [known]
    is_low = any(one.dtype in ("float16", "bfloat16") for one in trace.workload.parameters)
    return [name for name in OPTIMIZERS if is_low or name in ("sgd", "adam")]


def memory_use(trace: Trace, policy: Policy, optimizer: Optimizer, world_size: int = 1) -> MemoryUse:
    """Return what data-parallel training of the trace's model holds on each of `world_size` GPUs.

    With the policy's `zero`, it is what the GPU with the largest shard of the optimiser holds. Gradients are set to
    None between steps. They take no memory beside the buckets if they are views of them (`gradient_as_bucket_view`).
    """
    workload = trace.workload
    memory, capacity = workload.memory, capacity_bytes(workload.device_name)
    elements, size = [prod(one.shape) for one in workload.parameters], sum(trace.sizes_bytes)
    own = largest_shard(elements, policy.shards_on(world_size))
    buffers = sum(one.size_bytes for one in workload.buffers)
    states = round(own * (STATES[optimizer] * (4 * sum(elements) if optimizer == "adam-fp32" else size)))
    kept = size + buffers + states + WORKSPACE_BYTES
    step = round(own * TEMPORARIES[optimizer] * size)

    def peak_with(memory: StepMemory) -> int:
        """Return most bytes of tensors at one time: in forward and backward, or in the step of the optimiser."""
        most = max(memory.peak_with_gradients_bytes, size + step)
        if policy.gradient_as_bucket_view:
            most = max(memory.peak_bytes, step)
        return kept + size + memory.frozen_bytes + memory.batch_bytes + most  # the buckets exist all the time

    peak = None if memory is None else peak_with(memory)
    largest = None
    if memory is not None and capacity is not None and workload.batch is not None:
        batches = range(1, MOST_SAMPLES + 1)
        largest = bisect_right(batches, capacity, key=lambda batch: _band(peak_with(memory.with_batch(batch)))[1])
    low, high = _band(kept if peak is None else peak)
    parts = {
        "parameters": size,
        "frozen parameters": None if memory is None else memory.frozen_bytes,
        "buffers": buffers,
        "gradients": 0 if policy.gradient_as_bucket_view else size,
        "buckets": size,
        "optimizer": states,
    }
    least = sum(part or 0 for part in parts.values()) + CONTEXT_BYTES[0]  # in a step of the optimiser, fused or not
    return MemoryUse(
        parts=parts | {"activations": None if memory is None else memory.kept_bytes},
        peak_bytes=peak,
        band_bytes=(max(low, least), None if peak is None else high),
        capacity_bytes=capacity,
        largest_batch=largest,
        on_gpu=workload.device != "cpu",
        has_run=workload.device != "cpu" and workload.source != "module" and STATES[optimizer] == 0,
    )


def remedies(trace: Trace, policy: Policy, optimizers: Sequence[Optimizer], world_size: int) -> list[str]:
    """Return what would certainly fit with each of these optimisers where training does not, in words."""
    uses = [memory_use(trace, policy, one, world_size) for one in optimizers]
    largest = min(use.largest_batch or 0 for use in uses)
    found = [f"a batch of {largest:,} per GPU"] if largest else []
    if policy.zero is None:
        zero = policy.model_copy(update={"zero": "parameters"})
        sharded = (memory_use(trace, zero, one, world_size) for one in optimizers)
        found += ["ZeRO-1 (--set zero=parameters)"] if all(use.answer == "fits" for use in sharded) else []
    most = max(use.band_bytes[1] or inf for use in uses)
    listed = ((capacity_bytes(one.product) or 0, name) for name, one in read_catalogue().devices.items() if one.peaks)
    if enough := [(size, name) for size, name in listed if size >= most]:
        found.append(f"a GPU with {most / 1e9:.0f} GB, such as {min(enough)[1]}")
    if not found:
        states = sum(size or 0 for name, size in uses[0].parts.items() if name != "activations")
        in_shards = states > (uses[0].capacity_bytes or 0)
        found.append("only shards of the parameters (FSDP)" if in_shards else "only smaller inputs, or checkpointing")
    return found


def capacity_bytes(device_name: str) -> int | None:
    """Return what a GPU of this name offers: by the number in its name or, without one, by the catalogue."""
    in_name = re.findall(r"(\d+) ?GB\b", device_name.partition(RESCALED_FROM)[0], re.IGNORECASE)
    entry = entry_of(device_name)
    gib = float(in_name[-1]) if in_name else entry.memory.gib if entry is not None else None  # last: a MIG slice's
    return None if gib is None else int(USABLE * gib * GIB)


def _band(peak_bytes: int) -> tuple[int, int]:
    """Return what the GPU has in use, at least and at most, when tensors hold `peak_bytes`."""
    low, high = (
        round(peak_bytes * (1 + sign * COUNT_ERROR) * fragments) + context
        for sign, fragments, context in zip((-1, 1), FRAGMENTS, CONTEXT_BYTES, strict=True)
    )
    return low, high
