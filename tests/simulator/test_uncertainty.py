"""Uncertainty: the error of a cost at a measured and at another world size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric
from ddplab.simulator.catalogue import load_fabric
from ddplab.simulator.fabric import Level, Timing, Topology
from ddplab.simulator.fabric.fabric import SOCKETS, USUAL_LATENCY

from .test_nccl_cost_model import links

NODES = Topology(levels=tuple(links(8, inside=230e9, network=200e9)))


def error(fabric, world_size, size=8):
    faster, slower = fabric.relative_errors(np.array([size]), world_size)
    assert faster <= slower
    return float(slower[0])


def test_the_error_grows_with_the_distance_from_the_measured_world_sizes():
    rows = tuple(Timing(world_size=n, size_bytes=8, ns=ns, spread=0.02) for n, ns in ((2, 5), (4, 5), (8, 12)))
    fabric = Fabric(all_reduce=rows, extrapolate=True, library="gloo")
    doublings = [error(fabric, n) for n in (1, 8, 16, 32, 64)]
    missed = 1 - fabric.model_copy(update={"all_reduce": rows[:2]}).all_reduce_ns(8, 8) / 12
    assert doublings == pytest.approx([0.0, 0.02, missed + 0.02, missed + 0.07, missed + 0.12])
    for fewer in (rows[1:2], rows[:2]):  # one smaller world size does not show how costs grow
        two = fabric.model_copy(update={"all_reduce": fewer})
        assert [error(two, n) for n in (8, 16, 32)] == pytest.approx([0.16, 0.21, 0.26])
    assert error(fabric, 6) == pytest.approx(0.16)
    assert error(Fabric.from_alpha_beta(1, 1e9), 8) == 0.14


@pytest.mark.parametrize("linked", [False, True])
def test_beyond_a_table_the_error_grows_with_the_distance_and_is_less_with_described_links(linked):
    rows = tuple(
        Timing(world_size=16, size_bytes=2**power, ns=2 ** (power - 5), spread=0.02) for power in range(20, 25)
    )
    fabric = Fabric(all_reduce=rows, topology=NODES if linked else None)
    assert [error(fabric, 16, 2**power) for power in (20, 22, 24)] == pytest.approx([0.02] * 3)
    below, above = ([error(fabric, 16, 2**power) for power in powers] for powers in ((19, 16, 10), (25, 28, 34)))
    assert below == sorted(below)
    assert above == sorted(above)
    assert 0.2 < below[0] < below[-1] < 60
    one_node = Fabric(all_reduce=tuple(row.model_copy(update={"world_size": 8}) for row in rows), topology=NODES)
    assert all(error(one_node, 8, 2**power) < error(fabric, 16, 2**power) for power in (10, 19, 25, 34))
    if linked:
        alone = fabric.model_copy(update={"topology": None})
        assert all(error(fabric, 16, 2**power) < error(alone, 16, 2**power) for power in (10, 16, 28, 34))


def test_nccls_tables_of_several_nodes_have_a_larger_error():
    rows = tuple(Timing(world_size=n, size_bytes=size, ns=n * size) for n in (8, 16, 32) for size in (2**20, 2**24))
    several = Fabric(all_reduce=rows, extrapolate=True)
    errors = [error(several, ranks, 2**22) for ranks in (64, 128)]
    assert errors == pytest.approx([0.25, 0.4])


@given(st.dictionaries(st.sampled_from([2**10, 2**20, 2**24, 2**30]), st.integers(10**4, 10**8), min_size=1))
def test_a_table_of_one_node_never_makes_more_certain_what_is_beyond_it(ns):
    links = Fabric.from_topology(NODES)
    table = Fabric.from_table((8, size, taken) for size, taken in ns.items())
    both = table.model_copy(update={"topology": NODES, "extrapolate": True})
    sizes = 2 ** np.arange(10, 31)
    for ranks in (16, 128):
        assert (both.relative_errors(sizes, ranks) >= links.relative_errors(sizes, ranks)).all()
        assert any("the links beyond 8 ranks were not measured" in one for one in both.assumed(sizes, ranks))
    assert not any("beyond" in one for one in both.assumed(sizes[sizes == min(ns)], 8))


def test_links_are_least_certain_for_messages_of_the_size_of_buckets_and_between_nodes():
    fabric = Fabric.from_topology(NODES)
    assert error(fabric, 8, 2**20) > error(fabric, 8, 2**30) > 0.1
    assert error(fabric, 64, 2**23) > error(fabric, 8, 2**23)
    assert error(fabric, 64, 2**23) > error(fabric, 64, 2**30) > 0.3


def test_links_between_very_many_nodes_are_known_less_well():
    inside, network = NODES.with_links(rates=1, latencies=2).levels
    known = Topology(levels=(inside, network.model_copy(update={"wait": 1.0})))
    errors = [error(Fabric.from_topology(known), gpus, 2**30) for gpus in (8, 16, 128, 256, 4096)]
    assert errors[0] < errors[1] == errors[2] < errors[3] < errors[4]


@given(st.sampled_from(["aws-p4d", "gcp-a2", "dgx-h100", "alps"]), st.integers(1, 9), st.integers(10, 30))
def test_the_low_end_of_an_all_reduce_does_not_fall_with_more_nodes(node, doublings, power):
    """Congestion makes nothing faster; with it, low ends of iterations fell by up to 20 % (4,096 A100s of gcp-a2)."""
    fabric, size = load_fabric(node), np.array([2**power])
    few = fabric.topology.levels[0].members * 2**doublings
    low_ns = [fabric.all_reduce_costs_ns(size, n) / (1 + fabric.relative_errors(size, n)[0]) for n in (few, 2 * few)]
    assert low_ns[0] <= low_ns[1] * (1 + 1e-6)


@given(
    st.sampled_from(["gcp-a2", "gcp-a3-ultra"]),
    st.sampled_from([9.3, 16.6, 36, 60, 61, 91, 109]),
    st.sampled_from([16, 32, 64]),
)
def test_where_the_latency_seems_to_be_a_default_the_range_holds_for_every_transport(node, latency_us, gpus):
    """Half of what 8 bytes take on two nodes, in microseconds: see `cost_curves.LATENCIES`."""
    fabric, sizes = load_fabric(node), 2 ** np.arange(3, 31)
    inside, network = fabric.topology.levels
    true = network.model_copy(update={"latency_ns": round(1e3 * latency_us), "wait": 1.0})
    known = Fabric.from_topology(Topology(levels=(inside, true)))
    off = known.all_reduce_costs_ns(sizes, gpus) / fabric.all_reduce_costs_ns(sizes, gpus)
    faster, slower = 1 + fabric.relative_errors(sizes, gpus)
    assert ((1 / faster <= off) & (off <= slower)).all()
    assert fabric.assumed(sizes, gpus) == (USUAL_LATENCY,)
    assert fabric.assumed(sizes, 8) == ()
    if latency_us > 14:
        assert known.assumed(sizes, gpus) == ()
        assert (known.relative_errors(sizes, gpus) < fabric.relative_errors(sizes, gpus)).all()


@given(st.sampled_from([0.5, 1.0, 1.44, 2.5, 3.2]), st.sampled_from([16, 32, 128]))
def test_where_the_wait_of_a_transport_is_not_known_the_range_holds_for_every_published_one(wait, gpus):
    """See `algorithms.UNKNOWN_WAIT`; the catalogue gives no wait for TCPXO."""
    fabric, sizes = load_fabric("gcp-a3-mega"), 2 ** np.arange(3, 31)
    inside, network = fabric.topology.levels
    known = Fabric.from_topology(Topology(levels=(inside, network.model_copy(update={"wait": wait}))))
    off = known.all_reduce_costs_ns(sizes, gpus) / fabric.all_reduce_costs_ns(sizes, gpus)
    faster, slower = 1 + fabric.relative_errors(sizes, gpus)
    assert ((1 / faster <= off) & (off <= slower)).all()
    assert (known.relative_errors(sizes, gpus) <= fabric.relative_errors(sizes, gpus)).all()
    assert (known.relative_errors(sizes, gpus) < fabric.relative_errors(sizes, gpus))[:, 20].all()
    assert known.all_reduce_ns(2**30, 8) == fabric.all_reduce_ns(2**30, 8)


@pytest.mark.parametrize(
    ("gbit", "reached", "nodes", "members"),
    [(10, 9.9, 8, 4), (25, 13.6, 2, 4), (25, 9.05, 2, 8), (32, 30.7, 2, 1), (32, 14.8, 2, 8), (32, 22.4, 4, 8)],
)
@pytest.mark.parametrize("latency_us", [14, 60])
def test_the_range_of_a_slow_network_holds_for_what_sockets_reach_of_it(gbit, reached, nodes, members, latency_us):
    """Gbit/s of published all-reduces over TCP: see `cost_curves.SOCKETS_DEVIATION`; 1 GiB on 2 x 8 V100s, 1.78 s."""

    def of_rate(gbit_per_s: float) -> Fabric:
        inside = Level(name="nvlink", members=members, latency_ns=3400, bytes_per_s=1.2e11)
        nic = Level(name="nic", latency_ns=1000 * latency_us, bytes_per_s=gbit_per_s * 1e9 / 8)
        return Fabric.from_topology(Topology(levels=(inside, nic)))

    sheet, gpus, size = of_rate(gbit), nodes * members, np.array([2**30])
    off = of_rate(reached).all_reduce_costs_ns(size, gpus) / sheet.all_reduce_costs_ns(size, gpus)
    faster, slower = 1 + sheet.relative_errors(size, gpus)
    assert 1 <= off <= slower
    ethernet = gbit > 10
    assert (slower > 1.1 * faster) == ethernet
    assert (SOCKETS in sheet.assumed(size, gpus)) == ethernet
    # Networks that are no Ethernet, and one node, have the range that they had.
    for other in (10, 100):
        assert (of_rate(other).relative_errors(size, gpus) < 0.6).all()
    assert SOCKETS not in sheet.assumed(size, 1)
