"""Intervals: medians, percentiles and bounds of predicted iterations."""

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, predict
from ddplab.simulator.capacity.judgement import width_sentence
from ddplab.simulator.fabric import Timing
from ddplab.simulator.predicted_iteration import SPREAD, reach_of_difference
from ddplab.simulator.workload.variation import Straggler, Variation

from ..explore import examples
from ..strategies import any_predictions, iteration, steady_fabrics, trace_of

FREE = Fabric.from_alpha_beta(alpha_ns=0, bytes_per_s=1e18)


@examples(20)
@given(any_predictions())
def test_figures_of_the_samples_are_in_their_order(asked):
    prediction = asked.predict()
    samples = prediction.samples_ns
    low, high = prediction.interval_ns
    assert low <= prediction.iteration_ns <= high
    assert prediction.iteration_ns >= prediction.compute_ns >= 0
    for quantile_ns, least in ((prediction.p95_ns, 20), (prediction.p99_ns, 100)):
        assert (quantile_ns is None) == (len(set(samples)) < least)
        assert quantile_ns is None or prediction.iteration_ns <= quantile_ns <= max(samples)
    assert min(samples) <= prediction.mean_ns <= max(samples)
    assert prediction.iteration_ns in samples
    assert sum(sample < prediction.iteration_ns for sample in samples) <= len(samples) / 2


@examples(20)
@given(any_predictions(fabrics=steady_fabrics), st.floats(0, 0.5), st.floats(0, 0.4))
def test_knowing_the_fabric_less_well_never_narrows_the_interval(asked, spread, more):
    intervals = []
    for error in (spread, spread + more):
        timings = tuple(t.model_copy(update={"spread": error}) for t in asked.fabric.all_reduce)
        fabric = asked.fabric.model_copy(update={"all_reduce": timings})
        intervals.append(replace(asked, fabric=fabric).predict().interval_ns)
    assert intervals[1][0] <= intervals[0][0]
    assert intervals[1][1] >= intervals[0][1]


def with_one_iteration(trace):
    ranks = tuple(rank.model_copy(update={"iterations": rank.iterations[:1]}) for rank in trace.ranks)
    return trace.model_copy(update={"ranks": ranks})


@examples(20)
@given(
    any_predictions(fabrics=steady_fabrics, variation=st.builds(Variation, device_spread=st.floats(0, 0.1))),
    st.floats(0.01, 20),
    st.tuples(st.floats(0.1, 1), st.floats(1, 10)),
)
def test_a_measured_spread_is_named_and_never_reaches_below_computation(asked, spread, bounds):
    """All iterations compute equally long; computation may err by its bounds and by the speed of its device."""
    trace = with_one_iteration(asked.trace)
    workload = trace.workload.model_copy(update={"compute_bounds": bounds})
    trace = trace.model_copy(update={"workload": workload})
    fabric = asked.fabric.with_processor(iteration_spread=spread)
    prediction = replace(asked, trace=trace, fabric=fabric, stragglers=(), inputs=None).predict()
    median_ns, (low, high) = prediction.iteration_ns, prediction.interval_ns
    known = fabric.iteration_spread(asked.world_size) > 0
    assert (set(prediction.causes_ns) == {SPREAD}) == known
    reach = np.array(list(prediction.causes_ns.values()), float)
    below, above = np.sqrt((reach**2).sum(axis=0))
    assert (median_ns - low, high - median_ns) == pytest.approx((min(below, median_ns), above), abs=2)
    if known:
        noise = 0.03 + 3 * sum(below for cause, (below, _) in prediction.compute_errors.items() if "speeds" in cause)
        assert low >= prediction.compute_ns * (bounds[0] - noise) - 1
        assert high == pytest.approx(median_ns * (1 + spread), abs=2 + spread)


def test_an_interval_that_an_iteration_narrows_does_not_begin_below_computation():
    """Computation takes 3 ms, and training with all-reduces of 1 ms was measured to take from 0 to twice as long."""
    trace = trace_of([[iteration(10**6, (3 * 10**6,), 3 * 10**6, 0)]], [4])
    fabric = Fabric.from_table([(2, 4, 10**6)]).with_processor(iteration_spread=1.0)
    prediction, measured = (
        predict(trace, fabric, world_size=2),
        predict(trace, fabric, world_size=2, measured={2: 2_950_000}),
    )
    assert prediction.iteration_ns == 4 * 10**6
    for one in (prediction, measured):
        assert 2_910_000 < one.interval_ns[0] < 3 * 10**6
        assert list(one.shares_of_width.items()) == [(SPREAD, pytest.approx(1))]
    assert "spread of training (100%); to narrow it, run `ddplab validate`" in width_sentence(
        prediction.shares_of_width
    )


ends_ns = st.integers(0, 1000)
reaches = st.lists(st.tuples(ends_ns, ends_ns), min_size=1, max_size=6).map(
    lambda pairs: {f"cost {number}": pair for number, pair in enumerate(pairs)}
)


@given(st.integers(-500, 500), reaches, reaches)
def test_a_difference_has_one_reach_from_either_side_and_none_from_what_moves_both(difference_ns, one, other):
    below, above = reach_of_difference(difference_ns, one, other)
    assert min(below, above) >= 0
    assert reach_of_difference(-difference_ns, other, one) == (above, below)
    assert reach_of_difference(difference_ns, one, one) == (0, 0)


@given(st.lists(ends_ns, min_size=1, max_size=6))
def test_small_errors_of_a_difference_add_up_in_quadrature(ends):
    below, above = reach_of_difference(10**6, {}, {f"cost {number}": (end, end) for number, end in enumerate(ends)})
    whole = sum(end**2 for end in ends) ** 0.5
    assert below == pytest.approx(whole, rel=0.08) == above


@given(st.integers(2, 1000), reaches)
def test_an_error_that_lets_a_difference_vanish_is_no_reason_to_call_it_a_tie(difference_ns, others):
    """In the other prediction the network is hidden, and with a fast network in both; see `is_tie`."""
    causes = {"collectives": (difference_ns, 3 * difference_ns)}
    assert reach_of_difference(-difference_ns, causes, {})[1] < difference_ns
    assert reach_of_difference(difference_ns, {}, causes)[0] < difference_ns
    assert reach_of_difference(-difference_ns, {"collectives": (2 * difference_ns, 0)}, {})[1] >= difference_ns
    assert reach_of_difference(-difference_ns, causes | others, others)[1] < difference_ns


def test_the_interval_reaches_as_far_as_dearer_and_cheaper_collectives_do():
    """An all-reduce of 100 ns, give or take 20, begins at 10 and computation ends at 100: 10 ns to gain."""
    trace = trace_of([[iteration(0, (10,), 100, 0)]], [4])
    fabric = Fabric(all_reduce=(Timing(world_size=2, size_bytes=4, ns=100, spread=0.2),))
    prediction = predict(trace, fabric, world_size=2)
    assert prediction.iteration_ns == 110
    assert prediction.interval_ns == (100, 130)


@pytest.mark.parametrize("world_size", [2, 8, 64, 1024])
def test_an_iteration_waits_for_the_slowest_of_all_devices_and_the_interval_has_other_clusters(world_size):
    """Without communication: the quantiles of the maximum of as many normal variables, which is never negative.

    They are quantiles of clusters, not of iterations: all iterations of a cluster take equally long.
    """
    trace = trace_of([[iteration(10**6, (2 * 10**6,), 3 * 10**6, 0)] * 400], [4])
    prediction = predict(trace, FREE, world_size=world_size, variation=Variation(device_spread=0.01))
    quantiles = (NormalDist().inv_cdf(q ** (1 / world_size)) for q in (0.05, 0.5, 0.95))
    low, usual, high = (3e6 * (1 + 0.01 * max(0, one)) for one in quantiles)
    assert prediction.iteration_ns == prediction.mean_ns == round(usual)
    assert prediction.causes_ns["slowest rank"] == pytest.approx((usual - low, high - usual), abs=2)
    assert prediction.causes_ns["iterations"] == (0, 0)
    assert prediction.p95_ns is prediction.p99_ns is None
    assert prediction.compute_ns == 3 * 10**6


@pytest.mark.parametrize(("jitter", "spread", "tail"), [(0.01, 0.0, True), (0.01, 0.02, True), (0.0, 0.02, False)])
def test_percentiles_are_those_of_iterations_of_one_cluster(jitter, spread, tail):
    """Other clusters move the interval alone; without jitter, iterations do not differ."""
    trace = trace_of([[iteration(10**6, (2 * 10**6,), 3 * 10**6, 0)]], [4])
    variation = Variation(kind="slowest", jitter=jitter, device_spread=spread)
    prediction = predict(trace, FREE, world_size=64, variation=variation)
    assert (prediction.p99_ns is not None) is tail
    assert prediction.interval_ns[1] > max(prediction.samples_ns)


@pytest.mark.parametrize(("recorded", "p95", "p99"), [(19, False, False), (21, True, False), (101, True, True)])
def test_too_few_iterations_have_no_tail(recorded, p95, p99):
    trace = trace_of([[iteration(10, (20,), 30 + number, 0) for number in range(recorded)]], [4])
    for variation in (Variation(), Variation(kind="slowest"), Variation(kind="resampled", iterations=5000)):
        prediction = predict(trace, FREE, world_size=2, variation=variation)
        assert (prediction.p95_ns is not None) <= p95
        assert (prediction.p99_ns is not None) <= p99
        if variation.kind != "slowest":
            assert (prediction.p95_ns is not None, prediction.p99_ns is not None) == (p95, p99)


@examples(20)
@given(any_predictions(), st.integers(0, 3), st.floats(1, 3))
def test_a_straggler_never_raises_the_efficiency(asked, rank, factor):
    late = Straggler(rank=rank % asked.world_size, factor=factor)
    before = replace(asked, variation=Variation(), stragglers=()).predict()
    after = replace(asked, variation=Variation(), stragglers=(late,)).predict()
    assert after.compute_ns == before.compute_ns
    assert before.compute_ns <= before.iteration_ns
    assert after.efficiency <= 1
    if after.iteration_ns >= before.iteration_ns:  # queues of collectives can make it shorter
        assert after.efficiency <= before.efficiency


def test_efficiency_counts_each_rank_alone():
    """Two recorded ranks of 60 and 100 ns on three ranks: 220 of 300 ns, and of 660 ns if rank 1 takes 2.2 times."""
    trace = trace_of([[iteration(10, (20,), 60, 0)], [iteration(10, (20,), 100, 0)]], [4])
    assert predict(trace, FREE, world_size=3).efficiency == pytest.approx(220 / 300, rel=0.005)
    slowed = predict(trace, FREE, world_size=3, stragglers=[Straggler(rank=1, factor=2.2)])
    assert (slowed.compute_ns, slowed.iteration_ns) == (73, 220)
    assert slowed.efficiency == slowed.to_json()["efficiency"] == 73 / 220
    usual = Variation(kind="slowest", jitter=0.05, device_spread=0.05)
    assert predict(trace, FREE, world_size=64, variation=usual).compute_ns == 80


def test_the_interval_allows_for_the_speed_of_the_recorded_device():
    """One device: it is itself one of those that differ, and 90 % of them lie within 1.645 standard deviations."""
    trace = trace_of([[iteration(10**6, (2 * 10**6,), 3 * 10**6, 0)]], [4])
    assert predict(trace, FREE, world_size=1).interval_ns == (3 * 10**6, 3 * 10**6)
    prediction = predict(trace, FREE, world_size=1, variation=Variation(device_spread=0.02))
    assert prediction.iteration_ns == 3 * 10**6
    low, high = prediction.interval_ns
    assert (3 * 10**6 - low, high - 3 * 10**6) == pytest.approx((98_700, 98_700), abs=2)
