"""A trace of three tensors, for emulations that take milliseconds."""

from ddplab.simulator import Fabric

from ..simulator.changed_traces import as_floats
from ..strategies import iteration, trace_of

FABRIC = Fabric.from_alpha_beta(1000, 1e9)


def small_trace(ranks: int = 1, unit: int = 1):
    """Each iteration takes 4,200 units."""
    ready_ns = [((30 + rank) * 100 * unit, 2000 * unit, 1000 * unit) for rank in range(ranks)]
    return as_floats(
        trace_of([[iteration(500 * unit, one, 3500 * unit, 700 * unit)] * 3 for one in ready_ns], [400, 800, 4000])
    )
