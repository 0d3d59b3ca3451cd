"""Judgement: what predictions mean for a buyer, by one rule and in the same sentences for every command.

Which configuration is fastest and which tie with it, what limits an iteration, what an efficiency needs, whether
measured iterations contradict the model, and how often intervals of other systems held.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..anchoring import Anchor
from ..cost_terms import origins
from ..fabric import Fabric
from ..predicted_iteration import Prediction
from ..results.scaling_verdict import NetworkNeed
from ..workload.roofline import EAGER_PACE_NS
from .limits import BUCKETS, Limits, Needs
from .next_measurement import NextMeasurement
from .system import System

COVERAGE = "90 % ranges (they held 36 of 37 times on one node, 17 of 22 on new clusters)"
"""See docs/accuracy.md."""


class Ranking(NamedTuple):
    """The fastest of several predictions, and those as fast within the errors, by their places, the fastest first."""

    fastest: int
    ties: tuple[int, ...]


def ranking(predictions: Sequence[Prediction]) -> Ranking:
    """Return the fastest prediction, and which tie with it: see `Comparison.is_tie`."""
    order = sorted(range(len(predictions)), key=lambda place: predictions[place].iteration_ns)
    best = predictions[order[0]]
    return Ranking(order[0], tuple(place for place in order[1:] if best.compare(predictions[place]).is_tie))


def contradicting(prediction: Prediction) -> list[Anchor]:
    """Return the measured iterations that are far from the model."""
    return [anchor for anchor in prediction.anchors if anchor.is_far]


def contradiction_sentence(prediction: Prediction) -> str:
    """Say that measured iterations contradict the model; "" if they do not."""
    parts = [
        f"{one.measured_ns / 1e6:,.1f} ms on {one.world_size:,} GPUs, predicted {one.predicted_ns / 1e6:,.1f} ms "
        f"({one.surprise:+.0f} standard deviations)"
        for one in contradicting(prediction)
    ]
    return f"the measured iterations contradict the model: {'; '.join(parts)}" if parts else ""


def efficiency_sentence(system: System, world_size: int) -> str:
    """Return how much of the GPUs' time becomes training."""
    efficiency = system.at(world_size).efficiency
    return f"{world_size:,} GPUs do the work of {efficiency * world_size:.4g} that train alone ({efficiency:.0%})"


def limit_sentence(limits: Limits) -> str:
    """Return what limits an iteration, and by which part of its time without each cause it would be shorter."""
    whole = max(1, limits.now.iteration_ns)
    if contradicting(limits.now):
        part = limits.now.breakdown["unexplained"] / whole / limits.now.iterations
        return f"limit on {limits.world_size:,} GPUs: {limits.limit}, {part:.0%} of the iteration"
    shares = sorted(((ns / whole, name) for name, ns in limits.saved_ns.items()), reverse=True)
    words = ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005 and name not in BUCKETS)
    buckets = ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005 and name in BUCKETS)
    parts = [f"limit on {limits.world_size:,} GPUs: {limits.limit}"]
    parts += [f"the iteration would be shorter without: {words}"] if words else []
    parts += [f"parts of the network's time: {buckets}"] if buckets else []
    return "; ".join(parts)


def network_sentence(limits: Limits, need: NetworkNeed) -> str:
    """Return how fast the links must be, if the model explains the measured iterations."""
    if contradicting(limits.now):
        return "which links would suffice does not follow, because the model does not explain the measured iterations"
    return need.sentence() + inside_one_node(limits.system.used.fabric, limits.world_size)


def inside_one_node(fabric: Fabric, world_size: int) -> str:
    """Say that these GPUs do not use the network between nodes; "" if they do."""
    levels = () if fabric.topology is None else fabric.topology.levels
    if len(levels) < 2 or world_size > (levels[0].members or 1):
        return ""
    return f"; {world_size:,} GPUs are in one node and do not use the network between nodes"


def needs_sentence(limits: Limits, needs: Needs, target: float, batch: int) -> str:
    """Return how far one thing alone must change for an efficiency."""
    has = limits.now.efficiency >= target
    asked = f"an efficiency of {target:.0%} on {limits.world_size:,} GPUs"
    if contradicting(limits.now):
        return f"{asked}: what it needs does not follow, because the model does not explain the measured iterations"
    parts = []
    if needs.rate is not None and needs.rate.multiple is not None:
        parts.append(
            f"links {needs.rate.multiple:.3g} times as fast ({needs.rate.needed_gb_per_s:.3g} GB/s of bus bandwidth "
            f"instead of {needs.rate.bus_gb_per_s:.3g})"
        )
    if needs.latency is not None:
        parts.append(f"latencies {needs.latency:.2g} times as long")
    if needs.batch is not None and not has:
        parts.append(f"a batch of {max(1, round(needs.batch * batch)):,} per GPU")
    if needs.accumulated is not None and not has:
        parts.append(f"accumulation over {needs.accumulated} iterations")
    if not parts:
        return f"{asked} is reached" if has else f"{asked}: no rate, latency, batch or accumulation alone suffices"
    where = inside_one_node(limits.system.used.fabric, limits.world_size)
    return f"{asked} {'would remain with either of' if has else 'needs one of'}: {'; '.join(parts)}{where}"


def assumed_sentence(system: System, world_size: int) -> str:
    """Name the costs that are assumed, and the pace of the host where it decides how long computation takes."""
    found = origins(system.trace, system.given, system.used, world_size)
    parts = [name.replace("_", " ") for name, origin in found.items() if origin == "assumed"]
    if system.trace.workload.compute_bounds != (1.0, 1.0):
        parts.insert(0, f"a host that launches a kernel every {EAGER_PACE_NS / 1e3:.0f} us")
    return f"assumed, not measured: {', '.join(parts)}" if parts else ""


def measure_sentence(world_size: int, measure: NextMeasurement, needs: Needs) -> str:
    """Return what to measure next; "" if there is nothing smaller to measure."""
    if not measure.world_sizes:
        return ""
    message = needs.rate.message_bytes / 2**20 if needs.rate else 0
    return (
        f"measure next: iterations on {' and '.join(f'{one:,}' for one in measure.world_sizes)} GPUs (--measured), "
        f"which narrow the range on {world_size:,} from ±{measure.width:.0%} to ±{measure.width_with_sizes:.0%}; "
        f"all-reduces of {message:.0f} MB on {world_size:,} would leave ±{measure.width_with_messages:.0%}"
    )
