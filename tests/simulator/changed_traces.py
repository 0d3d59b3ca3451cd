"""Copies of traces with other fields, and the trace of a GPU."""

from collections.abc import Callable
from typing import Any

from ddplab.reference.trace import Iteration, Trace

from ..strategies import iteration, trace_of


def with_workload(trace: Trace, **fields: Any) -> Trace:
    return trace.model_copy(update={"workload": trace.workload.model_copy(update=fields)})


def with_parameters(trace: Trace, **fields: list[Any]) -> Trace:
    """A value of each field for every parameter, in their order."""
    parameters = trace.workload.parameters
    changes = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
    changed = (one.model_copy(update=change) for one, change in zip(parameters, changes, strict=True))
    return with_workload(trace, parameters=tuple(changed))


def as_floats(trace: Trace, **fields: list[Any]) -> Trace:
    """With flat float32 parameters of as many bytes as before."""
    shapes = [(size // 4,) for size in trace.sizes_bytes]
    return with_parameters(trace, **{"dtype": ["float32"] * len(shapes), "shape": shapes, **fields})


def with_iterations(trace: Trace, change: Callable[[Iteration], Iteration]) -> Trace:
    ranks = (
        rank.model_copy(update={"iterations": tuple(change(one) for one in rank.iterations)}) for rank in trace.ranks
    )
    return trace.model_copy(update={"ranks": tuple(ranks)})


def gpu_trace(
    device: str, iterations: int = 1, buffer_bytes: tuple[int, ...] = (), *, size_bytes: int = 2**20
) -> Trace:
    """16 gradients of 1 MB, or of another size, one every millisecond."""
    ms = 10**6
    ready_ns = tuple((10 + number) * ms for number in range(1, 17))
    times = [iteration(10 * ms, ready_ns, 28 * ms + more_ns, ms) for more_ns in range(iterations)]
    return with_workload(as_floats(trace_of([times], [size_bytes] * 16, buffer_bytes)), device_name=device)
