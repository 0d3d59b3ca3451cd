"""Next measurement: which two numbers of GPUs, or which messages, to measure so that a band becomes narrowest."""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from ..predicted_iteration import Prediction
from .system import System


class NextMeasurement(NamedTuple):
    """What to measure next.

    Attributes:
        width: Half of the interval of the iteration over its median, now.
        world_sizes: The two numbers of GPUs, or the only one, whose measured iterations narrow the interval most.
            Empty: there is no smaller one.
        width_with_sizes: Expected width after measuring these.
        width_with_messages: Expected width after measuring all-reduces of the largest bucket's size on as many GPUs.
            None: the buyer has fewer.
    """

    width: float
    world_sizes: tuple[int, ...]
    width_with_sizes: float
    width_with_messages: float | None


def next_measurement(system: System, world_size: int, world_sizes: Sequence[int]) -> NextMeasurement:
    """Choose two numbers of GPUs to measure, from the narrowing that iterations as predicted would give.

    The buyer counts as having one node, or as many GPUs as were measured.

    Args:
        system: The system.
        world_size: The number of GPUs of which the iteration is asked for.
        world_sizes: Numbers of GPUs that may be measured, beside parts of a node.
    """
    whole, known, topology = system.at(world_size), system.measured_ns or {}, system.used.fabric.topology
    node = 1 if topology is None else topology.levels[0].size
    owned = max([node, *known])
    candidates = {1, node // 4, node // 2, node, *world_sizes} - {0, *known}
    if system.trace.workload.compute_bounds == (1.0, 1.0):
        candidates -= {1}  # one GPU alone was measured
    smaller = {ranks: system.at(ranks) for ranks in sorted(candidates) if ranks < world_size and ranks <= owned}
    narrowed = {
        some: _width(whole.anchored(world_size, {ranks: smaller[ranks].iteration_ns for ranks in some}, smaller))
        for some in combinations(smaller, min(2, len(smaller)))
        if some
    }
    width = _width(whole)
    left, best = min(((left, pair) for pair, left in narrowed.items()), default=(width, ()))
    without = 1 - whole.shares_of_width.get("collectives", 0.0)
    return NextMeasurement(width, best, left, width * without**0.5 if world_size <= owned else None)


def _width(prediction: Prediction) -> float:
    low, high = prediction.interval_ns
    return (high - low) / 2 / max(1, prediction.iteration_ns)
