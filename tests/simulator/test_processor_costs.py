"""Processor costs: slow-downs of computing and collectives beside each other."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.fabric import Contention, slowdowns_of

CONTENTION = [
    Contention(size_bytes=0, running=2, compute=1.0, collective=2.0),
    Contention(size_bytes=100, running=2, compute=2.0, collective=4.0),
    Contention(size_bytes=50, running=4, compute=3.0),
]


def test_contention_is_read_between_sizes_and_at_the_next_smaller_number_in_flight():
    found = slowdowns_of(CONTENTION, [0, 50, 500], most=5)
    assert found.compute == ((1.0, 1.0, 1.0, 3.0, 3.0), (1.5, 1.5, 1.5, 3.0, 3.0), (2.0, 2.0, 2.0, 3.0, 3.0))
    assert [row[:4] for row in found.collective] == [(2, 2, 2, 1), (3, 3, 3, 1), (4, 4, 4, 1)]


@given(st.permutations(CONTENTION), st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(1, 6))
def test_contention_stays_within_what_was_measured_whatever_the_order_of_the_rows(rows, sizes, most):
    found = slowdowns_of(rows, sizes, most)
    assert found == slowdowns_of(CONTENTION, sizes, most)
    assert all(1 <= factor <= 3 for row in found.compute for factor in row)
    assert all(1 <= factor <= 4 for row in found.collective for factor in row)
    assert slowdowns_of([], sizes, most) is slowdowns_of([Contention(size_bytes=7)], sizes, most) is None
