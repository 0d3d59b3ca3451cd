"""Measured tables: costs at, between and beyond the measured sizes, and the protocols behind a table."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric
from ddplab.simulator.fabric.measured_tables import Table, relative_squared_error, segments

from ..strategies import tables


@given(tables, st.integers(0, 10**9))
def test_measured_sizes_cost_what_was_measured_and_those_between_two_something_between(table, size):
    table = sorted(table)
    fabric = Fabric.from_table([(2, *row) for row in table])
    assert [(one, fabric.all_reduce_ns(one, 2)) for one, _ in table] == table
    for (small, a), (large, b) in itertools.pairwise(table):
        if small <= size <= large:
            assert min(a, b) <= fabric.all_reduce_ns(size, 2) <= max(a, b)


def test_lines_join_the_points_and_the_last_one_goes_on():
    fabric = Fabric.from_table([(2, 200, 30), (2, 100, 10), (2, 400, 40)])
    assert [fabric.all_reduce_ns(size, 2) for size in (0, 100, 150, 300, 400, 800)] == [0, 10, 20, 35, 40, 60]


@pytest.mark.parametrize(("second_ns", "ns"), [(800, 800), (700, 800), (1200, 404), (1600, 8), (2400, 8), (None, 8)])
def test_below_the_smallest_size_the_first_line_is_continued_down_to_its_latency(second_ns, ns):
    rows = [(2, 1000, 800)] + [(2, 2000, second_ns)] * (second_ns is not None)
    assert Fabric.from_table(rows).all_reduce_ns(10, 2) == ns


@given(tables, st.integers(0, 10**9), st.integers(0, 10**9))
def test_below_the_smallest_size_a_smaller_message_never_takes_longer(table, one, other):
    fabric, (first, first_ns) = Fabric.from_table([(2, *row) for row in table]), min(table)
    less, more = (min(size, first) for size in sorted((one, other)))
    assert fabric.all_reduce_ns(less, 2) <= fabric.all_reduce_ns(more, 2) <= first_ns


@given(tables, st.integers(1, 10**10))
def test_beyond_the_largest_size_nothing_gets_cheaper(table, more):
    size, ns = max(table)
    assert Fabric.from_table([(2, s, t) for s, t in table]).all_reduce_ns(size + more, 2) >= ns


@pytest.mark.parametrize("last_ns", [9, 10])
def test_where_the_last_line_does_not_rise_time_grows_with_the_bytes(last_ns):
    assert Fabric.from_table([(2, 100, 10), (2, 200, last_ns)]).all_reduce_ns(2000, 2) == 10 * last_ns


def table_of(protocols, sizes) -> Table:
    """The table of a library that uses protocol `i` (latency, slope) for the i-th list of sizes."""
    rows = [(size, a + b * size) for (a, b), part in zip(protocols, sizes, strict=True) for size in part]
    return Table(np.array([size for size, _ in rows]), np.array([ns for _, ns in rows]))


@st.composite
def switching(draw):
    """Protocols, each with half the slope and ten times the latency of the one before; three sizes or more each."""
    count = draw(st.integers(1, 3))
    latency, slope = draw(st.integers(100, 10_000)), draw(st.floats(0.01, 10))
    protocols = [(latency * 10.0**step, slope / 2**step) for step in range(count)]
    lengths = draw(st.lists(st.integers(3, 5), min_size=count, max_size=count))
    exponents = iter(range(sum(lengths)))
    sizes = [[int(latency / slope) * 2 ** next(exponents) + 1 for _ in range(length)] for length in lengths]
    return protocols, sizes


@given(switching())
def test_the_protocols_behind_a_table_are_found(protocols_and_sizes):
    """The noise is set far below what rounding to a float leaves, so every switch counts."""
    protocols, sizes = protocols_and_sizes
    found = segments(table_of(protocols, sizes), noise=1e-6)
    assert [piece.from_bytes for piece in found] == [part[0] for part in sizes]
    for piece, (latency, slope) in zip(found, protocols, strict=True):
        assert (piece.alpha_ns, piece.ns_per_byte) == pytest.approx((latency, slope), rel=1e-5)


def errors(found, table: Table) -> float:
    ends = [piece.from_bytes for piece in found[1:]] + [np.inf]
    parts = [
        (p, (table.sizes_bytes >= p.from_bytes) & (table.sizes_bytes < end))
        for p, end in zip(found, ends, strict=True)
    ]
    return sum(relative_squared_error(p, table.sizes_bytes[part], table.ns[part]) for p, part in parts)


@given(tables)
def test_segments_miss_no_more_than_any_single_line(rows):
    table = Table(*(np.array(column) for column in zip(*sorted(rows), strict=True)))
    found = segments(table)
    (single,) = segments(table, noise=1e9)
    assert errors(found, table) <= relative_squared_error(single, table.sizes_bytes, table.ns) * (1 + 1e-9)
    assert all(piece.alpha_ns >= 0 and piece.ns_per_byte >= 0 for piece in found)


def test_noise_is_no_protocol():
    sizes = [2**exponent for exponent in range(10, 26)]
    noisy = [(5000 + size / 10) * (1.02 if exponent % 2 else 0.98) for exponent, size in enumerate(sizes)]
    assert len(segments(Table(np.array(sizes), np.array(noisy)))) == 1
