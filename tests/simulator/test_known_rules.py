"""Known rules close buckets as their sources do."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.bucketing import MIB, assign_buckets
from ddplab.simulator.fabric import Segment
from ddplab.simulator.tuning.tune import (
    caps_of_three_times,
    closed_by,
    distinct_caps,
    merged_gradients,
    rounded_up,
    saturating_cap_bytes,
    square_root_cap_bytes,
)

sizes = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@given(sizes, st.integers(0, 120))
def test_a_bucket_that_reaches_the_cap_closes_as_in_torch(sizes_bytes, cap):
    counts = closed_by("reaches the cap", sizes_bytes, cap)
    assert counts == [len(one) for one in assign_buckets(sizes_bytes, [cap], order=range(len(sizes_bytes)))]


@given(sizes, st.integers(0, 120))
def test_a_bucket_of_at_most_the_cap_exceeds_it_only_with_a_single_gradient(sizes_bytes, cap):
    counts = closed_by("at most the cap", sizes_bytes, cap)
    assert sum(counts) == len(sizes_bytes)
    first = 0
    for count, following in zip(counts, [*counts[1:], None], strict=True):
        filled = sum(sizes_bytes[first : first + count])
        assert filled <= cap or count == 1
        if following is not None:
            assert filled + sizes_bytes[first + count] > cap
        first += count


def test_the_saturating_cap_has_nine_tenths_of_the_rate():
    line = Segment(0, alpha_ns=100_000, ns_per_byte=0.02)
    cap = saturating_cap_bytes(line)
    assert line.ns_per_byte * cap / (line.alpha_ns + line.ns_per_byte * cap) == pytest.approx(0.9)
    assert saturating_cap_bytes(Segment(0, 0, 1)) == 10 * MIB
    assert saturating_cap_bytes(Segment(0, 1e9, 1e-3)) == 500 * MIB


@given(st.floats(1, 1e6), st.floats(1e-3, 10), st.integers(1, 10**9), st.floats(0.1, 10))
def test_no_other_size_has_less_overhead_than_the_square_root(latency, rate, total, factor):
    def overhead(size):
        return latency * total / size + rate * size

    cap = square_root_cap_bytes(Segment(0, latency, rate), total)
    assert overhead(cap) <= overhead(factor * cap) * (1 + 1e-9)


@given(st.integers(1, 10**11), st.floats(1, 1e10), st.floats(1, 1e8), st.floats(1, 1e10))
def test_caps_of_three_times_hold_everything_and_double_if_communication_lasts_longer(total, every, mib, computation):
    caps = caps_of_three_times(total, every, mib, computation)
    assert all(cap > 0 for cap in caps)
    if len(caps) > 1:
        assert every > computation
        assert sum(caps) >= total * (1 - 1e-9)
        assert all(large == 2 * small for small, large in pairwise(caps))
    else:
        assert caps[0] <= total
        assert caps[0] == total or every <= computation


@given(st.floats(1e5, 1e7), st.floats(1e7, 1e10), st.floats(0.1, 10))
def test_no_other_number_of_equal_buckets_exposes_less(latency, every, factor):
    """Each bucket costs two all-reduces of 1 MiB, and one bucket overlaps with nothing."""
    (cap,) = caps_of_three_times(10**9, every, latency, inf)

    def exposed(size):
        return 2 * latency * 1e9 / size + every * size / 1e9

    assert exposed(cap) <= exposed(min(1e9, factor * cap)) * (1 + 1e-9)


@given(st.floats(1e-12, 1e12))
def test_a_rounded_value_has_three_digits_and_is_not_below(value):
    rounded = rounded_up(value)
    assert value * (1 - 1e-12) <= rounded <= value * 1.0101
    assert float(f"{rounded:.3g}") == pytest.approx(rounded, rel=1e-12)


def test_a_gradient_that_is_ready_within_a_latency_is_merged():
    """At 0 the first bucket could start; 90 is less than a latency later. It then runs until 90 + 100 + 20."""
    assert merged_gradients(Segment(0, 100, 1), [10, 10, 10, 10], [0, 90, 200, 400]) == [2, 1, 1]
    assert merged_gradients(Segment(0, 0, 1), [10, 10], [0, 0]) == [1, 1]


@given(
    st.sampled_from(["reaches the cap", "at most the cap"]),
    st.lists(st.integers(1, 50), min_size=1, max_size=12),
    st.integers(1, 120),
)
def test_distinct_caps_are_the_largest_of_each_way_to_fill_buckets(rule, sizes_bytes, cap):
    caps = distinct_caps(rule, sizes_bytes, 10_000)
    ways = [tuple(closed_by(rule, sizes_bytes, one)) for one in caps]
    assert len(set(ways)) == len(ways)
    same = min((one for one in caps if one >= cap), default=caps[0])
    assert tuple(closed_by(rule, sizes_bytes, cap)) == ways[caps.index(same)]
    assert len(distinct_caps(rule, sizes_bytes, 2)) <= 2
