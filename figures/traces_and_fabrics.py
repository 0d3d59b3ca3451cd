"""The traces and fabrics of the simulated figures, with their sources.

The figures follow Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020
(arXiv 2006.15704), with 8 V100s and one 100 Gbit/s adapter in each node (section 5).
"""

from functools import cache

from ddplab import Fabric, Topology, Trace
from ddplab.simulator.fabric import Level, Processor
from validation.ready_times import read_gradients, trace_of

from .drawing import DATA

SLOWED = Processor(slow_down=1.189)
"""Computation beside a collective takes 18.9 % longer on average (arXiv 2507.03114, abstract)."""
RESNET_ITERATION_NS = 95_600_000
"""Duration of the recorded iterations of ResNet-50 on a V100, batch 32."""


@cache
def resnet50() -> Trace:
    """ResNet-50 on a V100 under DDP, three iterations, from the test data of HolisticTraceAnalysis."""
    return trace_of(read_gradients("resnet50_v100.csv"), RESNET_ITERATION_NS)


@cache
def bert() -> Trace:
    """BERT-Large, batch 8, 128 tokens, synthesised at a V100's peak rates by `python -m figures.measure bert`."""
    return Trace.load(DATA / "bert_large.json.gz")


MODELS = {"ResNet-50": resnet50, "BERT-Large": bert}


@cache
def nccl() -> Fabric:
    """The cluster of the paper, from its description."""
    links = Topology(
        levels=(
            Level(name="nvlink", members=8, latency_ns=3_400, bytes_per_s=134.5e9),
            Level(name="nic", latency_ns=9_600, bytes_per_s=12.5e9),
        ),
        source="latencies: NVIDIA/nccl 2.8, src/graph/tuning.cc; NVLink: bus bandwidth of 8 V100s in vTrain's table; "
        "adapter: 100 Gbit/s a node",
    )
    return Fabric.from_topology(links, algorithm="cheapest").model_copy(update={"processor": SLOWED})


@cache
def gloo() -> Fabric:
    """A ring with the latency and rate of Gloo on two ranks, from our calibration over links of 10 Gbit/s.

    Two collectives run at a time. An all-reduce of two ranks takes two steps, each with half of the message.
    """
    calibrated = Fabric.load(DATA / "gloo_10gbit_2ranks.json")
    timings = sorted(calibrated.all_reduce, key=lambda timing: timing.size_bytes)
    smallest, largest = timings[0], timings[-1]
    ring = Fabric.from_alpha_beta(smallest.ns // 2, largest.size_bytes / largest.ns * 1e9, concurrency=2)
    return ring.model_copy(update={"processor": SLOWED})


FABRICS = {"NCCL-like": nccl, "Gloo-like": gloo}
