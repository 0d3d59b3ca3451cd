"""Anchoring: measured iterations move and narrow a prediction as the errors of the model allow."""

from math import exp, log, log2, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, predict
from ddplab.simulator.anchoring import (
    CORRELATED_DOUBLINGS,
    LONGEST,
    MEASUREMENT_DEVIATION,
    OF_ONE_RANK,
    Expected,
    correct,
)
from ddplab.simulator.catalogue import load_fabric
from ddplab.simulator.fabric import Linear, Processor
from ddplab.simulator.inputs_with_default_costs import complete
from ddplab.simulator.prediction import System

from ..explore import examples
from ..strategies import any_predictions, iteration, trace_of
from .changed_traces import gpu_trace

MS = 1_000_000
GPU = gpu_trace("NVIDIA A100-SXM4-40GB"), load_fabric("aws-p4d")
CAUSES = ("collectives", "device speeds", "launches")


@st.composite
def expectations(draw, ranks: int) -> Expected:
    """Predictions of 1 to 2 s whose errors have some of three causes; each up to a third of the time."""
    iteration_ns = draw(st.integers(1000 * MS, 2000 * MS))
    reaches = st.tuples(*[st.integers(MS, iteration_ns // 3)] * 2)
    return Expected(ranks, iteration_ns, draw(st.dictionaries(st.sampled_from(CAUSES), reaches, min_size=1)))


@st.composite
def cases(draw) -> tuple[Expected, list[Expected]]:
    """One prediction to correct, and one to three for other numbers of ranks that were measured."""
    measured = draw(st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True))
    return draw(expectations(draw(st.integers(1, 4096)))), [draw(expectations(ranks)) for ranks in measured]


@examples(12)
@given(cases())
def test_measuring_what_was_predicted_changes_nothing_and_each_further_measurement_widens_nothing(case):
    target, expected = case
    least = 1.0
    for count in range(1, len(expected) + 1):
        some = expected[:count]
        factor, narrowing, *_, anchors = correct(target, [one.iteration_ns for one in some], some)
        assert factor == pytest.approx(1)
        assert narrowing <= least + 1e-9
        assert not any("contradicts" in anchor.sentence() for anchor in anchors)
        least = narrowing


@examples(12)
@given(cases(), st.floats(0.5, 2))
def test_the_moves_of_the_measurements_multiply_to_the_correction(case, ratio):
    target, expected = case
    expected = [one for one in expected if one.ranks > 1]  # on one rank only near ones are taken
    correction = correct(target, [round(one.iteration_ns * ratio) for one in expected], expected)
    assert prod(anchor.moved for anchor in correction.anchors) == pytest.approx(correction.factor)


@examples(20)
@given(st.data(), st.integers(2, 64), st.floats(0.8, 1.25))
def test_the_answer_lies_between_prediction_and_measurement_if_the_same_ranks_were_measured(data, ranks, ratio):
    expected = data.draw(expectations(ranks))
    factor = correct(expected, [round(expected.iteration_ns * ratio)], [expected]).factor
    assert min(1, ratio) - 1e-6 <= factor <= max(1, ratio) + 1e-6


@examples(20)
@given(cases(), st.floats(1.5, 3))
def test_a_measurement_far_outside_of_the_interval_contradicts_and_widens(case, factor):
    target, [first, *_] = case
    errors = sum(log(1 + max(reach) / first.iteration_ns) for reach in first.causes_ns.values())
    far = min(LONGEST, exp(factor * 4 * (errors + MEASUREMENT_DEVIATION)))  # beyond it, measurements are refused
    first = first._replace(ranks=max(2, first.ranks))  # on one rank, those that contradict are refused
    [anchor] = correct(target, [round(first.iteration_ns * far)], [first]).anchors
    agreeing = correct(target, [first.iteration_ns], [first])
    assert "contradicts" in anchor.sentence()
    assert ("check that" in anchor.sentence()) != anchor.is_far  # then the commands give the advice
    assert correct(target, [round(first.iteration_ns * far)], [first]).narrowing > agreeing.narrowing


def test_nine_in_ten_corrected_intervals_contain_the_truth_if_errors_are_as_assumed():
    """Errors are drawn for 2, 4 and 64 ranks, from the distribution that the module's docstring states."""
    ranks, reach = (2, 4, 64), {"collectives": (0.01, 0.04, 0.2), "device speeds": (0.05, 0.05, 0.05)}
    reach["compute times"] = (0.3, 0.2, 0.2)  # the same on any number of ranks
    doublings = np.log2(ranks)
    correlation = np.exp(-np.abs(doublings[:, None] - doublings) / CORRELATED_DOUBLINGS)
    deviations = {cause: np.log1p(of_ranks) / 1.645 for cause, of_ranks in reach.items()}
    random = np.random.default_rng(0)
    errors = sum(
        random.multivariate_normal(
            np.zeros(3), (1 if cause in OF_ONE_RANK else correlation) * np.outer(of, of), size=2000
        )
        for cause, of in deviations.items()
    )
    expected = [
        Expected(one, ns, {cause: (round(of[at] * ns),) * 2 for cause, of in reach.items()})
        for at, (one, ns) in enumerate(zip(ranks, (1000 * MS, 1000 * MS, 3000 * MS), strict=True))
    ]
    total = float(np.sqrt(sum(of[2] ** 2 for of in deviations.values())))
    hits, before = 0, 0
    for error in errors:
        noisy = np.exp(error[:2] + random.normal(0, MEASUREMENT_DEVIATION, 2))
        factor, narrowing, *_ = correct(expected[2], [round(1000 * MS * ratio) for ratio in noisy], expected[:2])
        hits += abs(error[2] - log(factor)) <= 1.645 * total * narrowing
        before += abs(error[2]) <= 1.645 * total
    assert before / len(errors) == pytest.approx(0.9, abs=0.02)
    assert hits / len(errors) == pytest.approx(0.9, abs=0.02)


@examples(12)
@given(cases())
def test_the_causes_together_give_the_interval(case):
    target, expected = case
    correction = correct(target, [one.iteration_ns for one in expected], expected)
    deviations = target.deviations()
    left = sum((correction.by_cause[cause] * one) ** 2 for cause, one in deviations.items())
    assert left == pytest.approx(correction.narrowing**2 * sum(one**2 for one in deviations.values()))


def test_two_measurements_that_contradict_each_other_contradict_the_model():
    """Each lies in its interval, which comes from computation, and both would have to be long or short."""
    errors = {"compute times": (200 * MS, 200 * MS), "collectives": (10 * MS, 10 * MS)}
    expected = [Expected(ranks, 1000 * MS, errors, 950 * MS) for ranks in (8, 16, 64)]
    for measured in (1150 * MS, 900 * MS), (900 * MS, 1150 * MS):
        correction = correct(expected[2], measured, expected[:2])
        assert [anchor.is_far for anchor in correction.anchors] == [True, True]
        assert correction.narrowing > 0.5
        for ns, one in zip(measured, expected, strict=False):
            assert not correct(one, [ns], [one]).anchors[0].contradicts


def test_a_measured_iteration_says_less_of_its_efficiency():
    """Computation may take a fifth longer or shorter. Errors are drawn, and what 8 ranks say is subtracted."""
    reach = {"compute times": (200 * MS,) * 2, "collectives": (50 * MS,) * 2}
    bounds = {"compute times": (0.25, 0.25)}
    expected = [Expected(ranks, 1000 * MS, reach, 800 * MS, bounds) for ranks in (8, 64)]
    correction = correct(expected[1], [1000 * MS], expected[:1])
    assert correction.narrowing < 0.3
    of_computation, of_both = (
        log(1.25) / 1.645,
        {cause: log(1 + ns / 1e9) / 1.645 for cause, (ns, _) in reach.items()},
    )
    random = np.random.default_rng(0)
    passes, link = (
        random.normal(size=5000),
        random.multivariate_normal([0, 0], [[1, exp(-0.5)], [exp(-0.5), 1]], 5000),
    )
    seen = passes * of_both["compute times"] + link[:, 0] * of_both["collectives"]
    seen += random.normal(size=5000) * MEASUREMENT_DEVIATION
    error = passes * (of_computation - of_both["compute times"]) - link[:, 1] * of_both["collectives"]
    unexplained = error - seen * (error @ seen) / (seen @ seen)
    assert correction.of_efficiency == pytest.approx(np.std(unexplained) / np.std(error), rel=0.03)
    assert correction.of_efficiency > 0.8


@examples(12)
@given(any_predictions(), st.floats(0.9, 1.1))
def test_predict_takes_measured_times(asked, ratio):
    plain = asked.predict()
    ranks = asked.world_size
    if not plain.iteration_ns:
        return
    measured_ns = max(1, round(plain.iteration_ns * ratio))
    expected = plain.expected(ranks)
    if measured_ns < expected.least_ns or (ranks == 1 and measured_ns > expected.most_ns):
        with pytest.raises(ValueError, match=r"measured: expected at (least|most) .* ms .* one rank"):
            plain.anchored(ranks, {ranks: measured_ns}, {ranks: plain})
        return
    prediction = plain.anchored(ranks, {ranks: measured_ns}, {ranks: plain})
    low, high = prediction.interval_ns
    assert low <= prediction.iteration_ns <= high
    assert prediction.median is plain.median
    assert [anchor.measured_ns for anchor in prediction.anchors] == [measured_ns]


def test_an_anchor_on_few_ranks_moves_the_prediction_for_many():
    """Copies take 10 ms with an error of 100 %: what was measured on 2 ranks says how long they take on 64."""
    trace = trace_of([[iteration(0, (10 * MS,), 100 * MS, 0)]], [10**6])
    processor = Processor(copy_out=Linear(ns_per_byte=10), copy_error=1.0)
    fabric = Fabric.from_alpha_beta(alpha_ns=0, bytes_per_s=1e18).model_copy(update={"processor": processor})
    plain = predict(trace, fabric, world_size=64)
    prediction = predict(trace, fabric, world_size=64, measured={2: 115 * MS})
    assert plain.iteration_ns == pytest.approx(110 * MS, rel=1e-3)
    assert 111 * MS < prediction.iteration_ns < 115 * MS
    assert np.ptp(prediction.interval_ns) < np.ptp(plain.interval_ns)
    [anchor] = prediction.anchors
    weight = log(anchor.moved) / log(115 / 110)  # the rest may be noise of the measurement
    assert 0.9 < weight < 1


def test_a_measurement_that_contradicts_does_not_make_computation_shorter():
    """Computation takes 90 ms of 110; nine times as much was measured on 2 ranks, so the interval is wide."""
    trace = trace_of([[iteration(0, (90 * MS,), 90 * MS, 0)]], [10**6])
    fabric = Fabric.from_table([(2, 10**6, 20 * MS), (64, 10**6, 20 * MS)])
    spread = Fabric(all_reduce=tuple(row.model_copy(update={"spread": 0.3}) for row in fabric.all_reduce))
    plain = predict(trace, spread, world_size=64)
    prediction = predict(trace, spread, world_size=64, measured={2: 900 * MS})
    assert prediction.contradictions
    assert prediction.interval_ns[0] == round(plain.expected(64).least_ns)
    assert 85 * MS < prediction.interval_ns[0] < 90 * MS


@examples(12)
@given(st.floats(0.99, 1.1) | st.floats(0.3, 4), st.sampled_from([2, 8, 64]))
def test_no_prediction_for_several_ranks_is_below_that_for_one_which_was_measured(ratio, ranks):
    """What one rank takes alone contradicts the trace, or lengthens every iteration."""
    system = System(complete(*GPU, measured={1: round(ratio * GPU[0].ranks[0].iterations[0].duration_ns)}))
    if ratio < 0.9 or ratio > 1.15:
        with pytest.raises(ValueError, match=r"^measured: expected at (least|most) .*, got .* ms on 1 rank; [^\n]*$"):
            system.at(ranks)
    elif 0.99 < ratio < 1.1:
        alone, several = (system.at(one) for one in (1, ranks))
        assert alone.iteration_ns < several.iteration_ns
        assert ratio > 1.03 or not several.contradictions


@examples(20)
@given(
    st.dictionaries(st.sampled_from([2, 8, 32]), st.floats(0.7, 4), min_size=1),
    st.sampled_from([4, 16, 64, 512]),
    st.booleans(),
)
def test_many_ranks_are_never_predicted_to_be_faster_than_few_that_were_measured(ratios, ranks, is_known):
    """The model has them slower. Measurements that deny each other bound nothing between them."""
    trace = trace_of([[iteration(10 * MS, (60 * MS, 30 * MS), 90 * MS, 9 * MS)] * 3], [10**8, 10**8])
    trace = GPU[0] if is_known else trace
    fabric = load_fabric("aws-p4d").with_processor(unexplained=0.3)
    plain = System(complete(trace, fabric))
    measured = {one: round(ratio * plain.at(one).iteration_ns) for one, ratio in sorted(ratios.items())}
    measured = {one: max(ns, round(1.05 * plain.at(one).compute_ns)) for one, ns in measured.items()}
    system = System(complete(trace, fabric, measured=measured))
    asked, few = system.at(ranks), {one: system.at(one).iteration_ns for one in measured}
    assert prod(anchor.moved for anchor in asked.anchors) == pytest.approx(
        asked.iteration_ns / plain.at(ranks).iteration_ns, rel=1e-6
    )
    if ranks > max(measured):
        assert asked.iteration_ns >= max(few.values()) - 1
        if not any(anchor.contradicts for anchor in asked.anchors):
            assert asked.interval_ns[0] >= system.at(max(measured)).interval_ns[0] - 1
    elif ranks < min(measured):
        assert asked.iteration_ns <= min(few.values()) + 1


def test_a_network_measured_on_few_ranks_says_less_of_many():
    """All-reduces of 100 or 120 ms, on links that may be 14 % off, end the iteration."""
    trace = trace_of([[iteration(0, (10 * MS,), 10 * MS, 0)]], [10**6])
    fabric = Fabric.from_table([(2, 10**6, 100 * MS), (64, 10**6, 120 * MS)])
    spread = Fabric(all_reduce=tuple(row.model_copy(update={"spread": 0.14}) for row in fabric.all_reduce))
    plain = predict(trace, spread, world_size=2)
    [anchor] = predict(trace, spread, world_size=64, measured={2: round(1.1 * plain.iteration_ns)}).anchors
    assert log(anchor.moved) / log(1.1) == pytest.approx(exp(-log2(32) / CORRELATED_DOUBLINGS), rel=0.1)


def test_the_interval_of_an_iteration_of_minutes_is_finite():
    """The square of a reach of four seconds, in nanoseconds, exceeds an int64."""
    minute = 60_000 * MS
    trace = trace_of([[iteration(0, (10 * MS,), minute, 0)]], [10**6])
    processor = Processor(copy_out=Linear(fixed_ns=minute), copy_error=1.0)
    fabric = Fabric.from_alpha_beta(alpha_ns=0, bytes_per_s=1e18).model_copy(update={"processor": processor})
    prediction = predict(trace, fabric, world_size=64, measured={2: 3 * minute})
    low, high = prediction.interval_ns
    assert minute < low < prediction.iteration_ns < high < 5 * minute
