"""Link sharing: how much collectives at the same time slow each other down, and their weights."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric
from ddplab.simulator.fabric import Sharing
from ddplab.simulator.fabric.link_sharing import relative_weights


def test_weights_between_the_measured_sizes_follow_a_power_of_the_size():
    rows = tuple(Sharing(size_bytes=size, factor=2.0, weight=weight) for size, weight in [(100, 1.0), (10_000, 10.0)])
    fabric = Fabric.from_alpha_beta(1, 1.0).model_copy(update={"sharing": rows})
    weights = [fabric.link_share(size, 4).weight for size in (1, 100, 400, 10_000, 10**6)]
    assert weights == pytest.approx([1.0, 1.0, 2.0, 10.0, 10.0])


@given(st.lists(st.integers(4, 10**8), max_size=6, unique=True).map(sorted), st.floats(0, 1), st.floats(1.25, 3))
def test_weights_are_found_from_the_slow_down_beside_a_larger_message(sizes, power, slow_down):
    """Every message takes a share of the link in proportion to its size to some power."""
    alone_ns = {size: 10.0 * size for size in sizes}
    two_ns = {size: slow_down * alone_ns[size] for size in sizes}
    beside_ns = {
        size: (1 + (slow_down - 1) * (larger / size) ** power) * alone_ns[size]
        for size, larger in itertools.pairwise(sizes)
    }
    expected = [(size / sizes[0]) ** power for size in sizes]
    assert relative_weights(alone_ns, two_ns, beside_ns) == pytest.approx(expected)


def test_sharing_slows_in_between_the_measured_sizes_too():
    rows = (Sharing(size_bytes=0, factor=1.0), Sharing(size_bytes=100, factor=2.0))
    fabric = Fabric.from_alpha_beta(1, 1.0).model_copy(update={"sharing": rows})
    assert [fabric.link_share(size, 4).slow_down for size in (0, 50, 100, 500)] == [1.0, 1.5, 2.0, 2.0]


def test_collectives_on_described_links_share_the_bytes_a_second_and_not_the_latency():
    fabric = Fabric.from_alpha_beta(1000, 1e9)
    alone = 2 * 1000 + 8000
    assert fabric.all_reduce_ns(8000, 2) == alone
    assert fabric.link_share(8000, 2).slow_down == (2 * 1000 + 2 * 8000) / alone
    assert fabric.link_share(0, 2).slow_down == 1.0


def test_measured_collectives_do_not_slow_each_other_unless_that_was_measured():
    assert Fabric.from_table([(2, 8, 5), (2, 16, 5)]).link_share(8, 2).slow_down == 1.0
