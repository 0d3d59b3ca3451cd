"""Compute times: drawn iterations keep the recorded distribution; stragglers and Join change them as documented."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, Straggler, Variation, predict
from ddplab.simulator.fabric import Timing
from ddplab.simulator.workload.compute_times import ComputeTimes, IterationSampler, recorded_model

from ..explore import examples
from ..strategies import iteration, trace_of, traces, variations

FREE = Fabric.from_alpha_beta(alpha_ns=0, bytes_per_s=1e18)
FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9)


def recorded_times(trace: Trace) -> tuple[ComputeTimes, ...]:
    """Compute times of every recorded rank."""
    return recorded_model(trace).compute_times


def drawn(sampler: IterationSampler) -> ComputeTimes:
    """All iterations, along a first axis."""
    return sampler.draw(range(sampler.count))


def same(a: ComputeTimes, b: ComputeTimes) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in (field.name for field in fields(b)))


@examples(20)
@given(traces(), st.integers(1, 5))
def test_recorded_iterations_are_the_traces_own(trace, world_size):
    by_rank = recorded_times(trace)
    sampler = IterationSampler(by_rank, world_size, Variation())
    assert sampler.count == min(len(rank.iterations) for rank in trace.ranks[:world_size])
    assert sampler.ranks.tolist() == list(range(min(world_size, len(trace.ranks))))
    for number in range(sampler.count):
        times = sampler.draw([number])[0]
        for row, rank in enumerate(sampler.ranks):
            assert same(times[row], by_rank[rank][number])


@examples(20)
@given(traces(), st.integers(1, 5))
def test_resampled_iterations_are_recorded_ones_of_the_rank(trace, world_size):
    by_rank = recorded_times(trace)
    sampler = IterationSampler(by_rank, world_size, Variation(kind="resampled", iterations=5))
    assert sampler.ranks.tolist() == list(range(world_size))
    for number in range(sampler.count):
        times = sampler.draw([number])[0]
        for rank in range(world_size):
            source = by_rank[rank % len(by_rank)]
            assert any(same(times[rank], source[n]) for n in range(len(source.forward_ns)))


def test_resampling_takes_every_iteration_about_as_often():
    """Two ranks draw 1000 times from ten iterations: each comes about 200 times, within five standard deviations."""
    trace = trace_of([[iteration(ns, (ns,), ns, 0) for ns in range(10)]], [4])
    times = drawn(IterationSampler(recorded_times(trace), 2, Variation(kind="resampled", iterations=1000)))
    counts = np.bincount(times.forward_ns.ravel(), minlength=10)
    assert abs(counts - 200).max() < 5 * np.sqrt(200 * 0.9)
    places = times.forward_ns.argsort(axis=0).argsort(axis=0)
    assert abs(np.corrcoef(places.T)[0, 1]) < 0.15  # ranks draw on their own


def test_a_fitted_factor_has_the_spread_of_the_recording():
    """The logarithm of the computation's standard deviation, on each of two unlike ranks."""
    rng = np.random.default_rng(0)
    spreads = (0.05, 0.2)
    durations = [(1e6 * np.exp(rng.normal(0, s, 100))).astype(int).tolist() for s in spreads]
    ranks = [[iteration(ns // 2, (ns * 3 // 4,), ns, 0) for ns in of_rank] for of_rank in durations]
    by_rank = recorded_times(trace_of(ranks, [4]))
    logs = np.log(drawn(IterationSampler(by_rank, 4, Variation(kind="fitted", iterations=2000))).compute_ns)
    recorded = [np.log(times.compute_ns).std() for times in by_rank]
    np.testing.assert_allclose(logs.std(axis=0), recorded * 2, rtol=0.07)
    medians = [np.median(np.log(times.compute_ns)) for times in by_rank]
    np.testing.assert_allclose(np.median(logs, axis=0), medians * 2, atol=0.02)


@examples(20)
@given(traces())
def test_a_fitted_iteration_is_the_typical_one_at_another_speed(trace):
    by_rank = recorded_times(trace)
    times = drawn(IterationSampler(by_rank, len(by_rank), Variation(kind="fitted", iterations=3)))
    for rank, source in enumerate(by_rank):
        typical = source[int(source.compute_ns.argsort(kind="stable")[len(source.compute_ns) // 2])]
        whole = max(1, int(typical.compute_ns))
        expected = typical.ready_ns / whole * times.compute_ns[:, rank, None]
        np.testing.assert_allclose(times.ready_ns[:, rank], expected, atol=2)


@examples(20)
@given(traces(), st.integers(1, 5), variations())
def test_iterations_are_the_same_in_any_order(trace, world_size, variation):
    by_rank = recorded_times(trace)
    one, other = (IterationSampler(by_rank, world_size, variation) for _ in range(2))
    for number in range(one.count):
        backwards = one.count - 1 - number
        assert same(one.draw([backwards]), other.draw([backwards]))
        assert same(one.draw([number]), other.draw([number]))


@given(
    traces(),
    st.integers(1, 6),
    st.lists(st.tuples(st.integers(0, 5), st.floats(1, 3)), max_size=2),
    st.booleans(),
    st.data(),
)
def test_ranks_that_are_left_out_do_exactly_as_one_that_is_not(trace, world_size, slow, joins, data):
    stragglers = [Straggler(rank=rank % world_size, factor=factor) for rank, factor in slow]
    counts = st.lists(st.integers(1, 3), min_size=world_size, max_size=world_size)
    inputs = data.draw(counts) if joins else None
    by_rank = recorded_times(trace)
    sampler = IterationSampler(by_rank, world_size, Variation(), stragglers, inputs)
    assert sampler.ranks.tolist() == sorted(set(sampler.ranks.tolist()))
    for number in range(sampler.count):
        kept = sampler.draw([number])[0]
        for rank in range(world_size):
            source = by_rank[rank % len(by_rank)]
            count = min(len(times.forward_ns) for times in by_rank[:world_size])
            expected = source[number % count].compute_ns
            for straggler in stragglers:
                expected = np.rint(expected * (straggler.factor if straggler.rank == rank else 1))
            has_joined = inputs is not None and inputs[rank] <= number
            alike = (abs(kept.compute_ns - expected) <= 2 * len(stragglers)) & (kept.joined[:, 0] == has_joined)
            assert alike.any(), f"no drawn rank computes the same as rank {rank}"


@examples(20)
@given(traces(), st.integers(1, 5), st.floats(1, 4), variations(), st.data())
def test_a_straggler_computes_longer_by_its_factor_and_no_other_rank_does(trace, world_size, factor, variation, data):
    slow = data.draw(st.integers(0, world_size - 1))
    by_rank = recorded_times(trace)
    variation = variation if variation.kind != "recorded" else Variation(kind="resampled", iterations=3)
    usual = drawn(IterationSampler(by_rank, world_size, variation))
    late = drawn(IterationSampler(by_rank, world_size, variation, [Straggler(rank=slow, factor=factor)]))
    for name in ComputeTimes.__slots__:
        factors = np.ones(world_size)
        factors[slow] = factor
        before, after = getattr(usual, name), getattr(late, name)
        shape = factors.reshape(-1, *(1,) * (before.ndim - 2))
        # A straggler that is the slowest device too is rounded once, after both factors.
        error = (factor + 1) / 2 * (factors > 1) * bool(variation.device_spread)
        assert (np.abs(after - np.rint(before * shape)) <= error.reshape(shape.shape)).all()


@pytest.mark.parametrize("world_size", range(2, 7))
def test_a_random_straggler_is_one_rank_in_each_iteration_and_not_always_the_same(world_size):
    trace = trace_of([[iteration(100, (200,), 300, 100)] * 3], [4])
    variation = Variation(kind="resampled", iterations=60)
    times = drawn(IterationSampler(recorded_times(trace), world_size, variation, [Straggler(factor=3)]))
    slow = times.compute_ns == 1200
    assert (slow.sum(axis=1) == 1).all()
    assert (times.compute_ns[~slow] == 400).all()
    assert set(slow.argmax(axis=1)) == set(range(world_size))


@examples(20)
@given(traces(), st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), variations())
def test_ranks_without_inputs_have_joined_and_an_epoch_is_as_long_as_the_longest(trace, inputs, variation):
    sampler = IterationSampler(recorded_times(trace), len(inputs), variation, inputs=inputs)
    assert sampler.count == max(inputs)
    for number in range(sampler.count):
        with_inputs = set(sampler.ranks[sampler.draw([number])[0].joined[:, 0] == 0].tolist())
        assert {inputs[rank] > number for rank in with_inputs} == {True}
        assert not with_inputs.isdisjoint(range(len(inputs)))
    assert predict(trace, FREE, world_size=len(inputs), variation=variation, inputs=inputs).compute_ns >= 0


@given(traces(), st.lists(st.integers(0, 6), min_size=1, max_size=3).filter(any), st.integers(1, 3), variations())
def test_cycles_that_count_as_equal_are_equal(trace, inputs, sync_every, variation):
    inputs = [batches + sync_every for batches in inputs]
    by_rank = recorded_times(trace)
    sampler = IterationSampler(by_rank, len(inputs), variation, inputs=inputs, sync_every=sync_every)
    first, place = sampler.distinct()
    for cycle in range(sampler.count):
        chosen = first[place[cycle]]
        assert same(sampler.draw([cycle]), sampler.draw([chosen]))


def test_an_epoch_of_many_batches_has_few_distinct_ones():
    trace = trace_of([[iteration(1, (2,), 3, ns) for ns in range(3)]], [4])
    sampler = IterationSampler(recorded_times(trace), 2, Variation(), inputs=[1_000_000, 5])
    assert len(sampler.distinct()[0]) == 6


@examples(20)
@given(traces(), st.integers(1, 5), st.integers(0, 3))
def test_unequal_devices_change_the_last_rank_alone(trace, world_size, number):
    by_rank = recorded_times(trace)
    equal = IterationSampler(by_rank, world_size, Variation())
    unequal = IterationSampler(by_rank, world_size, Variation(device_spread=0.05))
    if world_size == 1:
        assert same(unequal.draw_iteration(number), equal.draw_iteration(number))
        return
    usual, slowed = equal.draw_iteration(number), unequal.draw_iteration(number)
    for row in np.flatnonzero(unequal.ranks != world_size - 1):
        source = int(equal.ranks.tolist().index(equal.represented_by[unequal.ranks[row]]))
        assert same(slowed[row], usual[source])
    last = unequal.ranks.tolist().index(world_size - 1)
    assert slowed.compute_ns[last] >= usual.compute_ns[equal.ranks.tolist().index(equal.represented_by[-1])] - 1


def test_iterations_of_a_cycle_vary_on_their_own():
    """The mean of 8 independent iterations varies 1 / sqrt(8) as much as one; of 8 equal ones, as much as one."""
    ranks = [[iteration(400, (900,), 1000, 0), iteration(800, (1800,), 2000, 0)]]
    trace = trace_of(ranks, [4])
    fabric = Fabric(all_reduce=(Timing(world_size=1, size_bytes=0, ns=0),))
    resampled = {"world_size": 1, "variation": Variation(kind="resampled", iterations=4000)}
    spread = {n: np.std(predict(trace, fabric, sync_every=n, **resampled).samples_ns) for n in (1, 8)}
    assert spread[1] == pytest.approx(500, rel=0.1)
    assert spread[8] == pytest.approx(500 / 8**0.5, rel=0.15)
