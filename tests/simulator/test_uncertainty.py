"""Uncertainty: the error of a cost at a measured and at another world size."""

import pytest

from simulator import Fabric
from simulator.fabric import Timing


def test_the_error_grows_with_the_distance_from_the_measured_world_sizes():
    rows = tuple(Timing(world_size=n, size_bytes=8, ns=ns, spread=0.02) for n, ns in ((2, 5), (4, 5), (8, 12)))
    fabric = Fabric(all_reduce=rows, extrapolate=True)
    doublings = [fabric.relative_error(n) for n in (1, 8, 16, 32, 64)]
    missed = 1 - Fabric(all_reduce=rows[:2], extrapolate=True).all_reduce_ns(8, 8) / 12
    assert doublings == pytest.approx([0.0, 0.02, missed + 0.02, missed + 0.07, missed + 0.12])
    for fewer in (rows[1:2], rows[:2]):  # one smaller world size does not show how costs grow
        two = Fabric(all_reduce=fewer, extrapolate=True)
        assert [two.relative_error(n) for n in (8, 16, 32)] == pytest.approx([0.16, 0.21, 0.26])
    assert fabric.relative_error(6) == pytest.approx(0.16)
    assert Fabric.from_alpha_beta(1, 1e9).relative_error(8) == 0.14
