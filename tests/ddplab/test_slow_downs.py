"""Slow-downs: moments of isolated collectives, and how long computation lingers after one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.calibration.repeated_timing import (
    ContentionTimes,
)
from ddplab.calibration.slow_downs import ISOLATION_NS, IsolatedTimes, SlowdownTimes, choose_far_apart, fit_lingering
from simulator import Fabric, predict
from simulator.fabric import Contention, Processor, Timing

from ..strategies import iteration, trace_of

positive = st.integers(1, 10**9)


# Collectives on their own


@given(st.dictionaries(st.integers(0, 99), positive, min_size=1), positive)
def test_chosen_moments_are_far_apart_and_no_further_one_would_fit(moments, least):
    chosen = choose_far_apart(moments, least)
    at = [moments[place] for place in chosen]
    assert at[0] == min(moments.values())
    assert all(later - earlier >= least for earlier, later in pairwise(at))
    for place in moments.keys() - chosen:
        assert any(earlier <= moments[place] < earlier + least for earlier in at)


@given(st.floats(1.2, 3), st.floats(1, 3), *[st.integers(0, 2_000_000)] * 3)
def test_lingering_is_recovered_from_the_replay_of_isolated_collectives(
    compute, collective, cost_ns, launch_ns, lingers_ns
):
    one = iteration(0, tuple(range(10_000_000, 80_000_000, 20_000_000)), 90_000_000, 0)
    trace = trace_of([[one]] * 2, [4] * len(one.ready_ns))
    rows = (Contention(compute=compute, collective=collective),)
    fabric = Fabric(
        all_reduce=(Timing(world_size=2, size_bytes=0, ns=1 + cost_ns),),
        processor=Processor(contention=rows, launch_ns=launch_ns, lingers_ns=lingers_ns),
    )
    slowed = predict(trace, fabric, world_size=2, plan=[[index] for index in range(len(one.ready_ns))])
    passes = ContentionTimes([[slowed.compute_ns]], [[slowed.iteration_ns]])
    contended = [SlowdownTimes({}, {4: IsolatedTimes(len(one.ready_ns), passes)})] * 2
    found_ns, band_ns = fit_lingering(contended, rows, launch_ns, lambda size: fabric.all_reduce_ns(size, 2))
    assert found_ns == pytest.approx(lingers_ns, abs=20)
    assert band_ns == 0


def test_nothing_lingers_where_computation_is_not_slowed_or_was_not_interrupted():
    single = IsolatedTimes(3, ContentionTimes([[100]], [[130]]))
    assert fit_lingering([SlowdownTimes({}, {4: single})], (Contention(collective=2.0),), 1, lambda _: 5) == (0, 0)
    assert fit_lingering([SlowdownTimes({}, {})], (Contention(compute=2.0),), 1, lambda _: 5) == (0, 0)


def test_lingering_is_limited_to_zero_and_to_the_distance_of_the_collectives():
    rows, faster, hung = (
        (Contention(compute=2.0),),
        ContentionTimes([[100]], [[90]]),
        ContentionTimes([[100]], [[10**12]]),
    )
    assert fit_lingering([SlowdownTimes({}, {4: IsolatedTimes(3, faster)})], rows, 1, lambda _: 5) == (0, 0)
    assert fit_lingering([SlowdownTimes({}, {4: IsolatedTimes(3, hung)})], rows, 1, lambda _: 5) == (ISOLATION_NS, 0)
