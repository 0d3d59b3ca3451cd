"""Uncertainty: the error of a cost at a measured and at another world size."""

import numpy as np
import pytest

from simulator import Fabric
from simulator.fabric import Level, Timing, Topology


def error(fabric, world_size, size=8):
    return float(fabric.relative_errors(np.array([size]), world_size)[0])


def test_the_error_grows_with_the_distance_from_the_measured_world_sizes():
    rows = tuple(Timing(world_size=n, size_bytes=8, ns=ns, spread=0.02) for n, ns in ((2, 5), (4, 5), (8, 12)))
    fabric = Fabric(all_reduce=rows, extrapolate=True)
    doublings = [error(fabric, n) for n in (1, 8, 16, 32, 64)]
    missed = 1 - Fabric(all_reduce=rows[:2], extrapolate=True).all_reduce_ns(8, 8) / 12
    assert doublings == pytest.approx([0.0, 0.02, missed + 0.02, missed + 0.07, missed + 0.12])
    for fewer in (rows[1:2], rows[:2]):  # one smaller world size does not show how costs grow
        two = Fabric(all_reduce=fewer, extrapolate=True)
        assert [error(two, n) for n in (8, 16, 32)] == pytest.approx([0.16, 0.21, 0.26])
    assert error(fabric, 6) == pytest.approx(0.16)
    assert error(Fabric.from_alpha_beta(1, 1e9), 8) == 0.14


def test_nccls_tables_of_several_nodes_have_a_larger_error():
    rows = tuple(Timing(world_size=n, size_bytes=size, ns=n * size) for n in (8, 16, 32) for size in (2**20, 2**24))
    several = Fabric(all_reduce=rows, extrapolate=True)
    assert error(several, 64) >= 0.2
    assert error(several, 128) == pytest.approx(error(several, 64) + 0.05)


def test_links_are_least_certain_for_messages_of_the_size_of_buckets_and_between_nodes():
    nodes = Topology(
        levels=(
            Level(name="nvlink", members=8, latency_ns=3400, bytes_per_s=230e9),
            Level(name="network", latency_ns=14_000, bytes_per_s=200e9),
        )
    )
    fabric = Fabric.from_topology(nodes)
    assert error(fabric, 8, 2**20) > error(fabric, 8, 2**30) > 0.1
    assert error(fabric, 64, 2**23) > error(fabric, 8, 2**23)
    assert error(fabric, 64, 2**23) > error(fabric, 64, 2**30) > 0.4
