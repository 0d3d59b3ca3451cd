"""Scale models: the same iteration in another unit of time, with smaller tensors."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.prediction_errors import Configuration, make_row, policy_of, predict_target
from ddplab.reference.trace import Buffer, Trace
from ddplab.simulator.fabric import Fabric
from ddplab.simulator.prediction import predict
from ddplab.simulator.workload.compute_times import recorded_model
from ddplab.training_runs import Turn
from tests.simulator.changed_traces import with_workload
from tests.strategies import traces
from tests.validation_rows import FABRIC, TRACE
from validation.scale_model import ScaleModel


@given(traces(), st.integers(1, 50), st.floats(0.001, 1000))
def test_a_slower_device_on_a_slower_network_has_the_same_iteration_in_another_unit_of_time(trace, dilation, cap_mb):
    fabric = Fabric.from_table([(4, 0, 50), (4, 1000, 1050)], concurrency=1)
    slow = ScaleModel(dilation=dilation).trace(trace, iterations=99)
    settings = {"world_size": 4, "bucket_cap_mb": cap_mb}
    original = predict(ScaleModel().trace(trace, iterations=99), fabric, **settings)
    scaled = predict(slow, fabric.model_copy(update={"scale": dilation}), **settings)
    assert scaled.samples_ns == tuple(dilation * ns for ns in original.samples_ns)


@given(traces(), st.sampled_from(["ddplab", "torch"]))
def test_a_rank_that_waited_in_the_recording_does_not_wait_in_the_model(trace, source):
    waited = with_workload(trace, source=source)
    model = recorded_model(ScaleModel().trace(waited, iterations=99))
    assert not model.has_communication
    expected = recorded_model(waited).compute_times
    for times, recorded in zip(model.compute_times, expected, strict=True):
        assert times.compute_ns.tolist() == recorded.compute_ns[: len(times.compute_ns)].tolist()


@given(traces(), st.floats(0.001, 10))
def test_tensors_are_scaled_to_whole_elements_and_none_vanishes(trace, byte_scale):
    buffers = (Buffer(name="n", dtype="int64", size_bytes=8), Buffer(name="m", dtype="float32", size_bytes=4004))
    original = with_workload(trace, buffers=buffers)
    small = ScaleModel(byte_scale=byte_scale).trace(original, iterations=1)
    Trace.model_validate_json(small.model_dump_json())  # the sizes agree with the shapes
    for before, after in zip(original.workload.parameters, small.workload.parameters, strict=True):
        assert (after.size_bytes == 0) == (before.size_bytes == 0)
        elements = prod(before.shape)
        if elements:
            item = before.size_bytes // elements
            assert abs(after.size_bytes - before.size_bytes * byte_scale) <= item
    assert [buffer.size_bytes % 4 for buffer in small.workload.buffers] == [0, 0]
    assert small.workload.buffers[0].size_bytes % 8 == 0
    assert min(buffer.size_bytes for buffer in small.workload.buffers) > 0


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["dilation", "byte_scale"])
def test_a_factor_that_is_not_above_zero_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: expected a factor from 1e-06 to 1000000, got"):
        ScaleModel(**{name: value})


@given(st.lists(st.integers(1, 10**4), min_size=1, max_size=9), st.floats(0.5, 20))
def test_all_times_of_a_row_are_converted_to_those_of_the_original_and_no_errors(times, dilation):
    target = predict_target(TRACE, FABRIC, policy_of(Configuration(25.0)), 2)
    in_model = make_row("m", Configuration(25.0), target, [Turn(tuple(times))])
    scale = ScaleModel(dilation=dilation, byte_scale=0.5)
    original = scale.original_row(in_model)
    assert original.measured_ns == round(in_model.measured_ns / dilation)
    assert original.interval_ns == tuple(round(ns / dilation) for ns in in_model.interval_ns)
    assert original.times_ns == [round(ns / dilation) for ns in times]
    assert (original.error, original.coverage) == (in_model.error, in_model.coverage)
