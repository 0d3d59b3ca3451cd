"""A trace of three tensors, for emulations that take milliseconds."""

from simulator import Fabric

from ..strategies import iteration, trace_of

FABRIC = Fabric.from_alpha_beta(1000, 1e9)


def small_trace(ranks: int = 1):
    trace = trace_of(
        [[iteration(500, (3000 + 100 * rank, 2000, 1000), 3500, 700)] * 3 for rank in range(ranks)], [400, 800, 4000]
    )
    parameters = tuple(
        one.model_copy(update={"dtype": "float32", "shape": (one.size_bytes // 4,)})
        for one in trace.workload.parameters
    )
    return trace.model_copy(update={"workload": trace.workload.model_copy(update={"parameters": parameters})})
