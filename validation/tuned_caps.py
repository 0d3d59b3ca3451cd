"""Caps that `tune` gives for reducers whose iterations were published for several caps.

`python -m validation.tuned_caps` prints one row for each reducer of part (e): the best cap by `tune`, the swept cap
next to it, the fastest swept cap, and the regret, which is the measured time with the former over that with the
latter, minus one. A sweep separates two caps if their times differ by more than both spreads (1 % if none was
published). Where the gain over torch's default may be due to errors, the advice is to keep the default of 25 MB; the
last column has the regret of the swept cap next to that.
"""

from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import NamedTuple

from ddplab.reference.bucketing import DEFAULT_BUCKET_CAP_MB
from ddplab.simulator import BucketPlan, tune

from .cases import BucketCapsCase, BucketCapsInputs, BucketRule, MeasuredCap, load_case
from .part_e_bucket_caps import UNPUBLISHED_SPREAD, costs_of
from .published_nodes import assume_on_node, device_of, trace_of_model

CASES = Path(__file__).parent / "cases"


class TunedCap(NamedTuple):
    """The cap that `tune` gives for one reducer, beside the measured ones."""

    reducer: str
    gpus: int
    plan: BucketPlan
    nearest: MeasuredCap  # the swept cap next to the best cap of the plan
    next_to_default: MeasuredCap
    fastest: MeasuredCap

    @property
    def regret(self) -> float:
        """Measured time of the nearest cap over that of the fastest, minus one."""
        return self.nearest.ms / self.fastest.ms - 1

    @property
    def is_separated(self) -> bool:
        """Whether the measured difference of both exceeds their spreads."""
        spread_ms = self.nearest.spread_ms + self.fastest.spread_ms or UNPUBLISHED_SPREAD * self.fastest.ms
        return self.nearest.ms - self.fastest.ms > spread_ms


def tuned_plan(inputs: BucketCapsInputs, reducer: BucketRule) -> BucketPlan:
    """Tune the caps of one reducer, with the costs with which part (e) predicts its iterations."""
    optimizer_ns = None if reducer.optimizer_ms is None else reducer.optimizer_ms * 1e6
    node = inputs.node(reducer.node)
    trace = trace_of_model(reducer.model, device_of(node, reducer.tflops), reducer.compute_ms * 1e6, optimizer_ns)
    fabric, variation, _ = assume_on_node(trace, node, inputs, reducer.gpus)
    fabric, copies = costs_of(reducer, fabric)
    steady = variation.model_copy(update={"jitter": 0.0})
    return tune(
        trace,
        fabric,
        world_size=reducer.gpus,
        cap_rule=reducer.rule,
        variation=steady,
        assume=False,
        grouping="buckets" if copies else "fusion",
    )


def tuned_caps() -> list[TunedCap]:
    """Tune every reducer of part (e)."""
    found = []
    for case in map(load_case, sorted(CASES.glob("bucket_caps_*.toml"))):
        assert isinstance(case, BucketCapsCase)
        for reducer in case.inputs.reducers:
            measured = [row for row in case.truth if row.reducer == reducer.name]
            plan = tuned_plan(case.inputs, reducer)
            nearest, default = (_next_to(cap, measured) for cap in (plan.best_cap_mb, DEFAULT_BUCKET_CAP_MB))
            fastest = min(measured, key=lambda row: row.ms)
            found.append(TunedCap(reducer.name, reducer.gpus, plan, nearest, default, fastest))
    return found


def _next_to(cap_mb: float, measured: Sequence[MeasuredCap]) -> MeasuredCap:
    return min(measured, key=lambda row: abs(log(row.cap_mb / cap_mb)))


def main() -> None:
    """Print the table."""
    print("| reducer | tune's cap | nearest | fastest | regret | separated | keep the default | its regret |")
    print("| --- " * 8 + "|")
    for row in tuned_caps():
        print(
            f"| {row.reducer}, {row.gpus} GPUs | {row.plan.best_cap_mb:.0f} MB | {row.nearest.cap_mb:g} MB | "
            f"{row.fastest.cap_mb:g} MB | {row.regret:.2%} | {'yes' if row.is_separated else 'no'} | "
            f"{'yes' if row.plan.keep_default else 'no'} | {row.next_to_default.ms / row.fastest.ms - 1:.2%} |"
        )


if __name__ == "__main__":
    main()
