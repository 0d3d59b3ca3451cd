"""Tutorial 8: published sweeps over bucket caps, and what the simulator predicts for them with one thing changed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ddplab import Fabric, Trace, Variation, predict
from ddplab.reference.bucketing import MIB
from ddplab.simulator.fabric import Linear
from validation.cases import BucketCapsCase, BucketCapsInputs, BucketRule, MeasuredCap, load_case
from validation.part_e_bucket_caps import UNPUBLISHED_SPREAD, costs_of, plan_of, score
from validation.published_nodes import assume_on_node, device_of, trace_of_model

CASES = Path(__file__).parent.parent / "validation" / "cases"
NAMES = ("cs336", "torch")
LARGE_BYTES = 1000 * MIB
"""Message that shows the rate of a link; the largest that was published over PCIe."""
Curve = Mapping[float, float]
"""Milliseconds by cap in MB."""


class Buckets(NamedTuple):
    """The buckets of one cap: their number, the part of all bytes in the first, and the part that is copied."""

    number: int
    first: float
    copied: float


@dataclass(frozen=True)
class Sweep:
    """One published sweep: iterations of a reducer on two GPUs with several bucket caps.

    Attributes:
        reducer: The reducer, and its iteration without communication.
        inputs: Constants of the machines of this case, each with its source.
        rows: Measured iterations, by cap.
    """

    reducer: BucketRule
    inputs: BucketCapsInputs
    rows: Sequence[MeasuredCap]

    @cached_property
    def measured_ms(self) -> Curve:
        """Published milliseconds by cap."""
        return {row.cap_mb: row.ms for row in self.rows}

    @cached_property
    def trace(self) -> Trace:
        """The computation of an iteration, made from its published time."""
        reducer = self.reducer
        device = device_of(self.inputs.node(reducer.node), reducer.tflops)
        optimizer_ns = None if reducer.optimizer_ms is None else reducer.optimizer_ms * 1e6
        return trace_of_model(reducer.model, device, reducer.compute_ms * 1e6, optimizer_ns)

    @cached_property
    def backward_ms(self) -> float:
        """Milliseconds of the backward pass."""
        (iteration,) = self.trace.ranks[0].iterations
        return (iteration.backward_end_ns - iteration.backward_start_ns) / 1e6

    @cached_property
    def all_reduce_ms(self) -> float:
        """Milliseconds of an all-reduce of all gradients at once."""
        return self._on_its_node(self.trace)[0].all_reduce_ns(sum(self.trace.sizes_bytes), 2) / 1e6

    @cached_property
    def fits_gb_per_s(self) -> float:
        """The rate of a link over which all gradients travel within the backward pass; two ranks send all once."""
        return sum(self.trace.sizes_bytes) / self.backward_ms / 1e6

    def fastest(self) -> list[float]:
        """The fastest cap, and all caps whose difference from it is within both spreads."""
        best = min(self.rows, key=lambda row: row.ms)

        def differs(row: MeasuredCap) -> bool:
            return row.ms - best.ms > (row.spread_ms + best.spread_ms or UNPUBLISHED_SPREAD * best.ms)

        return [row.cap_mb for row in self.rows if not differs(row)]

    def verdict(self) -> str:
        """The fastest caps in words."""
        caps = self.fastest()
        return "no difference" if len(caps) == len(self.rows) else ", ".join(f"{cap:g}" for cap in caps)

    def buckets(self) -> dict[float, Buckets]:
        """The buckets of each cap."""
        sizes = self.trace.sizes_bytes
        found = {}
        for row in self.rows:
            plan = plan_of(self.trace, self.reducer, row.cap_mb)
            parts = [sum(sizes[index] for index in bucket) / sum(sizes) for bucket in plan]
            copied = sum(part for part, bucket in zip(parts, plan, strict=True) if len(bucket) > 1)
            found[row.cap_mb] = Buckets(len(plan), parts[0], copied)
        return found

    def predicted_ms(
        self,
        *,
        network_of: "Sweep | None" = None,
        computation_of: "Sweep | None" = None,
        rule: Literal["at most the cap", "reaches the cap"] | None = None,
        latency: bool = True,
        copies: Literal["all", "none"] | None = None,
        slow_down: float | None = None,
        fabric: Fabric | None = None,
    ) -> Curve:
        """Predict the milliseconds of an iteration by cap, with something changed.

        Args:
            network_of: A sweep whose network replaces this one's.
            computation_of: A sweep whose computation replaces this one's.
            rule: When a bucket is full; "reaches the cap" is torch's rule. None: this reducer's.
            latency: False: a small message costs its bytes alone, at the rate of large ones.
            copies: Which gradients are copied. None: those that this reducer copies.
            slow_down: Factor on computation beside collectives.
            fabric: Any other network and costs.
        """
        trace = (computation_of or self).trace
        given, variation = (network_of or self)._on_its_node(trace)
        fabric = fabric or given
        if not latency:
            rate = 1e9 * LARGE_BYTES / fabric.all_reduce_ns(LARGE_BYTES, 2)
            fabric = _link(0, rate, fabric)
        if slow_down is not None:
            fabric = fabric.with_processor(slow_down=slow_down)
        fabric = fabric.with_processor(launch_error=0, copy_error=0, slow_down_error=0)  # intervals are not shown
        fabric, single = costs_of(self.reducer, fabric)
        steady = variation.model_copy(update={"jitter": 0.0})  # all caps then have one iteration
        if copies == "none":
            fabric = fabric.with_processor(pack=Linear(), copy_out=Linear())
        reducer = self.reducer.model_copy(update={"rule": rule or self.reducer.rule})
        grouping = "buckets" if single or copies == "all" else "fusion"
        how: dict[str, Any] = {"variation": steady, "grouping": grouping}
        times = {}
        for row in self.rows:
            plan = plan_of(trace, reducer, row.cap_mb)
            times[row.cap_mb] = predict(trace, fabric, world_size=2, plan=plan, **how).iteration_ns / 1e6
        return times

    def over_link(self, gb_per_s: float) -> Curve:
        """Predict the milliseconds by cap over a link of another rate, with the latency of this one."""
        given, _ = self._on_its_node(self.trace)
        bytes_ns = MIB * given.all_reduce_ns(LARGE_BYTES, 2) / LARGE_BYTES
        latency_ns = given.all_reduce_ns(MIB, 2) - round(bytes_ns)
        return self.predicted_ms(fabric=_link(latency_ns // 2, gb_per_s * 1e9, given))  # two ranks take two steps

    def _on_its_node(self, trace: Trace) -> tuple[Fabric, Variation]:
        fabric, variation, _ = assume_on_node(trace, self.inputs.node(self.reducer.node), self.inputs, 2)
        return fabric, variation


def _link(latency_ns: int, bytes_per_s: float, costs: Fabric) -> Fabric:
    link = Fabric.from_alpha_beta(latency_ns, bytes_per_s)
    return link.model_copy(update={"processor": costs.processor})


def sweeps() -> dict[str, Sweep]:
    """Read the published sweeps by the name of the reducer."""
    return {
        reducer.name: Sweep(reducer, case.inputs, [row for row in case.truth if row.reducer == reducer.name])
        for case in _cases()
        for reducer in case.inputs.reducers
    }


def one_at_a_time(sweep: Sweep, other: Sweep) -> dict[str, Curve]:
    """Predict a sweep as published, and with one thing changed at a time; `other` lends network and computation."""
    return {
        "as published": sweep.predicted_ms(),
        f"network of {other.reducer.node}": sweep.predicted_ms(network_of=other),
        f"computation of {other.reducer.node}": sweep.predicted_ms(computation_of=other),
        "no latency": sweep.predicted_ms(latency=False),
        "torch's rule (reaches the cap)": sweep.predicted_ms(rule="reaches the cap"),
        "copies of every gradient": sweep.predicted_ms(copies="all"),
        "no copies": sweep.predicted_ms(copies="none"),
        "no slow-downs": sweep.predicted_ms(slow_down=1),
        "computation slowed by 1.5": sweep.predicted_ms(slow_down=1.5),
    }


def right_choices() -> tuple[Counter[str], int]:
    """In how many pairs of caps that differ each method chooses the faster cap, and the number of pairs."""
    choices = [choice for case in _cases() for choice in score(case).choices if not choice.is_tie]
    right: Counter[str] = Counter()
    for choice in choices:
        for method, chosen in {"the simulator": choice.predicted, **choice.baselines}.items():
            right[method] += chosen == choice.measured
    return right, len(choices)


def _cases() -> list[BucketCapsCase]:
    read = [load_case(CASES / f"bucket_caps_{name}.toml") for name in NAMES]
    return [case for case in read if isinstance(case, BucketCapsCase)]
