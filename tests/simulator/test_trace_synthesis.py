"""Synthesis: traces made from operations and a device, or converted to another device."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ddplab.reference.trace import Parameter, Trace
from ddplab.simulator import Fabric, predict
from ddplab.simulator.workload.roofline import (
    CONVOLUTIONS,
    Device,
    GradientOperations,
    Operation,
    Operations,
    built_in_operations,
    counted_models,
    data_sheets,
)
from ddplab.simulator.workload.trace_synthesis import (
    _paced,
    batches_of,
    rescale,
    synthesize,
    synthesize_batch,
    with_batch,
)

from ..explore import examples
from .changed_traces import with_parameters, with_workload
from .random_operations import (
    DOCUMENT,
    OPERATION,
    SLOW,
    any_operations,
    devices,
    moments,
    ready_order,
    recordings,
    validated,
)

PARTS = ("forward_ns", "backward_ns", "optimizer_ns")
FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9)


def except_for_the_device(trace: Trace) -> Trace:
    return with_workload(trace, device_name="", flops_per_s=None, memory_bytes_per_s=None, compute_bounds=(1.0, 1.0))


@given(recordings(), devices())
def test_the_same_device_gives_the_same_trace(recording, device):
    trace, operations = recording
    assert except_for_the_device(rescale(trace, operations, device, device)) == except_for_the_device(trace)


@given(recordings(), devices(most_pace_ns=0))
def test_a_device_twice_as_fast_halves_every_interval_up_to_rounding(recording, device):
    trace, operations = recording
    assume(device.time_ns((*operations.forward, *operations.loss, *operations.backward, *operations.step)))
    rates = {"flops_per_s": 2 * device.flops_per_s, "bytes_per_s": 2 * device.bytes_per_s}
    rescaled = rescale(trace, operations, device, device.model_copy(update=rates))
    for old, new in zip(trace.ranks, rescaled.ranks, strict=True):
        for before, after in zip(old.iterations, new.iterations, strict=True):
            for (a, b), (c, d) in zip(pairwise(moments(before)), pairwise(moments(after)), strict=True):
                assert abs((b - a) - 2 * (d - c)) <= 1


@given(recordings(), devices(), devices())
def test_a_rescaled_trace_is_valid_and_keeps_every_order(recording, old, new):
    trace, operations = recording
    rescaled = rescale(trace, operations, old, new)
    assert validated(rescaled) == rescaled
    assert predict(rescaled, FABRIC, world_size=2).iteration_ns >= 0
    for rank, again in zip(trace.ranks, rescaled.ranks, strict=True):
        for before, after in zip(rank.iterations, again.iterations, strict=True):
            pairs = sorted(zip(before.ready_ns, after.ready_ns, strict=True))
            for (a, b), (c, d) in pairwise(pairs):
                assert (a < c) == (b < d)


def moves(bytes_moved: int, kernels: int = 1) -> Operation:
    return Operation(flops=0, bytes_moved=bytes_moved, kernels=kernels)


def by_hand(forward: Operation, *gradients: tuple[Operation, ...], step: tuple[Operation, ...] = ()) -> Operations:
    """A forward pass, the operations of each gradient in ready order, and a step."""
    parameters = tuple(
        Parameter(name=f"p{index}", shape=(1,), dtype="float32", size_bytes=4) for index in range(len(gradients))
    )
    backward = tuple(GradientOperations(parameter=index, operations=some) for index, some in enumerate(gradients))
    return Operations(
        model="m", torch_version="", parameters=parameters, forward=(forward,), gradients=backward, step=step
    )


def test_each_gradient_brings_its_own_operations_whatever_the_order():
    """A gap belongs to the parameter that is ready at its end; the new device is faster for the weight's alone."""
    arithmetic, memory = Operation(flops=1000, bytes_moved=0), moves(1000)
    operations = by_hand(memory, (arithmetic,), (memory,), step=(memory,))
    trace = synthesize(operations, SLOW)
    one = trace.ranks[0].iterations[0]
    swapped = one.model_copy(update={"ready_ns": (4000, 2500), "backward_end_ns": 4000, "optimizer_start_ns": 4000})
    swapped = swapped.model_copy(update={"optimizer_end_ns": 5000, "end_ns": 5000, "backward_start_ns": 1000})
    rank = trace.ranks[0].model_copy(update={"iterations": (swapped,)})
    fast = SLOW.model_copy(update={"flops_per_s": 1e10, "name": "fast"})
    rescaled = rescale(trace.model_copy(update={"ranks": (rank,)}), operations, SLOW, fast)
    assert rescaled.ranks[0].iterations[0].ready_ns == (2500 + 150, 2500)
    assert rescaled.workload.device_name == "fast, rescaled from slow by its roofline"


@given(st.floats(0.01, 100))
def test_another_batch_takes_between_as_long_and_a_time_in_proportion(multiple):
    """A step of one sample in place of 64 was promised in a 64th of the time, whatever the host needs."""
    recorded = synthesize(by_hand(moves(10**6), (moves(10**6),), (moves(10**6),)), SLOW)
    scaled = with_batch(recorded, multiple)
    before, after = (one.ranks[0].iterations[0].duration_ns for one in (recorded, scaled))
    low, high = scaled.workload.compute_bounds
    assert low * after <= min(before, multiple * before) * (1 + 1e-3)
    assert high * after >= max(before, multiple * before) * (1 - 1e-3)


@examples(8)
@given(
    st.sampled_from(counted_models()),
    st.sampled_from(sorted(data_sheets())),
    st.sampled_from([0.25, 0.5, 3]),
    st.none() | st.sampled_from([0.8, 2]),
)
def test_a_trace_made_of_a_model_by_name_has_other_batches_as_the_model_has(model, device, multiple, longer):
    """Its passes were scaled without the host's pace; a batch that was not measured has no measured step."""
    sheet = data_sheets()[device]
    operations = built_in_operations(model, sheet.autocast)
    by_name = synthesize(operations, sheet)
    step_ns = None if longer is None else round(longer * by_name.ranks[0].iterations[0].end_ns)
    trace = validated(synthesize_batch(operations, sheet, step_ns, 1.0))
    assert batches_of(trace)(multiple) == synthesize_batch(operations, sheet, step_ns, multiple)
    assert batches_of(trace.model_copy(update={"ranks": by_name.ranks * 2})) is None
    if longer is None:
        assert with_batch(trace, multiple) == synthesize(operations.with_batch(multiple), sheet)
    else:
        assert f"; passes of batch {operations.batch} scaled to" in with_batch(trace, multiple).workload.device_name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": ["bias"]}, "parameters[0].name: expected 'bias', as in the trace, got 'weight'"),
        ({"shape": [(1, 2)]}, "parameters[0].shape: expected (1, 2), as in the trace, got (2,)"),
        ({"dtype": ["int32"]}, "parameters[0].dtype: expected 'int32', as in the trace, got 'float32'"),
        ({"batch": 4}, "batch: expected 4, as in the trace, got 3"),
        ({"parameters": ()}, "parameters: expected 0, as in the trace, got 1"),
        ({"source": "torch"}, "workload.source: expected 'module', a trace of computation alone, got 'torch'"),
    ],
)
def test_operations_of_another_model_are_refused_in_one_line(change, says):
    operations = Operations.model_validate_json(json.dumps(DOCUMENT))
    changed = with_parameters if change.keys() <= Parameter.model_fields.keys() else with_workload
    other = changed(synthesize(operations, SLOW), **change)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        rescale(other, operations, SLOW, SLOW)
    assert "\n" not in str(caught.value)


@given(any_operations(), devices(), st.none() | st.integers(6, 10**12))
def test_a_synthesised_trace_is_valid_and_keeps_the_order_of_readiness(operations, device, step_ns):
    assume(device.time_ns((*operations.forward, *operations.loss, *operations.backward, *operations.step)))
    trace = synthesize(operations, device, step_ns=step_ns)
    assert validated(trace) == trace
    assert ready_order(trace) == list(operations.ready_order)
    if step_ns is not None:
        assert trace.ranks[0].iterations[0].duration_ns == step_ns
        assert predict(trace, FABRIC, world_size=1, assume=False).iteration_ns == step_ns


@given(any_operations(), devices(most_pace_ns=0))
def test_a_data_sheet_alone_gives_the_roofline_and_a_nanosecond_a_gradient(operations, device):
    whole = device.time_ns((*operations.forward, *operations.loss, *operations.backward, *operations.step))
    assume(whole)
    iteration = synthesize(operations, device).ranks[0].iterations[0]
    count = len(operations.gradients)
    assert iteration.duration_ns == pytest.approx(whole + count, abs=0.51, rel=1e-12)
    assert iteration.forward_end_ns == pytest.approx(device.time_ns(operations.forward), abs=1, rel=1e-9)
    assert iteration.end_ns - iteration.backward_end_ns == pytest.approx(
        device.time_ns(operations.step), abs=1.51, rel=1e-9
    )


def test_a_measured_step_lengthens_the_passes_but_not_the_optimiser():
    operations = Operations.model_validate_json(json.dumps(DOCUMENT | {"step": [OPERATION] * 4}))
    device = Device(name="d", flops_per_s=1e3, bytes_per_s=1e9)  # 4 ms forward, 4 ms backward, 16 ms step
    longer = synthesize(operations, device, step_ns=116_000_001).ranks[0].iterations[0]
    assert (longer.forward_end_ns, longer.backward_end_ns, longer.end_ns) == (50_000_000, 100_000_001, 116_000_001)
    shorter = synthesize(operations, device, step_ns=12_000_001).ranks[0].iterations[0]
    assert (shorter.forward_end_ns, shorter.backward_end_ns, shorter.end_ns) == (2_000_000, 4_000_001, 12_000_001)


def test_steps_too_short_and_models_without_work_are_told():
    operations = Operations.model_validate_json(json.dumps(DOCUMENT))
    with pytest.raises(ValueError, match=r"step_ns: expected at least 1 ns \(one nanosecond per gradient\), got 0"):
        synthesize(operations, SLOW, step_ns=0)
    idle = Operations.model_validate_json(
        json.dumps(DOCUMENT | {"forward": [], "step": [], "gradients": [{"parameter": 0, "operations": []}]})
    )
    with pytest.raises(ValueError, match="expected operations that take time on slow, got none"):
        synthesize(idle, SLOW)


@given(intervals=st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 9)), min_size=1, max_size=9))
def test_no_interval_ends_before_its_kernels_were_launched_and_had_run(intervals):
    times, kernels = (np.array(some) for some in zip(*intervals, strict=True))
    unknown = np.zeros(len(times), bool)
    assert _paced(times, kernels, 0, unknown) == pytest.approx(np.cumsum(times))
    assert _paced(times, kernels, 10_000, ~unknown) == pytest.approx(np.cumsum(times))
    paced = np.array(_paced(times, kernels, 10_000, unknown))
    launched = 10_000 * np.cumsum(kernels)
    assert (paced >= np.cumsum(times) - 1e-6).all()
    assert (paced >= np.where(kernels, launched, 0)).all()
    assert paced[-1] <= np.sum(times) + launched[-1] + 1e-6
    assert (np.diff(paced) >= times[1:] - 1e-6).all()


def test_many_small_kernels_take_the_hosts_time():
    """1000 kernels of 1 us each, of which the host launches one every 5 us; one of them has 1 ms of work."""
    operations = by_hand(moves(10**6, kernels=1000), (moves(10**6),))
    device = Device(name="d", flops_per_s=1e12, bytes_per_s=1e9)
    slow_host = device.model_copy(update={"pace_ns": 5000})
    (at_once,) = synthesize(operations, device).ranks[0].iterations
    paced_trace = synthesize(operations, slow_host)
    (paced,) = paced_trace.ranks[0].iterations
    assert (at_once.forward_end_ns, at_once.duration_ns) == (1_000_000, 2_000_001)
    assert (paced.forward_end_ns, paced.duration_ns) == (5_001_000, 6_005_001)
    # The launches are 5 ms of 6. A host is up to 1.8 times as fast or slow; real kernels take up to 6 times as long.
    assert paced_trace.workload.compute_bounds == pytest.approx((3.784 / 6.005, 15 / 6.005), rel=0.002)
    predicted = predict(paced_trace, FABRIC, world_size=1, assume=False)
    assert predicted.interval_ns == pytest.approx((3.784e6, 15e6), rel=0.002)
    assert set(predicted.causes_ns) == {"iterations", "compute times"}
    graph = predict(paced_trace, FABRIC, world_size=1, assume=False, cuda_graph=True)
    assert graph.iteration_ns == pytest.approx(at_once.duration_ns, abs=2)


@given(any_operations(), devices(), st.fixed_dictionaries({}, optional=dict.fromkeys(PARTS, st.integers(6, 10**9))))
def test_measured_parts_have_their_times_and_gradients_stay_within_the_backward_pass(operations, device, parts):
    assume(device.time_ns((*operations.forward, *operations.loss, *operations.backward, *operations.step)))
    trace = synthesize(operations, device, **parts)
    assert validated(trace) == trace
    assert ready_order(trace) == list(operations.ready_order)
    (one,) = trace.ranks[0].iterations
    found = {
        "forward_ns": one.forward_end_ns,
        "backward_ns": one.backward_end_ns - one.forward_end_ns,
        "optimizer_ns": one.optimizer_end_ns - one.optimizer_start_ns,
    }
    assert {name: found[name] for name in parts} == pytest.approx(parts, abs=1)
    if len(parts) == len(PARTS):
        assert trace.workload.compute_bounds == (1.0, 1.0)
    with_rest = synthesize(operations, device, **parts, step_ns=sum(found.values()) + 100)
    (longer,) = with_rest.ranks[0].iterations
    assert longer.duration_ns == sum(found.values()) + 100
    assert with_rest.workload.compute_bounds == (1.0, 1.0)
    if "forward_ns" in parts:
        assert longer.forward_end_ns == one.forward_end_ns


def test_ready_times_are_scaled_within_a_measured_backward_pass():
    operations = by_hand(moves(1000), (moves(1000),), (moves(3000),), step=(moves(500),))
    (one,) = synthesize(operations, SLOW, backward_ns=8_000_002).ranks[0].iterations
    assert one.ready_ns == (1000 + 2_000_001, 1000 + 8_000_002)
    assert one.duration_ns == 1000 + 8_000_002 + 500
    with pytest.raises(
        ValueError, match=r"step_ns: expected at least 8000002 ns \(the measured parts together\), got 7"
    ):
        synthesize(operations, SLOW, backward_ns=8_000_002, step_ns=7)


def test_a_host_bound_recording_does_not_become_shorter_on_a_faster_device():
    """1000 kernels that the host launched in 50 ms; the recorded device was idle most of the time."""
    operations = by_hand(moves(10**6, kernels=1000), ())
    recorded = synthesize(operations, SLOW, step_ns=50_000_001)
    fast = Device(name="fast", flops_per_s=1e12, bytes_per_s=1e12, pace_ns=45_000)
    rescaled = rescale(recorded, operations, SLOW, fast)
    assert rescaled.ranks[0].iterations[0].forward_end_ns == 45_000_000
    error = 1 + fast.error(operations)  # there are no measurements of this device
    assert rescaled.workload.compute_bounds == pytest.approx((1 / 1.8 / error, 50 / 45 * error), rel=1e-3)
    same = rescale(recorded, operations, SLOW, SLOW).workload.compute_bounds
    assert same == recorded.workload.compute_bounds
    assert rescaled.workload.memory_bytes_per_s == 1e12
    graphs = rescale(recorded, operations, SLOW, fast.model_copy(update={"pace_ns": 0}))
    assert graphs.ranks[0].iterations[0].forward_end_ns == 50_000


@given(st.sampled_from(counted_models()), st.sampled_from(sorted(data_sheets())), st.sampled_from([0.25, 1.0, 8.0]))
def test_no_range_promises_more_than_a_device_can_compute(model, device, multiple):
    sheet = data_sheets()[device]
    operations = built_in_operations(model, sheet.autocast).with_batch(multiple)
    trace = synthesize(operations, sheet)
    fastest_s = trace.workload.compute_bounds[0] * trace.ranks[0].iterations[0].duration_ns / 1e9
    repeated = [*operations.forward, *operations.loss, *operations.backward]
    saved = 2.25 if sheet.precision == "fp32" else 1.0  # Winograd's algorithm
    flops = sum(one.flops / (saved if one.kind in CONVOLUTIONS else 1.0) for one in repeated)
    assert flops / fastest_s <= 0.8501 * sheet.flops_per_s
