"""Extrapolation: costs at world sizes that were not measured."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric
from ddplab.simulator.fabric import Timing, Topology
from ddplab.simulator.fabric.extrapolation import (
    LATENCY_LAWS,
    LEVEL_NS,
    USUAL_NODE,
    extrapolated_table,
    growth_of,
    latency_law,
    table_between,
    table_beyond,
    wait_of_a_level,
)
from ddplab.simulator.fabric.measured_tables import Table

from ..strategies import tables
from .test_nccl_cost_model import links

SIZES = np.array([4**exponent for exponent in range(2, 15)])


def of_law(law: str, world_size: int) -> Table:
    """What a fabric costs that follows a law exactly."""
    latency = 5000 * LATENCY_LAWS[law](world_size)
    return Table(SIZES, np.rint(latency + SIZES * 2 * (world_size - 1) / world_size / 10))


LIBRARY_OF = {"tree": "nccl", "ring": "gloo"}
"""A library whose latency grows by the law if a single world size was measured."""


@given(st.sampled_from(list(LATENCY_LAWS)), st.integers(2, 64), st.integers(2, 512))
def test_a_fabric_that_follows_a_law_is_extrapolated(law, measured, world_size):
    table = {measured: of_law(law, measured)}
    extrapolated = table_beyond(table, measured, world_size, growth_of(table, LIBRARY_OF[law], None))
    np.testing.assert_allclose(extrapolated.ns, of_law(law, world_size).ns, rtol=1e-3)


@given(
    st.sampled_from(list(LATENCY_LAWS)),
    st.sampled_from(["nccl", "gloo"]),
    st.sets(st.sampled_from([2, 3, 4, 6, 8]), min_size=2),
)
def test_the_law_of_the_latency_is_read_from_the_data(law, library, world_sizes):
    """Tables that follow the law show its growth, so their weight changes nothing."""
    measured = {n: of_law(law, n) for n in sorted(world_sizes)}
    assert latency_law(measured, "neither") == law
    extrapolated = extrapolated_table(measured, 64, growth_of(measured, library, None))
    np.testing.assert_allclose(extrapolated.ns, of_law(law, 64).ns, rtol=2e-3)


NODES = Topology(levels=tuple(links(8, inside=300e9, network=100e9)))


@given(st.sampled_from([16, 32, 64]), st.integers(0, 10**9), st.floats(0.3, 3))
def test_described_links_add_the_latency_of_their_hops_and_slow_bytes_by_the_ratio_of_their_rates(ranks, size, fast):
    """The table of one node reaches `fast` times the described rate; trees over the nodes have log2(nodes) levels.

    As much as this counts what the links give alone, of which the table shows nothing.
    """
    alpha_ns, ns_per_byte = 20_000, 2 * 7 / 8 / 300 / fast
    sizes = [2**exponent for exponent in range(10, 31, 2)]
    table = Fabric.from_table([(8, each, round(alpha_ns + ns_per_byte * each)) for each in sizes])
    fabric = table.model_copy(update={"extrapolate": True, "topology": NODES})
    hops_ns = 2 * 14_000 * (ranks // 8).bit_length() - 2 * 14_000
    slower = 3 * (1 - 1 / ranks) / (1 - 1 / 8)
    size = max(size, sizes[0])
    along_links_ns = alpha_ns + hops_ns + ns_per_byte * slower * size
    alone_ns = Fabric.from_topology(NODES).all_reduce_ns(size, ranks)
    assert fabric.all_reduce_ns(size, ranks) == pytest.approx((along_links_ns * alone_ns) ** 0.5, rel=0.03)


@given(st.floats(0.5, 2))
def test_nccls_tables_count_as_much_as_the_law_and_gloos_not_at_all(shown):
    """From 2 to 4 ranks the bytes grew `shown` times as much as on a ring: 1.5 times."""
    small = of_law("ring", 4).ns / (1 + shown * 0.5)
    measured = {2: Table(SIZES, small), 4: Table(SIZES, of_law("ring", 4).ns)}
    large = [
        extrapolated_table(measured, 8, growth_of(measured, library, None)).ns[-1] / measured[4].ns[-1]
        for library in ("nccl", "gloo")
    ]
    relative = 1 - 1 / (1 + shown * 0.5)
    assert large == [pytest.approx(1 + (0.5 + 0.5 * relative * 3) / 6, rel=1e-2), pytest.approx(7 / 6, rel=1e-2)]


@given(tables, tables, st.integers(3, 7), st.integers(0, 10**9))
def test_between_two_measured_world_sizes_the_cost_is_between_theirs(two, eight, world_size, size):
    measured = Fabric.from_table([(n, *row) for n, rows in ((2, two), (8, eight)) for row in rows])
    fabric = measured.model_copy(update={"extrapolate": True})
    ends = [max(1, fabric.all_reduce_ns(row[0], n)) for row in two + eight for n in (2, 8)]
    at = min(max(size, min(two + eight)[0]), max(two + eight)[0])
    assert min(ends) <= max(1, fabric.all_reduce_ns(at, world_size)) <= max(ends)


def test_between_two_world_sizes_time_follows_a_power_of_the_ranks():
    two, eight = (Table(np.array([8]), np.array([ns])) for ns in (100.0, 400.0))
    assert table_between({2: two, 8: eight}, 2, 8, 4).ns.tolist() == [200]


def test_a_world_of_one_rank_is_not_extrapolated():
    one_rank = Fabric.from_table([(1, 8, 5)]).model_copy(update={"extrapolate": True})
    with pytest.raises(ValueError, match=re.escape("of [1], for which all-reduces were measured, got 4")):
        one_rank.all_reduce_ns(8, 4)


@given(st.integers(0, 30_000), st.floats(1.0, 700.0), st.sampled_from([8, 16, 64]))
def test_what_an_idle_link_lets_pass_at_once_is_no_latency_that_grows_with_the_ranks(burst, ns_per_byte, world_size):
    """After a pause, a token-bucket filter lets a burst pass for free, so times of small messages bend upwards."""
    sizes = [16_000, 32_000, 64_000, 128_000, 256_000]

    def timings(ranks: int) -> list[Timing]:
        factor = 2 * (ranks - 1) / ranks * ns_per_byte
        return [
            Timing(world_size=ranks, size_bytes=size, ns=round(factor * max(size - burst, 1_000))) for size in sizes
        ]

    fabric = Fabric(all_reduce=(*timings(2), *timings(4)), library="gloo", extrapolate=True)
    costs = [fabric.all_reduce_ns(size, world_size) for size in sizes[1:]]
    ideal = [2 * (world_size - 1) / world_size * ns_per_byte * (size - burst) for size in sizes[1:]]
    assert costs == sorted(costs)
    assert costs[1:] == pytest.approx(ideal[1:], rel=0.25)


@given(wait=st.floats(0, 100), nodes=st.sets(st.sampled_from([2, 4, 8, 16]), min_size=2), more=st.integers(17, 999))
def test_between_nodes_each_doubling_adds_hops_and_a_wait_by_the_square_root_of_the_message(wait, nodes, more):
    """Tables of several nodes that follow the law are continued by it."""

    def table(ranks):
        level_ns = LEVEL_NS + wait * np.sqrt(SIZES)
        return Table(SIZES, 1e6 + SIZES + level_ns * np.log2(ranks))

    measured = {8 * count: table(8 * count) for count in sorted(nodes)}
    extrapolated = extrapolated_table(measured, 8 * more, growth_of(measured, "nccl", None))
    np.testing.assert_allclose(extrapolated.ns, table(8 * more).ns, rtol=1e-3)


@given(st.sets(st.sampled_from([8, 16, 32, 64]), min_size=2), st.integers(65, 9999))
def test_more_nodes_never_take_less_time(measured, more):
    """Also where measured times fall from one number of GPUs to the next, as at a change of protocol."""
    rng = np.random.default_rng(sum(measured))
    times = {ranks: np.sort(rng.integers(10**4, 10**7, len(SIZES))).astype(float) for ranks in sorted(measured)}
    tables = {ranks: Table(SIZES, ns) for ranks, ns in times.items()}
    assert wait_of_a_level(tables, USUAL_NODE) is not None
    assert (extrapolated_table(tables, more, growth_of(tables, "nccl", None)).ns >= times[max(measured)]).all()


@pytest.mark.parametrize(("measured", "asked", "lacks"), [((4, 8), 128, "several nodes"), ((16, 64), 8, "one node")])
def test_tables_of_one_node_do_not_reach_several_without_described_links_nor_back(measured, asked, lacks):
    rows = tuple(Timing(world_size=n, size_bytes=2**20, ns=100_000) for n in measured)
    alone = Fabric(all_reduce=rows, extrapolate=True)
    message = f"expected a table of {lacks} (of 8 GPUs) or described links, to extrapolate to {asked} ranks, got"
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        alone.all_reduce_ns(2**20, asked)
    assert "\n" not in str(caught.value)
    assert alone.model_copy(update={"topology": NODES}).origin(asked) == "extrapolated"
    assert alone.model_copy(update={"library": "gloo"}).origin(asked) == "extrapolated"
    with_other = (*rows, Timing(world_size=2 if asked == 8 else 32, size_bytes=2**20, ns=90_000))
    assert alone.model_copy(update={"all_reduce": with_other}).origin(asked) == "extrapolated"
