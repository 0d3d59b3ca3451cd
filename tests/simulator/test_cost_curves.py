"""Cost curves: which costs hold at a world size, and how a slow link changes them."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Fabric
from simulator.fabric import Level, Timing, Topology

from ..strategies import tables


def test_alone_in_the_world_nothing_is_sent():
    assert Fabric.from_table([(2, 8, 5)]).all_reduce_ns(8, 1) == 0


def test_a_world_size_that_was_not_measured_is_named():
    with pytest.raises(ValueError, match=re.escape("of [2, 4], for which all-reduces were measured, got 8")):
        Fabric.from_table([(2, 8, 5), (4, 8, 5)]).all_reduce_ns(8, 8)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused(world_size):
    with pytest.raises(ValueError, match=f"^world_size: expected at least 1, got {world_size}$"):
        Fabric.from_alpha_beta(1, 1.0).all_reduce_ns(8, world_size)


@given(tables, st.integers(0, 10**9), st.floats(1, 10))
def test_a_slow_link_slows_the_bytes_and_not_the_latency(table, size, slow):
    even = Fabric.from_table([(4, size, ns) for size, ns in table])
    uneven = even.model_copy(update={"slow_link": slow})
    assert uneven.all_reduce_ns(0, 4) == even.all_reduce_ns(0, 4)
    assert uneven.all_reduce_ns(size, 4) >= even.all_reduce_ns(size, 4)
    assert uneven.all_reduce_ns(size, 1) == 0


def test_a_link_twice_as_slow_doubles_what_the_bytes_cost():
    fabric = Fabric.from_alpha_beta(10, 1e9).model_copy(update={"slow_link": 2.0})
    assert fabric.all_reduce_ns(4000, 4) == 6 * 10 + 2 * 6 * 1000


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_a_broadcast_is_measured_or_described_or_bounded_by_an_all_reduce(library):
    measured = Fabric(
        all_reduce=tuple(Timing(world_size=n, size_bytes=8, ns=9) for n in (2, 4)),
        broadcast=(Timing(world_size=2, size_bytes=8, ns=5),),
        topology=Topology(levels=(Level(name="link", latency_ns=3, bytes_per_s=1e9),)),
        library=library,
    )
    assert [measured.broadcast_ns(8, n) for n in (1, 2, 4)] == [0, 5, 9]
    assert measured.broadcast_ns(0, 8) == (7 if library == "nccl" else 3) * 3


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


def test_where_costs_come_from():
    table, links = Fabric.from_table([(2, 8, 5)]), Fabric.from_alpha_beta(1, 1e9)
    fabric = Fabric(all_reduce=table.all_reduce, topology=links.topology)
    assert [fabric.origin(n) for n in (1, 2, 4)] == ["none", "measured", "described"]
    assert fabric.model_copy(update={"extrapolate": True}).origin(4) == "extrapolated"
