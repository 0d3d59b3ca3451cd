"""The demo: in virtual time, the real reducer takes the predicted time to the nanosecond."""

from pathlib import Path
from typing import Any

from .emulation.emulate import emulate
from .reference.bucketing import cap_name
from .reference.trace import Trace
from .simulator.baseline_predictions import baselines_ns
from .simulator.fabric import Fabric, Level, Topology
from .simulator.prediction import predict
from .simulator.schedule.policy import Policy

TRACE = Path(__file__).with_name("resnet50_v100.json.gz")
"""Three iterations of ResNet-50 on one V100, batch 32, from the test data of HolisticTraceAnalysis."""
NETWORK = Topology(levels=(Level(name="ethernet", latency_ns=20_000, bytes_per_s=1.25e9),))
RANKS = 8
POLICIES = (
    *(Policy(bucket_cap_mb=cap) for cap in (1.0, 5.0, 25.0)),
    Policy(bucket_cap_mb=25.0, order="forward"),
    Policy(bucket_cap_mb=float("inf")),
)
SHOWN_IN_PERFETTO = POLICIES[2]


def demo(out: Path) -> list[dict[str, Any]]:
    """Run ddplab's reducer on emulated V100s with each policy, and predict its time and that of the baselines.

    The folder `out` gets `perfetto.json`, the timeline with the default cap. Returns a row for each policy; times are
    in nanoseconds.
    """
    trace, fabric = Trace.load(TRACE), Fabric.from_topology(NETWORK)
    rows = []
    for policy in POLICIES:
        how: dict[str, Any] = {"world_size": RANKS, "policy": policy}
        emulated = emulate(trace, fabric, assume=False, **how)
        if policy is SHOWN_IN_PERFETTO:
            emulated.save_perfetto(out / "perfetto.json")
        predicted_ns = predict(trace, fabric, assume=False, **how).iteration_ns
        times = {"reducer_ns": emulated.iteration_ns, "predicted_ns": predicted_ns}
        simpler = {"baselines_ns": baselines_ns(trace, fabric, **how)}
        rows.append({"cap": cap_name(policy.bucket_cap_mb or 25), "order": policy.order, **times, **simpler})
    return rows
