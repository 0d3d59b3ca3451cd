"""Inputs of predictions: what the user gave, completed by the usual costs of data parallelism on a GPU.

Copies into buckets and out of them run at the rate of the GPU's memory, a launch delays the computation, computation
is slower beside collectives, and GPUs of one model differ in speed. The figures come from published measurements and
profiles. They are rough: a calibration or a profile of the machine in question replaces them. So do the costs that
the catalogue has of a GPU on which they were measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..reference.trace import Trace
from .catalogue import entry_of
from .fabric import Fabric, Linear, Processor
from .fabric.algorithms import sent_share
from .fabric.extrapolation import USUAL_NODE
from .fabric.fabric import LARGE_MESSAGE
from .schedule.policy import Policy
from .workload.compute_times import LEAST_RECORDED
from .workload.roofline import EAGER_PACE_NS
from .workload.variation import RECORDED, Straggler, Variation

COPY_START_NS = 2_100
"""Fixed time of a copy of one gradient into its bucket, or out of it. A profile of DDP with ResNet-50 on 2 A100s
(HolisticTraceAnalysis, tests/data/nccl_parser_config): 0.94 ms an iteration for 161 gradients in both directions, of
which 0.26 ms at the rate of the memory."""
LAUNCH_NS = 11_000
"""Time that one more bucket adds to the computation. DDP on one V100 (pytorch/pytorch, benchmarks/distributed/ddp):
with buckets of 1 MB instead of 25 MB, an iteration of ResNet-50 has 30 buckets more and takes 0.32 ms longer, one of
ResNet-101 has 78 more and takes 0.93 ms longer."""
STALL_NS = 20_000
"""Computation that one more bucket holds up, for each doubling of the GPUs. In the same benchmark, further buckets of
1 MB cost 26 to 34 us each on 2 V100s, 39 to 45 us on 4, 39 to 70 us on 8 and 83 to 131 us on 16, beyond
`LAUNCH_NS`: the blocks of a collective occupy every GPU until the last rank's have started."""
SLOW_DOWN, SLOW_DOWN_ERROR = 1.189, 0.1
"""Time of computation beside collectives as a multiple of the time alone: the average on A100, H100, MI210 and MI250
(arXiv 2507.03114, abstract), and half of the band of single models."""
PCIE_BYTES_PER_S, PCIE_SLOW_DOWN_ERROR = 32e9, 3.2
"""Rate of PCIe 4.0 with 16 lanes. GPUs that reach less in all-reduces of their own node send through the memory of
the host, for which no published slow-down was found. On two (damek's solution of CS336), iterations took a quarter
longer than predicted with `SLOW_DOWN`, as if computation took five times as long beside collectives."""
COPY_ERROR, LAUNCH_ERROR = 4.0, 1.0
"""Relative errors of copies and of launches. DDP on one V100 with torch 1.4 (as above) takes 18 us a gradient
(ResNet-50) and 28 us (ResNet-101) beyond the rate of the memory, instead of 4.2 us."""
UNEXPLAINED = 0.01
"""Relative error of iterations on 2 GPUs that is left, from part (i) of the score, each system by the others'."""
UNKNOWN_MEMORY_BYTES_PER_S, UNKNOWN_ERRORS = 1e12, 2.0
"""Memory bandwidth of a GPU that the catalogue does not have, about the middle of those that it has, and the multiple
of all errors above for such a GPU."""
DEVICE_SPREAD = 0.0148
"""Standard deviation of the speeds of GPUs of one model: 8 % from whisker to whisker of a box plot, which are 5.4
standard deviations (arXiv 2208.11035, abstract). Clusters whose GPUs differ by 0.7 %, and by 3 %, are usual."""
JITTER = 0.007
"""Standard deviation of the iterations of one GPU, for traces with few iterations: 0.1 to 0.4 % with synthetic data
(willgpaik/pytorch-ddp-scaling-benchmark), 0.9 to 2.8 % in training (ByteDance-Seed/StragglerAnalysis)."""
LONG, NOT_IN_RANGES = 1.2, "not in the ranges"
"""Multiple of the median beyond which an iteration is none of those that `JITTER` describes, and the beginning of a
sentence on what may change a prediction by more than its interval holds."""


def memory_of(device_name: str) -> float | None:
    """Return the memory bandwidth of the GPU of this name, for traces without the field; None: not a known GPU."""
    entry = entry_of(device_name)
    return None if entry is None else 1e9 * entry.memory.gb_per_s


def default_processor(bytes_per_s: float, measured: Processor | None = None) -> Processor:
    """Return the default costs on a GPU with this memory bandwidth. A copy reads and writes every byte once.

    Fields of `measured` that are set take the place of the defaults.
    """
    copy = Linear(fixed_ns=COPY_START_NS, ns_per_byte=2e9 / bytes_per_s)
    default = Processor(
        pack=copy,
        copy_out=copy,
        copy_error=COPY_ERROR,
        launch_ns=LAUNCH_NS,
        stall_ns=STALL_NS,
        launch_error=LAUNCH_ERROR,
        slow_down=SLOW_DOWN,
        slow_down_error=SLOW_DOWN_ERROR,
        unexplained=UNEXPLAINED,
    )
    fields = () if measured is None else measured.model_fields_set
    return default.model_copy(update={name: getattr(measured, name) for name in fields})


GRAPH_LAUNCH_NS = 1_252
"""What a launch costs if it does not wait for the host: one H200 behind its host (validation/gpu)."""


class Assumed(NamedTuple):
    """What a prediction assumes about the GPU of a trace."""

    fabric: Fabric  #: with the default costs of the GPU, if it had none
    variation: Variation  #: with the usual spread of GPUs, if it was not chosen
    sentences: tuple[str, ...]  #: what was assumed, for the user


def assume_gpu(trace: Trace, fabric: Fabric, variation: Variation = RECORDED, *, cuda_graph: bool = False) -> Assumed:
    """Complete what a prediction for GPUs needs; nothing changes if the trace is not of a GPU.

    Args:
        trace: The trace, whose workload has the bandwidth of the GPU's memory, or at least names the GPU.
        fabric: The network. If its processor costs were set, even to zero, they stay as they are. If they are those
            of hooks alone, the others are added.
        variation: How iterations vary. If `device_spread` was set, it stays as it is.
        cuda_graph: Whether iterations are replayed from a CUDA graph, see `complete`; the sentences have no jitter.
    """
    workload, entry = trace.workload, entry_of(trace.workload.device_name)
    memory = workload.memory_bytes_per_s or memory_of(workload.device_name)
    if memory is None and workload.device != "cuda":
        return Assumed(fabric, variation, ())
    recorded_ns = [one.duration_ns for rank in trace.ranks for one in rank.iterations]
    sentences = []
    hooks = fabric.processor.hooks
    if fabric.processor == Processor(hooks=hooks) and (hooks or "processor" not in fabric.model_fields_set):
        measured = None if entry is None or entry.costs is None else entry.costs.processor
        processor = default_processor(memory or UNKNOWN_MEMORY_BYTES_PER_S, measured)
        if memory is None:
            errors = ("copy_error", "launch_error", "slow_down_error", "unexplained")
            larger = {name: UNKNOWN_ERRORS * getattr(processor, name) for name in errors}
            processor = processor.model_copy(update=larger)
            sentences.append(
                f"the GPU of the trace ({workload.device_name}) is none that `ddplab show` lists, so errors count "
                f"{UNKNOWN_ERRORS:g} times; name one with `ddplab plan --device`"
            )
        if _sends_through_the_host(fabric) and (measured is None or "slow_down" not in measured.model_fields_set):
            processor = processor.model_copy(update={"slow_down_error": PCIE_SLOW_DOWN_ERROR})
            slow = "computation beside collectives may take up to 5 times as long; run `ddplab calibrate` on them"
            sentences.append(f"the GPUs of a node reach less than PCIe's rate, so {slow}")
        fabric = fabric.with_processor(**dict(processor) | {"hooks": hooks or processor.hooks})
        if cuda_graph:
            fabric = fabric.with_processor(launch_ns=min(processor.launch_ns, GRAPH_LAUNCH_NS))
        sentences.append(costs_sentence(trace, fabric.processor))
    if "device_spread" not in variation.model_fields_set:
        changes: dict[str, object] = {"device_spread": DEVICE_SPREAD}
        if not (given := variation).model_fields_set:
            changes["kind"] = "slowest"
            if cuda_graph:
                changes["jitter"] = 0.0
            elif len(recorded_ns) < LEAST_RECORDED:
                changes["jitter"] = JITTER
                if (times := max(recorded_ns) / max(1, np.median(recorded_ns))) > LONG:
                    sentences.append(
                        f"{NOT_IN_RANGES}: the longest of {len(recorded_ns)} recorded iterations takes {times:.3g} "
                        f"times their median, which alone is predicted; record {LEAST_RECORDED} after the warm-up"
                    )
        variation = variation.model_copy(update=changes)
        sentences.append(spread_sentence(given, variation))
    if workload.compute_bounds != (1.0, 1.0):
        low, high = workload.compute_bounds
        why = workload.doubt or f"not all were measured: a host launches a kernel every {EAGER_PACE_NS / 1e3:.0f} us"
        sentences.append(
            f"nine in ten true compute times are {low:.2g} to {high:.2g} times as long, and in a longer step "
            f"communication is a smaller part; {why}"
        )
    return Assumed(fabric, variation, tuple(sentences))


def costs_sentence(trace: Trace, costs: Processor) -> str:
    """Say which usual costs are assumed on the GPU of a trace; "" if all are zero, as after leaving them out."""
    entry, pack = entry_of(trace.workload.device_name), costs.pack
    with_buckets = trace.workload.source != "module" and trace.ranks[0].iterations[0].buckets  # and with copies
    copying = f"copying a gradient takes {pack.fixed_ns / 1e3:g} us and its time at"
    parts = [f"{copying} {2 / pack.ns_per_byte:.0f} GB/s"] if pack.ns_per_byte and not with_buckets else []
    bucket = [f"{costs.launch_ns / 1e3:.0f} us"] if costs.launch_ns else []
    bucket += [f"{costs.stall_ns / 1e3:.0f} us more for each doubling of the GPUs"] if costs.stall_ns else []
    more = "more than in the trace " * bool(with_buckets)
    parts += [f"a bucket {more}takes {' and '.join(bucket)}"] if bucket else []
    parts += [f"computation beside collectives takes {costs.slow_down - 1:.0%} longer"] if costs.slow_down > 1 else []
    parts[1:] = [part.replace(" takes", "", 1) for part in parts[1:]]
    listed = ", and ".join([", ".join(parts[:-1]), *parts[-1:]] if len(parts) > 1 else parts)
    where = "" if entry is None or entry.costs is None else f" as measured on one {entry.product}"
    return f"assumed{where}, because the fabric has no processor costs: {listed}" if parts else ""


def spread_sentence(given: Variation, variation: Variation) -> str:
    """Say what was assumed of GPUs and their iterations beyond what the user gave; "" if nothing, or all is zero."""
    spread = variation.device_spread
    parts = [f"GPUs of one model differ in speed by {spread:.1%} (standard deviation)"] if spread else []
    if not given.model_fields_set and variation.jitter != 0:
        how = "as in the trace" if variation.jitter is None else f"by {variation.jitter:.1%}"
        parts.append(f"the iterations of one GPU {how if parts else f'differ {how}'}")
    return f"assumed: {', '.join(parts)}, and an iteration waits for the slowest" if parts else ""


def _sends_through_the_host(fabric: Fabric) -> bool:
    """Return whether large all-reduces on the GPUs of one node are slower than PCIe."""
    if fabric.topology is not None:
        node = fabric.topology.levels[0]
        return (node.members or np.inf) <= USUAL_NODE and node.bytes_per_s < PCIE_BYTES_PER_S
    ranks = min(fabric.world_sizes, default=1)
    if fabric.library != "nccl" or not 1 < ranks <= USUAL_NODE:
        return False
    largest = max(row.size_bytes for row in fabric.all_reduce if row.world_size == ranks)
    (ns,) = fabric.all_reduce_costs_ns(np.array([largest]), ranks)
    return bool(largest >= LARGE_MESSAGE and 0 < 1e9 * sent_share(ranks) * largest < PCIE_BYTES_PER_S * ns)


class Inputs(NamedTuple):
    """What a prediction computes from; nothing is missing."""

    trace: Trace  #: recorded or synthesised iterations of one rank or several
    fabric: Fabric  #: costs of collectives, and processor costs
    policy: Policy  #: settings of the reducer and how the training script uses it
    variation: Variation  #: how the simulated iterations are generated from the recorded ones
    stragglers: tuple[Straggler, ...]  #: slow ranks
    batches: Sequence[int] | None
    """Number of batches of each rank under Join. None: every rank has a batch in every iteration."""
    measured: Mapping[int, int] | None  #: measured median iteration times, in nanoseconds by number of ranks
    measured_policy: Policy  #: settings of the measured runs, which had no stragglers
    assumed: tuple[str, ...]  #: what was assumed about the GPU; one sentence each
    given: tuple[Fabric, Variation]  #: fabric and variation as the user gave them

    def with_policy(self, **changed: object) -> "Inputs":
        """Return a copy with these settings changed."""
        return self._replace(policy=self.policy.model_copy(update=changed))

    def with_processor(self, **changed: object) -> "Inputs":
        """Return a copy with these processor costs changed."""
        return self._replace(fabric=self.fabric.with_processor(**changed))

    def with_variation(self, **changed: object) -> "Inputs":
        """Return a copy with these fields of the variation changed."""
        return self._replace(variation=self.variation.model_copy(update=changed))


def complete(
    trace: Trace,
    fabric: Fabric,
    *,
    policy: Policy | None = None,
    variation: Variation = RECORDED,
    stragglers: Sequence[Straggler] = (),
    inputs: Sequence[int] | None = None,
    measured: Mapping[int, int] | None = None,
    assume: bool = True,
    settings: Mapping[str, Any] | None = None,
) -> Inputs:
    """Return what a prediction computes from; the arguments are those of `predict`.

    If iterations are replayed from a CUDA graph, there is no host: launches are short, and there is no jitter. Nor is
    there any in a trace of one iteration, unless it is assumed.

    Raises:
        ValueError: See `Policy.given`; or there are measured times under Join.
        TypeError: A setting is not a field of `Policy`.
    """
    if inputs is not None and measured:
        raise ValueError("measured: expected none with inputs, because an epoch of Join has no steady iteration")
    policy = Policy.given(policy, settings or {}, joins=inputs is not None)
    given = fabric, variation
    assumed: tuple[str, ...] = ()
    if assume:
        fabric, variation, assumed = assume_gpu(trace, fabric, variation, cuda_graph=policy.cuda_graph)
    sparse = next((one.name for one in trace.workload.parameters if one.sparse), None)
    if sparse is not None and "sparse_density" not in policy.model_fields_set:
        rows = "with all rows; give the part of them that a batch touches, such as --set sparse_density=0.01"
        assumed = (*assumed, f"{NOT_IN_RANGES}: sparse gradients, such as that of {sparse}, are sent {rows}")
    if policy.cuda_graph:
        fabric = fabric.with_processor(launch_ns=min(fabric.processor.launch_ns, GRAPH_LAUNCH_NS))
        variation = variation.model_copy(update={"jitter": 0.0})
    if assume and variation.jitter is None and all(len(rank.iterations) == 1 for rank in trace.ranks):
        variation = variation.model_copy(update={"jitter": 0.0})
        assumed = (*assumed, "the trace has one iteration, so how iterations vary counts as zero; record more")
    return Inputs(trace, fabric, policy, variation, tuple(stragglers), inputs, measured, policy, assumed, given)
