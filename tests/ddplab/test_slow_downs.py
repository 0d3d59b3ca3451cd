"""The slow-down of computation from times beside collectives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.calibration.repeated_timing import ContentionTimes
from ddplab.calibration.slow_downs import MOST_DELAYED, ContinuousTimes, fit_slow_down
from ddplab.simulator import Fabric, predict

from ..strategies import iteration, trace_of


def times(passes_ns, collectives_ns, rounds=3):
    """Times alone, and beside each other, in each of the rounds."""
    return ContinuousTimes(
        *(ContentionTimes([[alone]] * rounds, [[beside]] * rounds) for alone, beside in (passes_ns, collectives_ns))
    )


@given(st.floats(1, 9), st.integers(1, 10**6))
def test_the_slow_down_is_that_of_the_passes_where_collectives_keep_their_speed(slow_down, cost_ns):
    one = {8: times((10**6, 10**6 * slow_down), (cost_ns, cost_ns))}
    assert fit_slow_down([one, one]) == pytest.approx((slow_down, 0))


@given(st.floats(1.01, 3), st.floats(1, 3), st.integers(10**5, 10**6))
def test_collectives_that_slow_down_delay_a_pass_in_the_replay_as_much_as_measured(compute, collective, cost_ns):
    """One collective in a long pass: it delays the pass by the part of its prolonged time that computation lost."""
    delayed = collective * (1 - 1 / compute)
    one = {8: times((10**7, 10**7 * compute), (cost_ns, cost_ns * collective))}
    slow_down, _ = fit_slow_down([one])
    trace = trace_of([[iteration(0, (0,), 10**8, 0)]] * 2, [4])
    fabric = Fabric.from_table([(2, 4, cost_ns)]).with_processor(slow_down=slow_down)
    late_ns = predict(trace, fabric, world_size=2).iteration_ns - 10**8
    assert late_ns == pytest.approx(min(delayed, MOST_DELAYED) * cost_ns, abs=2)


def test_the_mean_over_the_sizes_counts_and_noise_neither_stops_nor_speeds_computation_up():
    half, none = times((10, 20), (5, 5)), times((10, 10), (5, 5))
    assert fit_slow_down([{1: half, 2: none}])[0] == pytest.approx(1 / 0.75)
    assert fit_slow_down([{1: times((10, 9), (5, 5))}])[0] == 1
    assert fit_slow_down([{1: times((10, 1000), (5, 50))}])[0] == pytest.approx(1 / (1 - MOST_DELAYED))
