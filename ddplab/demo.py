"""The demo: in virtual time, the real reducer takes the predicted time to the nanosecond."""

from pathlib import Path
from typing import Any

from .emulation.emulate import emulate
from .reference.bucketing import cap_name
from .reference.trace import Trace
from .simulator.baseline_predictions import baselines_ns
from .simulator.fabric import Fabric, Processor
from .simulator.prediction import predict
from .simulator.schedule.policy import Policy

# The running example of demo, ladder, cheat sheet, page and README's picture; in words, `EXAMPLE`

TRACE = Path(__file__).with_name("resnet50_v100.json.gz")
"""Three iterations of ResNet-50 on one V100, batch 32, from the test data of HolisticTraceAnalysis."""
RANKS, GBIT_PER_S, HOP_NS = 8, 10, 20_000
EXAMPLE = f"ResNet-50 on {RANKS} V100s over {GBIT_PER_S} Gbit/s"
FABRIC = Fabric.from_alpha_beta(
    HOP_NS, GBIT_PER_S * 1e9 / 8, source=f"a ring of {GBIT_PER_S} Gbit/s, {HOP_NS // 1000} us a hop, copies for free"
).model_copy(update={"processor": Processor()})
POLICIES = (
    *(Policy(bucket_cap_mb=cap) for cap in (0.0, 5.0, 25.0, None)),
    Policy(order="forward"),
    Policy(bucket_cap_mb=float("inf")),
)
SHOWN_IN_PERFETTO = POLICIES[3]


def demo(out: Path) -> list[dict[str, Any]]:
    """Run ddplab's reducer on emulated V100s with each policy, and predict its time and that of the baselines.

    The folder `out` gets trace and fabric, for `ddplab predict`, and `perfetto.json`, the timeline with the default
    cap. Returns a row for each policy; times are in nanoseconds.
    """
    trace, fabric = Trace.load(TRACE), FABRIC
    trace.save(out / "trace.json.gz")
    fabric.save(out / "fabric.json")
    rows = []
    for policy in POLICIES:
        how: dict[str, Any] = {"world_size": RANKS, "policy": policy}
        emulated = emulate(trace, fabric, assume=False, **how)
        if policy is SHOWN_IN_PERFETTO:
            emulated.save_perfetto(out / "perfetto.json")
        predicted_ns = predict(trace, fabric, assume=False, **how).iteration_ns
        times = {"reducer_ns": emulated.iteration_ns, "predicted_ns": predicted_ns}
        simpler = {"baselines_ns": baselines_ns(trace, fabric, **how)}
        cap = "default" if policy.bucket_cap_mb is None else cap_name(policy.bucket_cap_mb)
        rows.append({"cap": cap, "order": policy.order, **times, **simpler})
    return rows
