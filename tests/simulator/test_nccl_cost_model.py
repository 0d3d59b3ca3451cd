"""NCCL's own cost model: its formulas and its versions."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator.fabric import Level
from ddplab.simulator.fabric.algorithms import (
    all_reduce_costs,
    nccl_all_reduce,
    published_deviations,
    published_ns,
)

KIB, MIB = 2**10, 2**20


def links(gpus, nodes=None, inside=340e9, network=96e9, *, reduces=False):
    """Links of nodes with NVLink on a network, with NCCL's own latencies."""
    return [
        Level(name="nvlink", members=gpus, latency_ns=3400, bytes_per_s=inside, reduces=reduces),
        Level(name="network", members=nodes, latency_ns=14_000, bytes_per_s=network),
    ]


def cheapest_us(levels, sizes, version="2.23"):
    costs = nccl_all_reduce(levels, version).values()
    return np.min([cost.costs_ns(np.array(sizes)) for cost in costs], axis=0) / 1e3


def test_a_ring_passes_each_network_hop_twice_and_a_tree_each_level():
    two, many = nccl_all_reduce(links(8, 2)), nccl_all_reduce(links(8, 16))
    assert two["ring Simple"].latency_ns == pytest.approx(1e3 * (8.4 + 2 * (16 - 2) * 3.4 + 2 * 14))
    assert many["tree LL"].latency_ns == pytest.approx(1e3 * (6.8 + 2 * (7 * 0.6 + 4 * 5.0)))
    assert many["ring Simple"].late_from_bytes == 64 * 16 * 128


def test_the_tree_with_simple_was_slow_from_2_19_to_2_22():
    latency_us = {
        version: nccl_all_reduce(links(8, 4), version)["tree Simple"].latency_ns
        for version in ("2.12", "2.18.3", "2.19", "2.22.3", "2.23.4", "2.30")
    }
    assert latency_us["2.19"] == latency_us["2.22.3"] > 2 * latency_us["2.23.4"]
    assert latency_us["2.23.4"] == latency_us["2.30"] > latency_us["2.18.3"] == latency_us["2.12"]


def test_slow_links_inside_a_node_are_pci_and_have_no_ll128():
    assert "ring LL128" not in nccl_all_reduce(links(8, 2, inside=20e9))
    assert "ring LL128" in nccl_all_reduce(links(8, 2))


def test_switches_that_reduce_are_faster_for_large_messages_only():
    plain, reducing = links(8, 1), links(8, 1, reduces=True)
    small, large = cheapest_us(reducing, [KIB, 2**30]) / cheapest_us(plain, [KIB, 2**30])
    assert small == 1
    assert large < 0.8


@given(
    levels=st.builds(
        links,
        st.integers(1, 16),
        st.integers(1, 512),
        inside=st.floats(1e9, 2e12),
        network=st.floats(1e9, 1e12),
        reduces=st.booleans(),
    ),
    size=st.integers(0, 2**40),
    version=st.sampled_from(["2.12", "2.18", "2.20.5", "2.30"]),
)
def test_every_cost_is_positive_and_no_less_than_the_bytes_at_the_full_rate(levels, size, version):
    if prod(level.size for level in levels) == 1:
        return
    for cost in nccl_all_reduce(levels, version).values():
        ns = cost.costs_ns(np.array([size]))[0]
        assert np.isfinite(ns)
        assert ns >= cost.latency_ns + cost.ns_per_byte * size - 1e-6 * ns


def test_figures_of_published_logs_are_interpolated_between_sizes_and_constant_beyond():
    sizes = np.array([0, 16 * MIB, 23 * MIB, 2**40])
    direct, waits = np.zeros(4, bool), np.ones(4, bool)
    later_ns = published_ns(np.full(4, 400.0), sizes, empty_ns=100.0, waits=waits) - 400
    assert (later_ns[[0, 1, 3]] / 200).tolist() == pytest.approx([0.2, 1.1, 0.53])
    assert 0.97 < later_ns[2] / 200 < 1.1
    slingshot_ns = published_ns(np.full(4, 400.0), sizes, empty_ns=100.0, waits=2.5 * waits) - 400
    assert slingshot_ns.tolist() == pytest.approx((2.5 * later_ns).tolist())
    alone_ns = published_ns(np.full(4, 400.0), sizes, empty_ns=100.0, waits=direct)
    assert (alone_ns[[0, 1, 3]] / 400).tolist() == pytest.approx([1.15, 1.18, 1.04])
    assert published_deviations(sizes, waits)[[0, 1, 3]].tolist() == pytest.approx([0.11, 0.19, 0.07])


def test_pieces_wait_between_nodes_and_where_switches_reduce():
    def waiting(gpus: int, nodes: int, *, reduces: bool) -> list[bool]:
        levels = links(gpus, nodes, inside=365e9, network=200e9, reduces=reduces)
        return all_reduce_costs(levels, "nccl", "library", "2.30").waits(np.array([1024, 2**25])).tolist()

    assert waiting(8, 1, reduces=False) == [False, False]
    assert waiting(8, 1, reduces=True) == [False, True]  # a small one goes by LL
    assert waiting(8, 2, reduces=False) == waiting(8, 2, reduces=True) == [True, True]


def test_between_two_nodes_switches_that_reduce_send_each_byte_once():
    """A network of 200 GB/s then reaches 400 GB/s of bus bandwidth; NCCL before 2.18 does not have this algorithm."""

    def bus_gb_per_s(nodes: int, version: str) -> float:
        levels = links(8, nodes, inside=365e9, network=200e9, reduces=True)
        return 2 * (1 - 1 / 8 / nodes) * 2**33 / float(cheapest_us(levels, [2**33], version)[0]) / 1e3

    assert bus_gb_per_s(2, "2.23") == pytest.approx(400, rel=0.02)
    assert bus_gb_per_s(4, "2.23") == pytest.approx(200, rel=0.02)
    assert bus_gb_per_s(2, "2.17") == pytest.approx(200, rel=0.02)


def test_what_a_network_takes_longer_adds_to_each_hop():
    inside, network = links(8, 4)
    slow = [inside, network.model_copy(update={"latency_ns": network.latency_ns + 22_000})]
    costs, slower = nccl_all_reduce(links(8, 4)), nccl_all_reduce(slow)
    for name, hops in (("tree LL", 4), ("tree Simple", 4), ("ring LL", 6)):
        assert slower[name].latency_ns == pytest.approx(costs[name].latency_ns + hops * 22_000)
