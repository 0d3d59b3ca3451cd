"""Intervals: medians, percentiles and bounds of predicted iterations."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from simulator import Fabric, predict
from simulator.fabric import Timing
from simulator.workload.compute_times import Variation

from ..explore import examples
from ..strategies import any_predictions, iteration, steady_fabrics, trace_of

FREE = Fabric.from_alpha_beta(alpha_ns=0, bytes_per_s=1e18)


@examples(30)
@given(any_predictions())
def test_figures_of_the_samples_are_in_their_order(asked):
    prediction = asked.predict()
    samples = prediction.samples_ns
    low, high = prediction.interval_ns
    assert low <= prediction.iteration_ns <= high
    assert prediction.p95_ns <= prediction.p99_ns <= max(samples)
    assert min(samples) <= prediction.mean_ns <= max(samples)
    assert prediction.iteration_ns in samples
    assert sum(sample < prediction.iteration_ns for sample in samples) <= len(samples) / 2


@examples(30)
@given(any_predictions(fabrics=steady_fabrics), st.floats(0, 0.5), st.floats(0, 0.4))
def test_knowing_the_fabric_less_well_never_narrows_the_interval(asked, spread, more):
    intervals = []
    for error in (spread, spread + more):
        timings = tuple(t.model_copy(update={"spread": error}) for t in asked.fabric.all_reduce)
        fabric = asked.fabric.model_copy(update={"all_reduce": timings})
        intervals.append(replace(asked, fabric=fabric).predict().interval_ns)
    assert intervals[1][0] <= intervals[0][0]
    assert intervals[1][1] >= intervals[0][1]


def test_the_interval_reaches_as_far_as_dearer_and_cheaper_collectives_do():
    """An all-reduce of 100 ns, give or take 20, begins at 10 and computation ends at 100: 10 ns to gain."""
    trace = trace_of([[iteration(0, (10,), 100, 0)]], [4])
    fabric = Fabric(all_reduce=(Timing(world_size=2, size_bytes=4, ns=100, spread=0.2),))
    prediction = predict(trace, fabric, world_size=2)
    assert prediction.iteration_ns == 110
    assert prediction.interval_ns == (100, 130)


@pytest.mark.parametrize("world_size", [2, 8, 64, 1024])
def test_an_iteration_waits_for_the_slowest_of_all_devices(world_size):
    """Without communication, the mean is that of the maximum of as many normal variables, which is never negative."""
    trace = trace_of([[iteration(10**6, (2 * 10**6,), 3 * 10**6, 0)] * 400], [4])
    prediction = predict(trace, FREE, world_size=world_size, variation=Variation(device_spread=0.01))
    expected, _ = quad(lambda z: z * world_size * norm.pdf(z) * norm.cdf(z) ** (world_size - 1), 0, 10)
    assert prediction.mean_ns == pytest.approx(3e6 * (1 + 0.01 * expected), rel=1e-4)
    assert prediction.compute_ns == 3 * 10**6  # the other devices, which wait
    assert prediction.iteration_ns < prediction.p95_ns < prediction.p99_ns


def test_the_interval_allows_for_the_speed_of_the_recorded_device():
    """One device: it is itself one of those that differ, and 90 % of them lie within 1.645 standard deviations."""
    trace = trace_of([[iteration(10**6, (2 * 10**6,), 3 * 10**6, 0)]], [4])
    assert predict(trace, FREE, world_size=1).interval_ns == (3 * 10**6, 3 * 10**6)
    prediction = predict(trace, FREE, world_size=1, variation=Variation(device_spread=0.02))
    assert prediction.iteration_ns == 3 * 10**6
    low, high = prediction.interval_ns
    assert (3 * 10**6 - low, high - 3 * 10**6) == pytest.approx((98_700, 98_700), abs=2)
