"""Operations and devices for tests: strategies, a document of the smallest model, and its order of readiness."""

from hypothesis import strategies as st

from ddplab.reference.trace import PHASES, Parameter, Trace
from ddplab.simulator.workload.roofline import Device, GradientOperations, Operation, Operations

from ..strategies import traces

SLOW = Device(name="slow", flops_per_s=1e9, bytes_per_s=1e9)

OPERATION = {"flops": 4, "bytes_moved": 8, "kernels": 1}
DOCUMENT = {
    "model": "tiny",
    "batch": 3,
    "torch_version": "2.13.0",
    "parameters": [{"name": "weight", "shape": [2], "dtype": "float32", "size_bytes": 8, "sparse": False}],
    "buffers": [],
    "forward": [OPERATION],
    "loss": [],
    "gradients": [{"parameter": 0, "operations": [OPERATION]}],
    "tail": [],
    "step": [OPERATION],
}


def some_operations(least: int = 0):
    """(Operation(flops=6, bytes_moved=0), Operation(flops=0, bytes_moved=7, kernels=2, kind='conv'))"""
    count = st.integers(0, 10**9)
    kind = st.sampled_from(["conv", "memory"])
    one = st.builds(Operation, flops=count, bytes_moved=count, kernels=st.integers(1, 3), kind=kind)
    return st.lists(one, min_size=least, max_size=4).map(tuple)


def devices(most_pace_ns: int = 10_000):
    """Device(name='d', flops_per_s=1e12, bytes_per_s=1e9, pace_ns=9)"""
    rate = st.floats(1e6, 1e16)
    pace = st.integers(0, most_pace_ns)
    return st.builds(Device, name=st.just("d"), flops_per_s=rate, bytes_per_s=rate, pace_ns=pace)


@st.composite
def operations_of(draw, parameters: tuple[Parameter, ...], batch: int | None = None) -> Operations:
    """Operations of a model of these parameters, gradients in any order."""
    order = draw(st.permutations(range(len(parameters))))
    return Operations(
        model="m",
        batch=batch,
        torch_version="2.13.0",
        parameters=parameters,
        forward=draw(some_operations()),
        loss=draw(some_operations()),
        gradients=tuple(GradientOperations(parameter=index, operations=draw(some_operations())) for index in order),
        tail=draw(some_operations()),
        step=draw(some_operations()),
    )


@st.composite
def any_operations(draw) -> Operations:
    """Of 1 to 6 parameters."""
    sizes = draw(st.lists(st.integers(0, 100), min_size=1, max_size=6))
    parameters = (
        Parameter(name=f"p{index}", shape=(size,), dtype="float32", size_bytes=4 * size)
        for index, size in enumerate(sizes)
    )
    return draw(operations_of(tuple(parameters)))


@st.composite
def recordings(draw) -> tuple[Trace, Operations]:
    """A recorded trace and operations of its model."""
    trace = draw(traces())
    return trace, draw(operations_of(trace.workload.parameters, trace.workload.batch))


def moments(iteration) -> list[int]:
    """All moments of an iteration, in their order."""
    phases = [getattr(iteration, name) for name in PHASES]
    return sorted(moment for moment in [*phases, *iteration.ready_ns] if moment is not None)


def ready_order(trace: Trace) -> list[int]:
    ready = trace.ranks[0].iterations[0].ready_ns
    return sorted(range(len(ready)), key=ready.__getitem__)


def validated(trace: Trace) -> Trace:
    """The trace after all checks that a file gets."""
    return Trace.model_validate_json(trace.model_dump_json())
