"""Verdict: the network that is named as needed has the target efficiency, and a slower one has not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Fabric, predict
from simulator.results.scaling_verdict import FASTEST_NETWORK, SLOWEST_NETWORK, TOLERANCE, counted, network_need

from ..strategies import iteration, trace_of


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.integers(0, 10**6),
    st.floats(0.05, 0.99),
    st.integers(2, 64),
)
def test_the_needed_network_just_reaches_the_target(compute_ns, collectives_ns, fixed_ns, target, ranks):
    """An iteration without overlap: computation, a fixed cost, and collectives."""

    def efficiency_at(factor: float) -> float:
        return compute_ns / max(1, compute_ns + fixed_ns + factor * collectives_ns)

    need = network_need(
        efficiency_at, bucket_bytes=[7, 1000], all_reduce_ns=lambda size: 3 * size, world_size=ranks, target=target
    )
    assert need.bus_gb_per_s == pytest.approx(2 * (ranks - 1) / ranks / 3)
    if need.factor is None:
        assert efficiency_at(FASTEST_NETWORK) < target
        assert "no network suffices" in need.sentence()
        return
    assert efficiency_at(need.factor) >= target
    if need.factor < SLOWEST_NETWORK:
        assert efficiency_at(need.factor * (1 + 2 * TOLERANCE)) < target
        assert need.needed_gb_per_s == pytest.approx(need.bus_gb_per_s / need.factor)
        assert ("needs collectives" in need.sentence()) == (need.factor < 1)
    else:
        assert "hardly matters" in need.sentence()


def test_the_need_of_a_prediction_is_that_of_its_scaled_fabric():
    """Two gradients of 400 bytes and 1 ns a byte: the last all-reduce of 600 ns is exposed after 1,000 ns."""
    trace = trace_of([[iteration(300, (900, 500), 900, 100)]], [400, 400])
    fabric = Fabric.from_table([(4, 400, 600), (4, 800, 1200)])

    def efficiency_at(factor: float) -> float:
        scaled = predict(trace, fabric.scaled(factor), world_size=4, plan=((1,), (0,)))
        return scaled.compute_ns / scaled.iteration_ns

    assert efficiency_at(1) < 0.9
    need = network_need(
        efficiency_at, bucket_bytes=[400, 400], all_reduce_ns=lambda size: fabric.all_reduce_ns(size, 4), world_size=4
    )
    assert need.factor == pytest.approx(111 / 600, rel=0.02)  # 1,000 / 1,111 ns
    assert need.needed_gb_per_s == pytest.approx(1.5 * 400 / 111, rel=0.02)


def test_buckets_are_counted_with_their_range():
    assert counted([], 4) == "0 of 4"
    assert counted([3], 4) == "1 of 4 (3)"
    assert counted([1, 3, 2], 35, "buckets") == "3 of 35 buckets (1-3)"
