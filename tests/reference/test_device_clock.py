"""The clock of a device, on a simulated GPU: times are right, and the host never waits inside an iteration."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import reference.recorder
from reference.device_clock import HostClock, clock_of
from reference.recorder import record
from simulator.workload.compute_times import recorded_model

from . import bodies
from .simulated_gpu import SimulatedGpu, SimulatedLayer, Stream

STREAMS = 3
durations_ns = st.integers(0, 5 * 10**7)
commands = st.one_of(
    st.tuples(st.just("launch"), st.integers(0, STREAMS - 1), durations_ns),
    st.tuples(st.just("spend"), durations_ns),
    st.tuples(st.just("read"), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, STREAMS - 1)),
    st.tuples(st.just("settle")),
)
programs = st.lists(commands, max_size=60)


def run(gpu, clock, program):
    """Readings, the moments at which the GPU reaches their events, and the streams on which they were recorded."""
    streams = [gpu.stream, *(Stream() for _ in range(STREAMS - 1))]
    recorded = []
    most_pending = 0
    for command, *arguments in program:
        match command, *arguments:
            case "launch", stream, ns:
                gpu.stream = streams[stream]
                gpu.launch(ns)
            case "spend", ns:
                gpu.spend(ns)
            case "read", stream:
                gpu.stream = streams[stream]
                reading = clock.now()
                recorded.append((reading, gpu.reached_ns[-1], stream))
                most_pending = max(most_pending, sum(one.ns is None for one, *_ in recorded))
            case "wait", waiting, other:
                streams[waiting].free_ns = max(streams[waiting].free_ns, streams[other].free_ns)
            case ("settle",):
                clock.settle()
                assert all(reached <= gpu.host_ns for one, reached, _ in recorded if one.ns is not None)
    return recorded, most_pending


@pytest.mark.parametrize("tick_ns", [1, 500])
@given(program=programs)
def test_readings_are_when_the_gpu_reached_them_and_only_the_end_waits(tick_ns, program):
    gpu = SimulatedGpu(tick_ns)
    clock = gpu.clock()
    waits = gpu.synchronizations
    recorded, most_pending = run(gpu, clock, program)
    assert gpu.synchronizations == waits
    assert gpu.events <= most_pending + 1  # and the anchor
    clock.settle(wait=True)
    rounding_ns = 8 * (1 + len(recorded))  # an anchor may be wrong by 4 ns, a far reading by more
    for reading, reached_ns, _ in recorded:
        far_ns = abs(reached_ns - recorded[0][1]) * 2**-23
        assert abs(reading.ns - reached_ns) <= clock.uncertainty_ns + tick_ns + rounding_ns + far_ns
        assert reading.event is None
    for stream in range(STREAMS):
        on_stream = [reading.ns for reading, _, its_stream in recorded if its_stream == stream]
        assert on_stream == sorted(on_stream)


def test_events_are_used_again_and_none_is_lost():
    gpu = SimulatedGpu()
    clock = gpu.clock()
    for _ in range(1000):
        for _ in range(10):
            clock.now()
            gpu.launch(10_000)
        clock.settle()
        gpu.spend(200_000)
    clock.settle(wait=True)
    assert gpu.events <= 40
    assert len(clock._free) + 1 == gpu.events
    assert not clock._pending


def test_hours_do_not_blur_the_times():
    """An hour in milliseconds is exact to 0.25 ms as a 32-bit float; with anchors the times stay exact."""
    gpu = SimulatedGpu()
    clock = gpu.clock()
    for _ in range(20_000):
        gpu.launch(180_000_000)
        reading = clock.now()
        clock.settle()
        gpu.spend(179_000_000)
    clock.settle(wait=True)
    assert abs(reading.ns - gpu.reached_ns[-1]) < 10_000


def test_a_cpu_is_timed_by_the_host_at_once():
    clock = clock_of(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    before, after = clock.now(), clock.now()
    clock.settle(wait=True)
    assert 0 <= after - before < 10**9


# The recorder


@pytest.fixture
def gpu(monkeypatch):
    """A simulated GPU on which the recorder times all modules."""
    gpu = SimulatedGpu()
    monkeypatch.setattr(reference.recorder, "clock_of", lambda _device: gpu.clock())
    return gpu


LAYERS_NS = [(300_000, 500_000), (200_000, 700_000), (100_000, 900_000)]
"""Forward and backward of each layer."""


def layers(gpu):
    return nn.Sequential(*(SimulatedLayer(gpu, *ns) for ns in LAYERS_NS))


def test_a_module_has_the_times_of_the_gpu_behind_the_host(gpu):
    module = layers(gpu)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: gpu.launch(50_000))
    with record(module) as recording:
        waits = gpu.synchronizations
        start_ns = gpu.host_ns
        for _ in range(5):
            module(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert gpu.synchronizations == waits
        assert gpu.host_ns - start_ns < gpu.stream.free_ns - start_ns - 10**7  # the host is far ahead
    iterations = recording.trace.ranks[0].iterations
    assert len(iterations) == 5
    near = {"abs": 60}
    for one in iterations[1:]:
        assert one.forward_end_ns - one.forward_start_ns == pytest.approx(600_000, **near)
        ready = [one.ready_ns[2 * layer] - one.backward_start_ns for layer in (2, 1, 0)]
        gaps = [backward for _, backward in reversed(LAYERS_NS)]
        assert ready == pytest.approx(list(accumulate(gaps)), **near)
        assert one.duration_ns == pytest.approx(2_750_000, **near)
        assert one.host_bound_ns is None
    for before, after in pairwise(iterations):
        assert before.end_ns == after.forward_start_ns
    assert recording.trace.ranks[0].clock_uncertainty_ns > 0


def test_interrupted_and_discarded_iterations_leave_nothing_behind(gpu):
    module = layers(gpu)
    fails = module[1].linear.weight.register_post_accumulate_grad_hook(lambda _: 1 / 0)
    with record(module) as recording:
        for _ in range(50):
            with pytest.raises(ZeroDivisionError):
                module(torch.ones(1, 2)).sum().backward()
            module(torch.ones(1, 2))  # without a backward pass
            gpu.spend(10**8)
        fails.remove()
        for _ in range(2):
            module(torch.ones(1, 2)).sum().backward()
        clock = recording._timestamps._clock
    assert not clock._pending
    assert len(clock._free) + 1 == gpu.events < 60
    complete = [one for one in recording.trace.ranks[0].iterations if None not in one.ready_ns]
    assert len(complete) == 2


@pytest.mark.parametrize("wrapper", ["ours", "torch"])
def test_buckets_on_a_gpu_end_with_the_last_all_reduce(two_ranks, wrapper):
    """Copies out come after the backward pass, as in an imported profile."""
    for trace, waits, events in two_ranks.run(bodies.record_on_simulated_gpu, wrapper, LAYERS_NS):
        assert waits == 0
        assert events < 150
        if wrapper == "ours":  # only there the simulated GPU copies
            assert recorded_model(trace).includes_copy_out
        for rank in trace.ranks:
            assert len(rank.iterations) == 6
            for one in rank.iterations:
                assert len(one.buckets) == len(trace.layouts[one.layout])
                done_ns = max(bucket.done_ns for bucket in one.buckets)
                assert one.backward_end_ns == max(done_ns, *one.ready_ns)
                assert one.buckets[-1].copied_out_ns >= one.backward_end_ns
                for bucket, members in zip(one.buckets, trace.layouts[one.layout], strict=True):
                    last_ns = max(one.ready_ns[index] for index in members)
                    assert last_ns <= bucket.ready_ns <= bucket.launched_ns
