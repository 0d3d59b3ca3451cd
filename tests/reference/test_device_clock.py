"""The clock of a device, on a simulated GPU: times are right, and the host never waits inside an iteration."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.recording.device_clock import HostClock, clock_of

from ..simulated_gpu import CALL_NS, SimulatedGpu, Stream

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


@pytest.mark.parametrize("spare", [0, 7])
@pytest.mark.parametrize("tick_ns", [1, 500])
@given(program=programs)
def test_readings_are_when_the_gpu_reached_them_and_only_the_end_waits(tick_ns, spare, program):
    gpu = SimulatedGpu(tick_ns)
    clock = gpu.clock(spare)
    del gpu.reached_ns[:]
    waits = gpu.synchronizations
    recorded, most_pending = run(gpu, clock, program)
    assert gpu.synchronizations == waits
    assert gpu.events <= most_pending + 1 + spare  # and the anchor
    clock.settle(wait=True)
    rounding_ns = 8 * (1 + len(recorded))  # an anchor may be wrong by 4 ns, a far reading by more
    for reading, reached_ns, _ in recorded:
        far_ns = abs(reached_ns - recorded[0][1]) * 2**-23
        assert abs(reading.ns - reached_ns) <= clock.uncertainty_ns + tick_ns + rounding_ns + far_ns
    for stream in range(STREAMS):
        on_stream = [reading.ns for reading, _, its_stream in recorded if its_stream == stream]
        assert on_stream == sorted(on_stream)


def test_a_short_recording_makes_one_call_for_each_reading():
    """Settling made two more; on a GPU whose host sets the pace, each call makes the step longer."""
    gpu = SimulatedGpu()
    clock = gpu.clock(100)
    before_ns = gpu.host_ns
    for _ in range(10):
        for _ in range(10):
            clock.now()
        clock.settle()
    assert gpu.host_ns - before_ns == 100 * CALL_NS
    clock.settle(wait=True)
    assert not clock._pending


@pytest.mark.parametrize("already", [True, False])
def test_the_end_of_a_collective_is_read_aside_if_its_work_is_launched(already):
    """A callback's stream comes from torch's pool, and an event there held up the training."""
    gpu = SimulatedGpu()
    clock = gpu.clock()
    gpu.launch(5_000)
    future, taken = torch.futures.Future(), []
    if already:
        future.set_result(None)
    clock.when_done(future, taken.append)
    assert len(taken) == already
    if not already:
        future.set_result(None)
    clock.settle(wait=True)
    assert taken[0].ns == pytest.approx(gpu.stream.free_ns, abs=clock.uncertainty_ns + 10)
    assert (gpu.aside.stream.free_ns == gpu.stream.free_ns) == already
    failed = torch.futures.Future()
    failed.set_exception(RuntimeError("a rank is gone"))
    clock.when_done(failed, taken.append)
    assert len(taken) == 1


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
