"""Summaries of samples: spreads, lines and slow-downs; timed collectives."""

import threading
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddplab.calibration.repeated_timing import (
    ContentionTimes,
    TimedCollective,
    fit_linear,
    interval_of_median,
    relative_spread,
    slowdown_factor,
    timed_collectives,
)
from ddplab.simulator.fabric import Linear

positive = st.integers(1, 10**9)
times = st.lists(positive, min_size=1, max_size=12)


@given(st.lists(st.integers(10**6, 10**8), min_size=1, max_size=12), st.integers(1, 1000), st.randoms())
def test_spread_is_a_fraction_whatever_the_unit_and_the_order(taken, unit, random):
    shuffled = random.sample(taken, len(taken))
    assert relative_spread([unit * ns for ns in shuffled]) == pytest.approx(relative_spread(taken))
    assert relative_spread(taken) >= 0


def test_a_machine_too_busy_to_measure_is_named():
    with pytest.raises(ValueError, match="got 525 times; the machine is too busy"):
        relative_spread([1, 1, 1, 400, 500])


@pytest.mark.parametrize("count", [3, 5, 7, 20])
def test_the_spread_of_normal_samples_is_that_of_their_middle_ninety_percent(count):
    """However few they are: the quantiles of numpy's default would give 0.8 of it for 7."""
    drawn = np.random.default_rng(0).normal(1000, 10, size=(4000, count))
    assert np.mean([relative_spread(row) for row in drawn]) == pytest.approx(0.01645, rel=0.05)


@pytest.mark.parametrize("count", range(1, 13))
def test_the_interval_of_a_median_is_the_narrowest_that_holds_it_with_90_percent(count):
    """The median lies between the k-th and the k-th last sample if k to n - k samples are below it."""
    found = interval_of_median(range(count))
    below = [sum(bits) for bits in product((0, 1), repeat=count)]

    def chance(k: int) -> float:
        return np.mean([k <= number <= count - k for number in below])

    if found is None:
        assert count < 5
        assert chance(1) < 0.9
    else:
        low, high = found
        assert high == count - 1 - low
        assert chance(low + 1) >= 0.9 > chance(low + 2)


lines = st.builds(Linear, fixed_ns=st.floats(1, 1e6), ns_per_byte=st.floats(1e-3, 10))
sizes = st.lists(st.integers(1, 10**8), min_size=2, max_size=6, unique=True)


@given(lines, sizes)
def test_a_line_is_fitted_by_itself(line, sizes):
    found = fit_linear({size: [line.fixed_ns + line.ns_per_byte * size] * 3 for size in sizes})
    for size in sizes:
        assert found(size) == pytest.approx(line(size), rel=1e-3, abs=1)


@given(st.dictionaries(st.integers(1, 10**8), st.lists(st.integers(0, 10**9), min_size=1), max_size=6))
def test_no_cost_is_fitted_below_zero(taken):
    """Linear itself refuses negative costs."""
    assert (fit_linear(taken) == Linear()) == (not taken)


@given(positive, st.integers(1, 20), st.integers(1, 5), st.integers(1, 3))
def test_contended_times_over_times_alone_are_the_slowdown(ns, factor, rounds, ranks):
    measured = ContentionTimes([[ns, ns]] * rounds, [[factor * ns] * 3] * rounds)
    assert slowdown_factor([measured] * ranks) == pytest.approx((factor, 0))


def test_ranks_are_averaged_and_a_disturbed_round_shows_in_the_band_alone():
    twice = ContentionTimes([[10] * 4] * 4, [[20] * 4] * 4)
    disturbed = ContentionTimes(twice.alone, [*twice.contended[:3], [200] * 4])
    assert slowdown_factor([twice, ContentionTimes(twice.alone, [[40] * 4] * 4)]) == (3, 0)
    factor, band = slowdown_factor([disturbed])
    assert factor == 2
    assert band > 1


def test_collectives_are_no_longer_timed_once_the_block_has_failed():
    before = dist.all_reduce
    with suppress(ZeroDivisionError), timed_collectives("all_reduce"):
        assert dist.all_reduce is not before
        raise ZeroDivisionError
    assert dist.all_reduce is before


def test_waiting_for_a_collective_includes_its_callback():
    """Other callbacks of a collective may run before its end has been noted."""
    call = TimedCollective(issued=0)
    late = threading.Timer(0.05, call.finish)
    late.start()
    assert call.wait() == call.done.result() > 0
    late.join()
