"""Predictions: the path from a trace to a table, laws for any trace, policy and fabric, and comparisons."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, Policy, Straggler, Variation, predict

from ..explore import examples
from ..strategies import any_predictions, iteration, steady_fabrics, trace_of, traces
from .changed_traces import with_workload

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9, concurrency=2)
SLOWED = FABRIC.with_processor(slow_down=1.5)
ONE_GRADIENT = trace_of([[iteration(3, (7,), 9, 2)]], [4])


@given(traces())
def test_the_frame_holds_every_span(trace):
    prediction = predict(trace, FABRIC, world_size=2)
    frame = prediction.to_frame()
    assert len(frame) == len(prediction.spans)
    of_rank_0 = frame[(frame["rank"] == 0) & (frame["kind"] == "all_reduce")]
    assert set(of_rank_0["bucket"]) == {s.bucket for s in prediction.spans if (s.rank, s.kind) == (0, "all_reduce")}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"world_size": 0}, "world_size: input should be greater than or equal to 1, got 0"),
        ({"world_size": 2, "bucket_cap_mb": -1}, "bucket caps: expected sizes in MiB, none negative"),
        ({"world_size": 2, "order": "backward"}, "order: input should be .* got 'backward'"),
        ({"world_size": 2, "plan": [[0, 7]]}, r"plan: expected parameter indices 0 to 0, got \[7\]"),
        ({"world_size": 2, "plan": [[0, 0]]}, r"plan: parameters \[0\] are in more than one bucket"),
        ({"world_size": True}, "world_size: input should be a valid integer, got True"),
        ({"trace": "t.json"}, "trace: input should be an instance of Trace, got 't.json'"),
        ({"fabric": [FABRIC]}, r"fabric: input should be an instance of Fabric, got \[Fabric"),
        ({"variation": "fitted"}, "variation: input should be an instance of Variation, got 'fitted'"),
        ({"stragglers": Straggler(factor=2)}, r"stragglers: expected a list of values, got Straggler.*write \["),
        ({"stragglers": [(0, 2.0)]}, r"stragglers\[0\]: input should be an instance of Straggler, got \(0, 2.0\)"),
        ({"inputs": 3}, r"inputs: expected a list of values, got 3; write \["),
        ({"inputs": [3, 2.0]}, r"inputs\[1\]: input should be a valid integer, got 2.0"),
        ({"engine": "fast"}, "engine: input should be 'auto', 'events' or 'closed_form', got 'fast'"),
        ({"fabric": SLOWED, "engine": "closed_form"}, "closed form: expected constant speeds"),
        ({"inputs": [1, 2], "measured": {2: 100}}, "measured: expected none with inputs"),
        ({"inputs": [1]}, r"^inputs: expected 2 numbers of batches, one per rank, .*; got \[1\]$"),
        ({"inputs": []}, r"^inputs: expected 2 numbers of batches, one per rank, .*; got \[\]$"),
        ({"inputs": [2, -1]}, r"^inputs: expected 2 numbers .* none negative; got \[2, -1\]$"),
        ({"inputs": [0, 0]}, r"^inputs: expected 2 numbers .* not all 0 .*; got \[0, 0\]$"),
        ({"hook": 3}, "hook: expected a CommHook or the name of one, such as 'fp16', got 3"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments, says):
    with pytest.raises(ValueError, match=says) as told:
        predict(**({"trace": ONE_GRADIENT, "fabric": FABRIC, "world_size": 2} | arguments))
    assert "\n" not in str(told.value)


@given(traces(), st.integers(1, 3), st.sampled_from([np.array, tuple, list]))
def test_whole_numbers_of_numpy_are_whole_numbers(trace, world_size, kind):
    inputs = [1] * world_size
    expected = predict(trace, FABRIC, world_size=world_size, inputs=inputs)
    assert predict(trace, FABRIC, world_size=np.int64(world_size), inputs=kind(inputs)) == expected


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        (lambda: Straggler(factor=float("nan")), "factor: input should be a finite number, got nan"),
        (lambda: Straggler(factor=0.5), "factor: input should be greater than or equal to 1, got 0.5"),
        (lambda: Variation(kind="wild"), "kind: input should be 'recorded', .* got 'wild'"),
        (lambda: Policy(bucket_cap_mb=float("nan")), "bucket caps: expected sizes in MiB, none negative, got .nan."),
        (lambda: Policy(sync_evry=2), "sync_evry: extra inputs are not permitted"),
        (lambda: Fabric.from_table([(2, 8, -5)]), r"all_reduce\[0\].ns: input should be .* got -5"),
        (lambda: Fabric.from_alpha_beta(1, float("nan")), r"bytes_per_s: input should be a finite number, got nan"),
        (lambda: Fabric.from_table([(2, 8, 5)]).all_reduce_ns(8, 4), "world_size: expected one of .2., .* got 4"),
        (lambda: FABRIC.all_reduce_ns(8, 0), "^world_size: expected at least 1, got 0$"),
        (lambda: Fabric.from_alpha_beta(1, 0.0), r"bytes_per_s: input should be greater than or equal to 1, got 0"),
    ],
)
def test_what_is_described_wrongly_is_named_in_one_line(mistake, says):
    with pytest.raises(ValueError, match=says) as told:
        mistake()
    assert "\n" not in str(told.value)


@examples(20)
@given(any_predictions(fabrics=steady_fabrics))
def test_overlap_never_hurts_where_speeds_are_constant(asked):
    prediction = asked.predict()
    if len(prediction.timeline.engine_input.ranks) == 1:
        assert prediction.iteration_ns <= prediction.no_overlap_ns


@examples(20)
@given(any_predictions(variation=st.just(Variation()), stragglers=False), st.integers(2, 5))
def test_a_cycle_is_its_local_iterations_and_a_synchronised_one(asked, every):
    """With a recording of one rank; iterations under `no_sync` have no optimiser step."""
    ranks = asked.trace.ranks[:1]
    one_rank = with_workload(asked.trace.model_copy(update={"ranks": ranks}), world_size=1)
    asked = replace(asked, trace=one_rank, inputs=None)
    one, cycle = (
        replace(asked, policy=asked.policy.model_copy(update={"sync_every": k})).predict() for k in (1, every)
    )
    recorded = ranks[0].iterations
    assert len(cycle.samples_ns) == max(1, len(recorded) // every)
    for number, sample in enumerate(cycle.samples_ns):
        numbers = [place % len(recorded) for place in range(number * every, (number + 1) * every)]
        local_ns = sum(recorded[place].duration_ns - _optimizer_ns(recorded[place]) for place in numbers[:-1])
        assert sample == round((local_ns + one.samples_ns[numbers[-1]]) / every)


def _optimizer_ns(recorded):
    return (recorded.optimizer_end_ns or 0) - (recorded.optimizer_start_ns or 0)


TRACE = trace_of([[iteration(10**6, (3 * 10**6, 2 * 10**6), 4 * 10**6, 10**6)]], [4 * 10**6, 10**6])
SLOW, FAST = (Fabric.from_alpha_beta(alpha_ns=1000, bytes_per_s=rate) for rate in (1e9, 1e10))


@examples(20)
@given(any_predictions(), any_predictions())
def test_the_parts_of_a_comparison_add_up_to_its_difference(asked, other):
    """Of single iterations exactly: of cycles each part is rounded, and the timeline is that of one cycle."""
    single = {"sync_every": 1}
    one, two = (replace(some, policy=some.policy.model_copy(update=single)).predict() for some in (asked, other))
    comparison = one.compare(two)
    assert comparison.difference_ns == two.iteration_ns - one.iteration_ns == -two.compare(one).difference_ns
    assert sum(comparison.parts_ns.values()) == comparison.difference_ns
    assert comparison.ratio == pytest.approx(two.iteration_ns / max(1, one.iteration_ns))
    least, most = comparison.difference_interval_ns
    assert least <= comparison.difference_ns <= most
    assert two.compare(one).difference_interval_ns == (-most, -least)
    assert comparison.is_tie == (least <= 0 <= most)


def test_a_comparison_reads_as_a_sentence():
    slow, fast = (predict(TRACE, fabric, world_size=2) for fabric in (SLOW, FAST))
    sentence, parts = repr(slow.compare(fast)).split("; by part, ms: ")
    assert sentence.startswith("5.00 ms instead of 9.00 ms: 4.00 ms shorter, 0.555 times as long; the difference")
    assert parts == "exposed communication -4.00"
    assert repr(slow.compare(slow)).endswith("by part, ms: no difference")
    late = predict(TRACE, FAST, world_size=2, stragglers=[Straggler(rank=1, factor=2)])
    assert "backward" in repr(fast.compare(late))


def test_parts_of_cycles_of_different_lengths_are_those_of_one_iteration():
    trace = trace_of([[iteration(10**6, (3 * 10**6,), 4 * 10**6, 10**6)] * 4], [4 * 10**6])
    single, cycle = (predict(trace, FAST, world_size=2, sync_every=k) for k in (1, 4))
    comparison = single.compare(cycle)
    assert abs(sum(comparison.parts_ns.values()) - comparison.difference_ns) <= len(cycle.breakdown)


def test_a_prediction_names_messages_beyond_the_measured_ones_and_is_less_sure():
    measured = Fabric.from_table([(2, size, 1000 + size) for size in (4, 8, 4096)])
    cut_off = Fabric.from_table([(2, size, 1000 + size) for size in (2048, 4096)])
    trace = trace_of([list(ONE_GRADIENT.ranks[0].iterations * 2)], [4])
    inside, beyond = (predict(trace, fabric, world_size=2) for fabric in (measured, cut_off))
    assert (inside.assumed, inside.iteration_ns) == ((), beyond.iteration_ns)
    (sentence,) = beyond.assumed
    assert sentence.startswith("all-reduces on 2 ranks were measured from 2 KiB to 4 KiB; smaller messages follow")
    assert beyond.to_json()["assumed"] == [sentence]
    assert beyond.causes_ns["collectives"][1] > 1000
    assert "collectives" not in inside.causes_ns
    assert predict(trace, cut_off, world_size=1).assumed == ()
