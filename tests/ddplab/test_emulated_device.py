"""The emulated device: real gradients of the recorded shapes, in ready order, at the recorded times."""

from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.emulation.emulated_device import EmulatedModel, IterationTimes
from ddplab.reference.recorder import described_buffers, described_parameters
from ddplab.reference.trace import Buffer, Parameter, Workload
from ddplab.simulator.workload.compute_times import ComputeTimes

from ..strategies import traces


class Stopwatch:
    """A clock that jumps."""

    def __init__(self):
        self.now_ns = 0

    @contextmanager
    def computing(self, duration_ns, _activity):
        yield
        self.now_ns += duration_ns


def workload(parameters, buffers=()):
    return Workload(
        model="by hand", source="module", parameters=tuple(parameters), buffers=tuple(buffers), device="cpu",
        device_name="a processor", backend=None, world_size=1, torch_version="2.13.0",
    )  # fmt: skip


def times_of(forward_ns, ready_ns, backward_end_ns, step_ns):
    """Times from moments since the start of the forward pass; a parameter with None gets no gradient."""
    ready, unused = np.array([moment or 0 for moment in ready_ns]), np.array([moment is None for moment in ready_ns])
    forward, backward_end, step, optimizer = map(np.int64, (forward_ns, backward_end_ns, step_ns, 0))
    return IterationTimes.of_rank(ComputeTimes(forward, ready, unused, backward_end, step, optimizer))


@given(traces(), st.data())
def test_each_gradient_is_ready_when_it_was_in_the_recording(trace, data):
    iteration = trace.ranks[0].iterations[0]
    start, count = iteration.forward_start_ns, len(trace.workload.parameters)
    unused = data.draw(st.sets(st.integers(0, count - 1), max_size=count - 1))
    ready = [None if index in unused else moment - start for index, moment in enumerate(iteration.ready_ns)]
    clock, seen = Stopwatch(), {}
    model = EmulatedModel(trace.workload, clock.computing)
    model.times = times_of(
        iteration.forward_end_ns - start,
        ready,
        iteration.backward_end_ns - start,
        iteration.end_ns - iteration.backward_end_ns,
    )
    model.value = 3.0
    for index, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: seen.update({index: clock.now_ns}))
    loss = model()
    assert clock.now_ns == iteration.forward_end_ns - start
    loss.backward()
    assert clock.now_ns == iteration.backward_end_ns - start
    model.step()
    assert clock.now_ns == iteration.duration_ns
    assert seen == {index: moment for index, moment in enumerate(ready) if moment is not None}
    assert list(seen) == sorted(seen, key=lambda index: (ready[index], index))
    for index, parameter in enumerate(model.parameters()):
        assert parameter.grad is None if index in unused else bool((parameter.grad == 3.0).all())


def test_gradients_accumulate_and_are_not_copied():
    model = EmulatedModel(
        workload([Parameter(name="w", shape=(2, 3), dtype="float32", size_bytes=24)]), Stopwatch().computing
    )
    model.times = times_of(1, [2], 3, 4)
    made = []
    gradient = model.gradient
    model.gradient = lambda index: made.append(gradient(index)) or made[-1].view_as(made[-1])
    model().backward()
    assert model.w.grad.data_ptr() == made[0].data_ptr()
    model().backward()
    assert bool((model.w.grad == 2.0).all())


@pytest.mark.parametrize(
    "names",
    [["conv.weight", "conv.bias", "layer1.0.weight", "layer1.1.weight"], ["weight"], ["a name with spaces", "b"]],
)
def test_the_module_has_the_recorded_names(names):
    parameters = [Parameter(name=name, shape=(2,), dtype="float64", size_bytes=16) for name in names]
    buffers = [
        Buffer(name="n", dtype="int64", size_bytes=8),
        Buffer(name="running.mean", dtype="float32", size_bytes=12),
    ]
    model = EmulatedModel(workload(parameters, buffers), Stopwatch().computing)
    assert list(described_parameters(model)) == parameters
    assert list(described_buffers(model)) == buffers


@pytest.mark.parametrize(
    "names", [["a", "a.b"], ["a.b", "a"], ["a.weight", "b.weight", "a.bias"], ["training", "x"], ["value"]]
)
def test_names_that_no_module_can_have_are_numbered(names):
    parameters = [
        Parameter(name=name, shape=(index + 1,), dtype="float32", size_bytes=4 * index + 4)
        for index, name in enumerate(names)
    ]
    described = described_parameters(EmulatedModel(workload(parameters), Stopwatch().computing))
    assert [one.shape for one in described] == [one.shape for one in parameters]


def test_a_sparse_gradient_has_the_rows_that_a_batch_touches():
    embedding = Parameter(name="token.weight", shape=(25, 3), dtype="float32", size_bytes=300, sparse=True)
    model = EmulatedModel(workload([embedding]), Stopwatch().computing, sparse_density=7 / 25)
    assert list(described_parameters(model)) == [embedding]
    model.times = times_of(0, [1], 1, 0)
    model().backward()
    assert model.token.weight.grad.is_sparse
    assert model.token.weight.grad._nnz() == 7
