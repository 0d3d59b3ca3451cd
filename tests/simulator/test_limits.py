"""Limits: the network that is named as needed has the target efficiency, and a slower one has not."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, Policy, predict
from ddplab.simulator.capacity.judgement import limit_sentence, network_sentence
from ddplab.simulator.capacity.limits import FASTEST_LINKS, RATE_TOLERANCE, SLOWEST_LINKS, Limits
from ddplab.simulator.fabric import Timing
from ddplab.simulator.inputs_with_default_costs import complete
from ddplab.simulator.prediction import System

from ..explore import examples
from ..strategies import iteration, trace_of

US = 1000


MOST_PREDICTIONS = 12
"""Bisection takes up to 16; false position takes 4, and up to 8 in 1,500 random cases."""


def predict_at(trace, fabric, settings, multiple):
    return predict(trace, fabric.with_links(rates=multiple), world_size=4, **settings)


def limits_of(trace, fabric, settings):
    return Limits(System(complete(trace, fabric, settings=settings)), 4)


@examples(20)
@given(st.integers(0, 10**5), st.floats(1e6, 1e11), st.sampled_from([1.0, 3.0, float("inf")]), st.floats(0.05, 0.99))
def test_the_need_is_the_least_rate_that_reaches_the_target(latency_ns, bytes_per_s, cap_mb, target):
    trace = trace_of([[iteration(300 * US, (1900 * US, 900 * US), 1900 * US, 100 * US)]], [3 << 20, 2 << 20])
    fabric = Fabric.from_alpha_beta(latency_ns, bytes_per_s)
    at = partial(predict_at, trace, fabric, {"bucket_cap_mb": cap_mb})
    limits = limits_of(trace, fabric, {"bucket_cap_mb": cap_mb})
    need = limits.needed_rate(target)
    assert len(limits.system._known) <= MOST_PREDICTIONS
    if need.multiple is None:
        assert at(FASTEST_LINKS).efficiency < target
        assert "no rate of the links suffices" in need.sentence()
        return
    assert at(need.multiple).efficiency >= target
    if need.multiple == SLOWEST_LINKS:
        assert "hardly matters" in need.sentence()
        return
    assert at(need.multiple * (1 - 2 * RATE_TOLERANCE)).efficiency < target
    assert ("needs links" in need.sentence()) == (need.multiple > 1)


def test_a_need_leaves_latencies_and_counts_the_messages_of_the_hook():
    """Two buckets of 4,000 bytes at 1 ns a byte for each of 1.5: after 1,000 ns, an all-reduce of 6,000 ns."""
    trace = trace_of([[iteration(300, (900, 500), 900, 100)]], [4000, 4000])
    plan = {"plan": ((1,), (0,))}
    table = Fabric.from_table([(4, 0, 6), (4, 4000, 6006), (4, 8000, 12006)])
    need = limits_of(trace, table, plan).needed_rate()
    assert "largest message (3.906 KiB)" in need.links
    assert need.needed_gb_per_s == pytest.approx(6000 / 111, rel=0.02)  # 1,000 / 1,111 ns
    assert need.multiple == pytest.approx(6000 / 105, rel=0.02)  # 6 of the 111 ns are latency
    assert (need.message_bytes, need.bus_gb_per_s) == (4000, 6000 / 6006)
    hooked = limits_of(trace, table, plan | {"hook": "fp16"}).needed_rate()
    assert hooked.message_bytes == 8000, "two bytes for each of the elements, which have one"
    assert hooked.multiple == pytest.approx(2 * need.multiple, rel=0.02)

    slow_start = Fabric.from_table([(4, 0, 200), (4, 4000, 6200)])
    assert limits_of(trace, slow_start, plan).needed_rate().multiple is None, "its latency is 200 ns"


@given(st.floats(1e-3, 1e3), st.integers(0, 10**6), st.integers(0, 10**8))
def test_rates_change_the_bytes_of_tables_and_of_links_alike(multiple, latency_ns, size_bytes):
    links = Fabric.from_alpha_beta(latency_ns, 1e9)
    sizes = (0, 10**3, 10**6, 10**8)
    table = Fabric(all_reduce=[Timing(world_size=2, size_bytes=s, ns=links.all_reduce_ns(s, 2)) for s in sizes])
    expected = 2 * latency_ns + size_bytes / multiple
    for fabric in (links, table):
        assert fabric.with_links(rates=multiple).all_reduce_ns(size_bytes, 2) == pytest.approx(
            expected, rel=1e-3, abs=2
        )


@examples(20)
@given(st.integers(10, 34), st.integers(1, 3))
def test_limits_and_needs_are_claimed_only_where_messages_near_the_largest_were_measured(first, sizes):
    """The largest message has 5 MiB; a line is continued to 3.3 times the size, not further."""
    trace = trace_of([[iteration(300 * US, (1900 * US, 900 * US), 1900 * US, 100 * US)]], [3 << 20, 2 << 20])
    rows = [(4, 2**power, 50_000 + 2**power // 10) for power in range(first, first + sizes)]
    fabric = Fabric.from_table(rows)
    limits = Limits(System(complete(trace, fabric, policy=Policy(bucket_cap_mb=float("inf")))), 4)
    known = rows[0][1] / 3.3 <= 5 << 20 <= 3.3 * rows[-1][1]
    assert (limits.why_unknown == "") == known
    assert (limits.limit == "unknown") == (limits.saved_ns == {}) == (not known)
    for sentence in (limit_sentence(limits), network_sentence(limits, limits.needed_rate())):
        assert ("no all-reduce near 5 MiB, the largest message, was measured" in sentence) == (not known)
    if not known:
        assert limits.needs(0.9)[1:] == (None, None, None)
