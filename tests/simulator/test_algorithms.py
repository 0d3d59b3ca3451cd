"""Costs of the collective algorithms on a hierarchy of links."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric
from ddplab.simulator.fabric import Level, Topology, algorithms
from ddplab.simulator.fabric.algorithms import ALL_REDUCE, BROADCAST, LATEST, all_reduce_costs

FORMULAS = {**ALL_REDUCE, **{f"broadcast of {library}": cost for library, cost in BROADCAST.items()}}
every_formula = pytest.mark.parametrize("name", FORMULAS)
sizes = st.integers(0, 10**11)


def level(members: int, latency_ns: int = 1000, bytes_per_s: float = 1e9, *, reduces: bool = False) -> Level:
    return Level(name="x", members=members, latency_ns=latency_ns, bytes_per_s=bytes_per_s, reduces=reduces)


levels = st.lists(
    st.builds(level, st.integers(1, 9), st.integers(0, 100_000), st.floats(1e6, 1e12), reduces=st.booleans()),
    min_size=1,
    max_size=3,
)
"""[Level(members=8, latency_ns=2000, bytes_per_s=3e11), Level(members=2, latency_ns=6000, bytes_per_s=5e10)]"""

NODES = [level(8, 1000, 1e11), level(4, 5000, 1e10)]  # 0.01 and 0.1 ns a byte


def algorithm_for(fabric: Fabric, size_bytes: int, world_size: int) -> str:
    """The all-reduce algorithm that is used on described links."""
    return fabric._curves.all_reduce(world_size).cheapest(size_bytes)[0]


def ns(name: str, hierarchy, *sizes_bytes: int) -> list[float]:
    return FORMULAS[name](hierarchy).costs_ns(np.array(sizes_bytes)).tolist()


@pytest.mark.parametrize(
    ("name", "hierarchy", "latency_ns", "ns_per_byte"),
    [
        ("ring", [level(4)], 6 * 1000, 6 / 4),
        ("ring", NODES, 2 * (3 * 5000 + 28 * 1000), 62 / 32 * 0.1),
        ("in_network", [level(4, reduces=True)], 2 * 1000, 1.0),
        ("in_network", [NODES[0], level(4, 5000, 1e10, reduces=True)], 14 * 1000 + 2 * 5000, 0.1),
        ("tree", [level(8)], 2 * 3 * 1000, 2.0),
        ("tree", [level(2)], 2 * 1000, 1.0),
        ("tree", [level(3)], 2 * 2 * 1000, 1.5),
        ("tree", NODES, 2 * (7 * 1000 + 2 * 5000), 2 * 0.1),
        ("tree", [level(8), level(1)], 2 * 7 * 1000, 14 / 8),  # inside a node: a chain
        ("tree", [NODES[0], level(2, 5000, 1e10)], 2 * (7 * 1000 + 5000), 0.1),
        ("broadcast of gloo", NODES, 3 * 1000 + 2 * 5000, 3 * 0.01 + 2 * 0.1),
        ("broadcast of nccl", NODES, 28 * 1000 + 3 * 5000, 0.1),
    ],
)
def test_latency_and_time_of_a_byte_are_those_counted_by_hand(name, hierarchy, latency_ns, ns_per_byte):
    cost = FORMULAS[name](hierarchy)
    assert (cost.latency_ns, cost.ns_per_byte) == pytest.approx((latency_ns, ns_per_byte))


def test_a_pipeline_has_as_many_pieces_as_are_best():
    """Against brute force over the number of pieces; the closed form allows fractions, so it is never dearer."""
    cost = algorithms.Cost(latency_ns=6000, ns_per_byte=2.0, fill=5)
    for size in (0, 100, 10_000, 1_000_000):
        brute = min((5 + pieces) * (1000 + 2.0 * size / pieces) for pieces in range(1, 300))
        assert 0.99 * brute <= cost.costs_ns(np.array([size]))[0] <= brute


def test_of_one_step_there_is_nothing_to_fill():
    assert ns("broadcast of nccl", [level(2)], 0, 500) == [1000, 1500]


@every_formula
@given(levels=levels, size=sizes, more=sizes)
def test_more_bytes_never_cost_less(name, levels, size, more):
    less, greater = ns(name, levels, size, size + more)
    assert less <= greater * (1 + 1e-12)


@every_formula
@given(levels=levels, size=sizes, factor=st.floats(1, 100), data=st.data())
def test_more_bandwidth_and_less_latency_never_cost_more(name, levels, size, factor, data):
    position = data.draw(st.integers(0, len(levels) - 1))
    old = levels[position]
    better = {"bytes_per_s": old.bytes_per_s * factor, "latency_ns": int(old.latency_ns / factor)}
    faster = [*levels[:position], old.model_copy(update=better), *levels[position + 1 :]]
    assert ns(name, faster, size)[0] <= ns(name, levels, size)[0] * (1 + 1e-12)


@every_formula
@given(levels=levels, size=sizes)
def test_nobody_to_send_to_costs_nothing(name, levels, size):
    alone = [one.model_copy(update={"members": 1}) for one in levels]
    assert ns(name, alone, size) == [0.0]


@pytest.mark.parametrize("name", [name for name in ALL_REDUCE if name != "in_network"])
@given(levels=levels, size=sizes)
def test_no_member_sends_less_than_its_share(name, levels, size):
    """The lower bound of Patarasu and Yuan 2009, which holds for the groups of any level as it does for ranks."""
    bound = max(2 * (one.size - 1) / one.size * size * one.ns_per_byte for one in levels)
    assert ns(name, levels, size)[0] >= bound * (1 - 1e-12)


@given(levels=levels, size=sizes)
def test_in_the_network_each_byte_still_crosses_each_link_once(levels, size):
    bound = max((size * one.ns_per_byte for one in levels if one.size > 1), default=0.0)
    assert ns("in_network", levels, size)[0] >= bound * (1 - 1e-12)


@every_formula
@given(levels=levels)
def test_an_empty_message_passes_at_least_one_hop_of_each_level(name, levels):
    hops = [one.latency_ns for one in levels if one.size > 1]
    assert ns(name, levels, 0)[0] >= max(hops, default=0) * (1 - 1e-12)


@given(levels=levels, sizes=st.lists(sizes, min_size=1, max_size=5))
def test_gloo_runs_a_ring_and_nccl_the_cheapest_of_its_algorithms_and_protocols(levels, sizes):
    world_size, topology = prod(one.size for one in levels), Topology(levels=tuple(levels))
    gloo, nccl = (Fabric.from_topology(topology, library=library) for library in ("gloo", "nccl"))
    ring = gloo.model_copy(update={"algorithm": "ring"})
    for fabric in (gloo, nccl):
        found = fabric.all_reduce_costs_ns(np.array(sizes), world_size)
        assert found.tolist() == [fabric.all_reduce_ns(size, world_size) for size in sizes]
        ordered = [fabric.all_reduce_ns(size, world_size) for size in sorted(sizes)]
        assert ordered == sorted(ordered)
    if world_size > 1:
        assert [gloo.all_reduce_ns(size, world_size) for size in sizes] == [
            ring.all_reduce_ns(size, world_size) for size in sizes
        ]
        choices = all_reduce_costs(topology.in_use(world_size), "nccl", "library", LATEST)
        for size in sizes:
            by_name = {name: one.costs_ns(np.array([size]))[0] for name, one in choices.costs.items()}
            assert by_name[algorithm_for(nccl, size, world_size)] == min(by_name.values())


def test_switches_that_reduce_are_used_only_where_the_ranks_need_them():
    nodes = Topology(levels=(NODES[0], level(4, 5000, 1e10, reduces=True)))
    fabric = Fabric.from_topology(nodes)
    assert algorithm_for(fabric, 10**9, 32) == "in_network"
    assert algorithm_for(fabric, 10**9, 8) == "ring Simple"
    assert "in_network" not in all_reduce_costs([*NODES, level(1, reduces=True)], "nccl", "library", LATEST).costs
    with pytest.raises(ValueError, match=r"^fabric: algorithm: expected a topology with a level that reduces"):
        Fabric.from_topology(Topology(levels=tuple(NODES)), algorithm="in_network")


@given(levels=levels, size=sizes)
def test_sharing_costs_between_nothing_and_all_of_it(levels, size):
    fabric, world_size = Fabric.from_topology(Topology(levels=tuple(levels))), prod(one.size for one in levels)
    alone = fabric.all_reduce_ns(size, world_size)
    beside = fabric.link_share(size, world_size).slow_down * alone
    assert alone <= beside * (1 + 1e-12)
    assert beside <= 2 * (alone + 1)  # both are rounded to whole nanoseconds


def test_fewer_cards_than_ranks_share_the_rate_of_their_node():
    """The rate of a level is that of one member: of a node with all its cards, whatever ranks are inside."""
    two, eight = ([level(ranks, 0, 1e15), level(4, 0, 1e10)] for ranks in (2, 8))
    assert ns("tree", two, 10**9) == pytest.approx(ns("tree", eight, 10**9), rel=1e-3)
