"""Logging data: sampled times without waiting for the device, and nothing at all in other iterations."""

import math
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.recording.logging_data import LoggingData

from ..scenarios import Wrap, mlp, on_both_classes
from ..simulated_gpu import SimulatedGpu

durations_ns = st.integers(0, 5 * 10**7)


class Iterations:
    """The part of a reducer that the logging data uses."""

    def __init__(self):
        self.iterations, self.observers, self.alarm_at = 0, [], math.inf

    def start(self):
        """A synchronised forward pass begins; see `Reducer.prepare_for_forward`."""
        self.iterations += 1
        if self.iterations >= self.alarm_at:
            self.alarm_at = math.inf
            self.alarm()
        for observer in tuple(self.observers):
            observer.forward_started()


@given(st.lists(st.lists(st.integers(1, 10**9), min_size=4, max_size=4), min_size=1, max_size=300))
def test_logging_data_averages_without_keeping_every_iteration(gaps):
    """The first ten iterations are timed, then one in a hundred; memory does not grow with their number."""
    reducer = Iterations()
    log = LoggingData(torch.device("cpu"), reducer)
    timed = []
    for number, (forward, launch, rest, wait) in enumerate(gaps, start=1):
        readings = accumulate([number * 10**12, forward, launch, rest, wait])
        sampled = number <= 10 or number % 100 == 0
        log._clock = SimpleNamespace(now=partial(next, readings), settle=lambda wait: None)
        reducer.start()
        assert (log in reducer.observers) == sampled
        if sampled:
            log.backward_started()
            log.bucket_launching(0)
            log.bucket_launching(1)
            log.backward_computed()
            log.bucket_done(0)
        assert len(list(readings)) == (0 if sampled else 5)
        if number < len(gaps) and sampled:
            timed.append((forward, launch + rest, rest + wait))
    if timed:
        data = log.runtime()
        names = ("forward_compute_time", "backward_compute_time", "backward_comm_time")
        for name, durations in zip(names, zip(*timed, strict=True), strict=True):
            assert data[f"avg_{name}"] == round(sum(durations) / len(durations))
            assert data[name] == durations[-1]
    sizes = [len(value) for value in vars(log).values() if isinstance(value, list | dict)]
    assert max(sizes) <= 5


@given(st.lists(st.lists(durations_ns, min_size=4, max_size=4), min_size=1, max_size=12))
def test_logging_data_has_the_times_of_the_gpu_without_waiting_for_it(iterations):
    gpu = SimulatedGpu()
    clock = gpu.clock()
    reducer = Iterations()
    log = LoggingData(torch.device("cpu"), reducer, clock)
    waits = gpu.synchronizations
    for forward_ns, first_ns, rest_ns, wait_ns in iterations:
        reducer.start()
        gpu.launch(forward_ns)
        log.backward_started()
        gpu.launch(first_ns)
        log.bucket_launching(0)
        gpu.launch(rest_ns)
        log.backward_computed()
        gpu.launch(wait_ns)
        log.bucket_done(0)
    reducer.start()
    assert gpu.synchronizations == waits
    data = log.runtime()
    assert data["iteration"] == min(len(iterations), 10)
    forward_ns, first_ns, rest_ns, wait_ns = iterations[data["iteration"] - 1]
    expected = {
        "forward_compute_time": forward_ns,
        "backward_compute_time": first_ns + rest_ns,
        "backward_comm_time": rest_ns + wait_ns,
        "backward_compute_comm_overlap_time": rest_ns,
    }
    for name, ns in expected.items():  # on a GPU that waits for its host, with the host's calls
        assert ns - 50 <= data[name] <= ns + 20_050
    assert data["backward_comm_time_start"] <= data["backward_compute_time_end"] <= data["backward_comm_time_end"]
    assert log.runtime() == data


def test_a_new_sample_rate_holds_at_once():
    reducer = Iterations()
    log = LoggingData(torch.device("cpu"), reducer)
    for _ in range(23):
        reducer.start()
    log.set_sample_rate(4)
    for number in range(24, 40):
        reducer.start()
        assert (log in reducer.observers) == (number % 4 == 0)


@on_both_classes
def logging_data(wrap: Wrap, _rank: int, options: dict) -> dict:
    ddp = wrap(mlp((4, 4, 4), torch.float32, 0), **options)
    for _ in range(6):
        ddp(torch.ones(1, 4)).sum().backward()
    return ddp._get_ddp_logging_data()


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"bucket_cap_mb": 1.5}], ids=str)
def test_logging_data_is_torchs_but_for_the_times(two_ranks, options):
    """Every key of torch's, with its value once torch has sampled it; a few more, and at once."""
    for ours, torchs in two_ranks.run(logging_data, options):
        assert set(torchs) <= set(ours)
        assert set(ours) - set(torchs) <= {"can_set_static_graph"}
        timed = {key for key in torchs if "time" in key}
        assert {key: ours[key] for key in set(torchs) - timed} == {key: torchs[key] for key in set(torchs) - timed}
        assert all(ours[key] > 0 for key in timed)
