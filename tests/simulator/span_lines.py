"""One iteration of ranks that are described by hand, as lines of its spans."""

from ddplab.simulator import predict
from ddplab.simulator.fabric import Fabric, Timing

from ..strategies import iteration, trace_of

ALIKE = iteration(forward_ns=10, ready_ns=(30, 20), backward_end_ns=32, step_ns=5)  # parameter 1 is ready first


def fabric(cost_ns: int, **fields) -> Fabric:
    """A fabric on which every collective of two ranks takes `cost_ns`."""
    return Fabric(all_reduce=(Timing(world_size=2, size_bytes=0, ns=cost_ns),), **fields)


def lines_of(ranks, buckets, costs: Fabric, *, buffer_bytes=(), **arguments) -> list[str]:
    """Predict one iteration of these ranks and return its spans, one line each, sorted by rank and start."""
    trace = trace_of([[one] for one in ranks], [4] * len(ranks[0].ready_ns), buffer_bytes)
    prediction = predict(trace, costs, world_size=2, plan=buckets, **arguments)
    spans = sorted(prediction.spans, key=lambda span: (span.rank, span.start_ns, span.stream))
    assert sum(prediction.breakdown.values()) == prediction.iteration_ns * arguments.get("sync_every", 1)
    return [
        f"{s.start_ns:3}-{s.end_ns:3} rank {s.rank} {s.kind}" + ("" if s.bucket is None else f" {s.bucket}")
        for s in spans
    ]
