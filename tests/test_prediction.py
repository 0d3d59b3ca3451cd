"""Predictions from traces: the whole path from a recording to a table, a figure, a timeline."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.bucketing import ORDERS, bucket_caps, plan_buckets
from simulator import Fabric, Policy, Straggler, Variation, predict
from simulator.fabric import Linear, Processor
from simulator.schedule.schedule import buckets_of
from simulator.workload.compute_times import recorded_model

from .strategies import caps_mb, traces

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9, concurrency=2)


@given(traces(), st.integers(1, 5), caps_mb(), st.sampled_from(ORDERS))
def test_a_prediction_lies_between_its_bounds(trace, world_size, cap, order):
    prediction = predict(trace, FABRIC, world_size=world_size, bucket_cap_mb=cap, order=order)
    low, high = prediction.interval_ns
    assert low <= prediction.iteration_ns <= high
    assert 0 <= prediction.exposed_comm_ns <= prediction.iteration_ns
    assert {span.rank for span in prediction.spans} <= set(range(world_size))


@given(traces(), caps_mb())
def test_one_rank_is_local_training(trace, cap):
    prediction = predict(trace, FABRIC, world_size=1, bucket_cap_mb=cap)
    assert prediction.iteration_ns in {
        iteration.end_ns - iteration.forward_start_ns for iteration in trace.ranks[0].iterations
    }
    assert prediction.no_overlap_ns == prediction.compute_ns  # no copies are charged on this fabric


@given(traces(), caps_mb(), st.sampled_from(ORDERS))
def test_buckets_are_those_of_the_reducers_own_rule(trace, cap, order):
    expected = plan_buckets(
        order, trace.sizes_bytes, bucket_caps(cap), ready_order=recorded_model(trace).ready_order, keys=trace.keys
    )
    prediction = predict(trace, FABRIC, world_size=2, bucket_cap_mb=cap, order=order)
    assert prediction.buckets == tuple(map(tuple, expected))
    assert buckets_of(Policy(bucket_cap_mb=cap, order=order), recorded_model(trace)) == expected


@given(traces(), st.integers(2, 4))
def test_a_plan_that_repeats_the_caps_predicts_the_same(trace, world_size):
    by_caps = predict(trace, FABRIC, world_size=world_size, bucket_cap_mb=1e-4)
    by_plan = predict(trace, FABRIC, world_size=world_size, plan=by_caps.buckets)
    assert by_plan == by_caps


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
        ({"world_size": 0}, "world_size: expected at least 1, got 0"),
        ({"world_size": 2, "bucket_cap_mb": -1}, "bucket caps: expected sizes in MiB, none negative"),
        ({"world_size": 2, "order": "backward"}, "order: input should be .* got 'backward'"),
        ({"world_size": 2, "plan": [[0, 7]]}, r"plan: expected parameter indices 0 to 0, got \[7\]"),
        ({"world_size": 2, "plan": [[0, 0]]}, r"plan: parameters \[0\] are in more than one bucket"),
        ({"world_size": 2.0}, "world_size: expected a whole number of ranks, got 2.0"),
        ({"world_size": True}, "world_size: expected a whole number of ranks, got True"),
        ({"trace": "t.json"}, r"trace: expected a Trace, got 't.json'; load one with Trace.load"),
        ({"fabric": "f.json"}, r"fabric: expected a Fabric, got 'f.json'; load one with Fabric.load"),
        ({"fabric": [FABRIC]}, r"fabric: expected a Fabric, got \[.*Fabric.merged"),
        ({"variation": "fitted"}, r"variation: expected a Variation, got 'fitted'; make one"),
        ({"stragglers": Straggler(factor=2)}, r"stragglers: expected a list of Straggler, got Straggler.*write \["),
        ({"stragglers": [(0, 2.0)]}, r"stragglers\[0\]: expected a Straggler, got \(0, 2.0\)"),
        ({"inputs": 3}, "inputs: expected a list with the number of batches of each rank, got 3"),
        ({"inputs": [3, 2.0]}, r"inputs\[1\]: expected a whole number of batches, got 2.0"),
        ({"hook": 3}, "hook: expected a CommHook or the name of one, such as 'fp16', got 3"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments, says):
    from .reference.test_trace import DOCUMENT, Trace

    trace = Trace.model_validate_json(json.dumps(DOCUMENT))
    with pytest.raises(ValueError, match=says) as told:
        predict(**({"trace": trace, "fabric": FABRIC, "world_size": 2} | arguments))
    assert "\n" not in str(told.value)


def test_a_policy_of_another_kind_is_named():
    from .reference.test_trace import DOCUMENT, Trace

    with pytest.raises(ValueError, match=r"^policy: expected a Policy, got \{'sync_every': 2\}; make one"):
        predict(Trace.model_validate_json(json.dumps(DOCUMENT)), FABRIC, world_size=2, policy={"sync_every": 2})


@given(traces(), st.integers(1, 3), st.sampled_from([np.array, tuple, list]))
def test_whole_numbers_of_numpy_are_whole_numbers(trace, world_size, kind):
    inputs = [1] * world_size
    assert predict(trace, FABRIC, world_size=np.int64(world_size), inputs=kind(inputs)) == predict(
        trace, FABRIC, world_size=world_size, inputs=inputs
    )


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
        (
            lambda: Fabric.from_table([(2, 8, 5)]).all_reduce_ns(8, 4),
            "world_size: expected one of .2., .* got 4",
        ),
    ],
)
def test_what_is_described_wrongly_is_named_in_one_line(mistake, says):
    with pytest.raises(ValueError, match=says) as told:
        mistake()
    assert "\n" not in str(told.value)


@given(traces())
def test_a_trace_with_communication_is_not_charged_twice(trace):
    """What its recording holds already: puts, launches, broadcasts."""
    recorded = trace.model_copy(update={"workload": trace.workload.model_copy(update={"source": "torch"})})
    costly = FABRIC.model_copy(update={"processor": Processor(pack=Linear(fixed_ns=9), launch_ns=7)})
    assert (
        predict(recorded, costly, world_size=2).iteration_ns == predict(recorded, FABRIC, world_size=2).iteration_ns
    )
