"""Cost curves: which costs hold at a world size, and how a slow link changes them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric
from ddplab.simulator.fabric import Level, Timing, Topology
from ddplab.simulator.fabric.algorithms import nccl_all_reduce, nccl_broadcast

from ..strategies import tables
from .test_nccl_cost_model import links

TWO_LEVELS = Topology(levels=tuple(links(8, inside=200e9, network=100e9)))


@given(tables, st.integers(0, 10**9), st.floats(1, 10))
def test_a_slow_link_slows_the_bytes_and_not_the_latency(table, size, slow):
    even = Fabric.from_table([(4, size, ns) for size, ns in table])
    uneven = even.model_copy(update={"slow_link": slow})
    assert uneven.all_reduce_ns(0, 4) == even.all_reduce_ns(0, 4)
    assert uneven.all_reduce_ns(size, 4) >= even.all_reduce_ns(size, 4)
    assert uneven.all_reduce_ns(size, 1) == 0


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_a_broadcast_is_measured_or_described_or_bounded_by_an_all_reduce(library):
    measured = Fabric(
        all_reduce=tuple(Timing(world_size=n, size_bytes=8, ns=9) for n in (2, 4)),
        broadcast=(Timing(world_size=2, size_bytes=8, ns=5),),
        topology=Topology(levels=(Level(name="link", latency_ns=3, bytes_per_s=1e9),)),
        library=library,
    )
    assert [measured.broadcast_ns(8, n) for n in (1, 2, 4)] == [0, 5, 9]
    described = measured.broadcast_ns(0, 8)
    assert described == 3 * 3 if library == "gloo" else described < measured.all_reduce_ns(0, 8)


@given(st.sampled_from([*range(2, 9), *range(16, 4096, 8)]), st.integers(0, 10**9))
def test_a_broadcast_of_nccl_takes_no_longer_than_an_all_reduce_by_a_ring(world_size, size_bytes):
    """A small message does not pay the hops of the protocol for large ones."""
    levels = TWO_LEVELS.in_use(world_size)
    rings = [cost for name, cost in nccl_all_reduce(levels).items() if name.startswith("ring")]
    broadcasts = list(nccl_broadcast(levels).values())
    once, twice = (
        min(float(cost.costs_ns(np.array([size_bytes]))[0]) for cost in some) for some in (broadcasts, rings)
    )
    assert twice / 2 * 0.95 <= once <= twice
    assert Fabric.from_topology(TWO_LEVELS).broadcast_ns(8, 1024) < 3_000_000


@given(st.integers(2, 64), st.integers(0, 10**7))
def test_an_all_gather_receives_every_other_ranks_bytes_however_all_reduces_are_done(world_size, size_bytes):
    """Switches that add up are no help with it: nothing is added up."""
    links = Topology(levels=(Level(name="nic", latency_ns=10, bytes_per_s=1e9, reduces=True),))
    fabric = Fabric.from_topology(links, algorithm="in_network")
    gathered = fabric.all_gather_costs_ns(np.array([size_bytes]), world_size)[0]
    assert gathered >= (world_size - 1) * size_bytes - 1
    table = Fabric.from_table([(world_size, 0, 100), (world_size, 10**9, 10**9 + 100)])
    assert table.all_gather_costs_ns(np.array([size_bytes]), world_size)[0] == (world_size * size_bytes + 100) // 2


def test_a_broadcast_grows_to_another_world_size_as_the_all_reduce_does():
    rows = [(2, 0, 100), (2, 1000, 1100), (4, 0, 200), (4, 1000, 1700)]
    all_reduces = tuple(Timing(world_size=n, size_bytes=size, ns=ns) for n, size, ns in rows)
    broadcasts = tuple(row.model_copy(update={"ns": row.ns // 2}) for row in all_reduces)
    fabric = Fabric(all_reduce=all_reduces, broadcast=broadcasts, extrapolate=True)
    for size in (0, 500, 1000, 5000):
        assert fabric.broadcast_ns(size, 8) == pytest.approx(fabric.all_reduce_ns(size, 8) / 2, rel=0.01)


NODES = Topology(levels=tuple(links(4, inside=450e9, network=100e9)))


@given(st.sampled_from([4, 8, 40]), st.floats(0.5, 2), st.integers(0, 2**36))
def test_described_links_continue_a_table_in_proportion(ranks, factor, size):
    """The table has `factor` times the costs of the links, so its continuation has, too."""
    links = Fabric.from_topology(NODES)
    rows = [(ranks, 2**power, round(factor * links.all_reduce_ns(2**power, ranks))) for power in (20, 21, 22)]
    continued = Fabric.merged(Fabric.from_table(rows), links)
    assert continued.all_reduce_ns(size, ranks) == pytest.approx(factor * links.all_reduce_ns(size, ranks), rel=0.05)
    for _, measured, ns in rows:
        assert continued.all_reduce_ns(measured, ranks) == ns


def test_a_message_far_below_a_table_of_large_ones_does_not_take_as_long():
    """1 KiB took the 12 ms of the smallest measured message, 512 MiB."""
    log = Fabric.from_table([(40, 2**29, 12_360_200), (40, 2**30, 22_676_000)])
    with_links = Fabric.merged(log, Fabric.from_topology(NODES))
    assert 20_000 < with_links.all_reduce_ns(1024, 40) < 400_000
    assert log.all_reduce_ns(1024, 40) < 2_100_000


def test_links_that_do_not_fit_the_measured_ranks_leave_the_table_as_it_is():
    log = Fabric.from_table([(6, 2**20, 80_000), (6, 2**21, 90_000)])
    with_links = Fabric.merged(log, Fabric.from_topology(NODES))  # 6 ranks are one node and a half
    assert with_links.all_reduce_ns(10, 6) == log.all_reduce_ns(10, 6)
    (sentence,) = with_links.assumed(np.array([10]), 6)
    assert "follow the first or last line of the table, with a wide error" in sentence


@pytest.mark.parametrize(
    ("sizes", "which"), [((10,), "smaller"), ((2**30,), "larger"), ((10, 2**30), "smaller and larger")]
)
def test_messages_beyond_a_table_are_named_with_how_they_are_priced(sizes, which):
    log = Fabric.from_table([(8, 2**10, 30_000), (8, 2**29, 4_300_000)])
    known = "all-reduces on 8 ranks were measured from 1 KiB to 512 MiB; "
    (alone,), (linked,) = (
        fabric.assumed(np.array(sizes), 8) for fabric in (log, Fabric.merged(log, Fabric.from_topology(NODES)))
    )
    assert alone.startswith(f"{known}{which} messages follow the first or last line of the table, with a wide error")
    joined = "take the time by the described links, times the factor that joins it to the table"
    assert linked == f"{known}{which} messages {joined}"
    assert log.assumed(np.array([2**10, 2**29]), 8) == log.assumed(np.array([1, 2**30]), 1) == ()
    assert Fabric.from_topology(NODES).assumed(np.array(sizes), 4) == ()


@pytest.mark.parametrize(("times", "is_told"), [(1.0, False), (2.0, False), (2.8, True), (40.0, True)])
def test_a_log_far_below_what_its_links_reach_is_called_out_of_order_with_what_to_run(times, is_told):
    expected_ns = Fabric.from_topology(NODES).all_reduce_ns(2**30, 16)
    log = Fabric.from_table([(16, 2**20, 200_000), (16, 2**30, round(times * expected_ns))])
    told = Fabric.merged(log, Fabric.from_topology(NODES)).assumed(np.array([2**25]), 16)
    assert [f"{times:.2g} times as long as the described links" in one for one in told] == [True] * is_told
    assert all("out of order: usual causes are" in one and "all_reduce_perf -b 1G" in one for one in told)
    assert log.assumed(np.array([2**25]), 16) == ()


def test_nccls_version_changes_the_costs_of_described_links():
    """Before 2.23, LL128 reached 0.7 of a ring's rate with one GPU per node."""
    lonely = Topology(levels=(NODES.levels[0].model_copy(update={"members": 1}), NODES.levels[1]))
    links = Fabric.from_topology(lonely)
    old = links.model_copy(update={"nccl_version": "2.18.3"})
    assert old.all_reduce_ns(2**23, 8) > links.all_reduce_ns(2**23, 8)
    with pytest.raises(ValueError, match=r"expected a version of NCCL such as 2\.21\.5, got '2\.x'"):
        Fabric.model_validate({"topology": NODES, "nccl_version": "2.x"})


def test_where_costs_come_from():
    table, links = Fabric.from_table([(2, 8, 5)]), Fabric.from_alpha_beta(1, 1e9)
    fabric = Fabric(all_reduce=table.all_reduce, topology=links.topology)
    assert [fabric.origin(n) for n in (1, 2, 4)] == ["none", "measured", "described"]
    assert fabric.model_copy(update={"extrapolate": True}).origin(4) == "extrapolated"
