"""Synthesis: rooflines, and traces made from them or converted by them."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reference.trace import PHASES, Parameter, Trace
from simulator import Fabric, predict
from simulator.workload.roofline import (
    DEVICES,
    Device,
    GradientOperations,
    Operation,
    Operations,
    find_device,
    merge,
    sgd_step,
)
from simulator.workload.trace_synthesis import _paced, rescale, synthesize

from .strategies import traces

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9)
SLOW = Device(name="slow", flops_per_s=1e9, bytes_per_s=1e9)

OPERATION = {"flops": 4, "bytes_moved": 8, "kernels": 1}
DOCUMENT = {
    "model": "tiny",
    "batch": 3,
    "torch_version": "2.13.0",
    "parameters": [{"name": "weight", "shape": [2], "dtype": "float32", "size_bytes": 8, "sparse": False}],
    "buffers": [],
    "forward": [OPERATION],
    "loss": [],
    "gradients": [{"parameter": 0, "operations": [OPERATION]}],
    "tail": [],
    "step": [OPERATION],
}


# Strategies


def some_operations(least: int = 0):
    """(Operation(flops=6, bytes_moved=0), Operation(flops=0, bytes_moved=7, kernels=2))"""
    count = st.integers(0, 10**9)
    one = st.builds(Operation, flops=count, bytes_moved=count, kernels=st.integers(1, 3))
    return st.lists(one, min_size=least, max_size=4).map(tuple)


def devices(most_launch_ns: int = 10_000):
    """Device(name='d', flops_per_s=1e12, bytes_per_s=1e9, launch_ns=5, efficiency=0.5)"""
    rate = st.floats(1e6, 1e16)
    return st.builds(
        Device,
        name=st.just("d"),
        flops_per_s=rate,
        bytes_per_s=rate,
        launch_ns=st.integers(0, most_launch_ns),
        efficiency=st.floats(0.01, 1),
    )


@st.composite
def operations_of(draw, parameters: tuple[Parameter, ...], batch: int | None = None) -> Operations:
    """Operations of a model of these parameters, gradients in any order."""
    order = draw(st.permutations(range(len(parameters))))
    return Operations(
        model="m",
        batch=batch,
        torch_version="2.13.0",
        parameters=parameters,
        forward=draw(some_operations()),
        loss=draw(some_operations()),
        gradients=tuple(GradientOperations(parameter=index, operations=draw(some_operations())) for index in order),
        tail=draw(some_operations()),
        step=draw(some_operations()),
    )


@st.composite
def any_operations(draw) -> Operations:
    """Of 1 to 6 parameters."""
    sizes = draw(st.lists(st.integers(0, 100), min_size=1, max_size=6))
    parameters = (
        Parameter(name=f"p{index}", shape=(size,), dtype="float32", size_bytes=4 * size)
        for index, size in enumerate(sizes)
    )
    return draw(operations_of(tuple(parameters)))


@st.composite
def recordings(draw) -> tuple[Trace, Operations]:
    """A recorded trace and operations of its model."""
    trace = draw(traces())
    return trace, draw(operations_of(trace.workload.parameters, trace.workload.batch))


def moments(iteration) -> list[int]:
    """All moments of an iteration, in their order."""
    phases = [getattr(iteration, name) for name in PHASES]
    return sorted(moment for moment in [*phases, *iteration.ready_ns] if moment is not None)


def ready_order(trace: Trace) -> list[int]:
    ready = trace.ranks[0].iterations[0].ready_ns
    return sorted(range(len(ready)), key=ready.__getitem__)


def validated(trace: Trace) -> Trace:
    """The trace after all checks that a file gets."""
    return Trace.model_validate_json(trace.model_dump_json())


# Rooflines


@given(some_operations(), devices())
def test_merged_operations_take_as_long_on_every_device(operations, device):
    merged = merge([*operations, *operations])
    assert device.time_ns(merged) == pytest.approx(2 * device.time_ns(operations), rel=1e-12)
    assert len(merged) <= len(operations)
    for field in ("flops", "bytes_moved", "kernels"):
        assert sum(getattr(o, field) for o in merged) == 2 * sum(getattr(o, field) for o in operations)


@pytest.mark.parametrize(
    ("operation", "ns"),
    [
        (Operation(flops=4000, bytes_moved=10), 2000 + 5),  # arithmetic decides
        (Operation(flops=10, bytes_moved=4000), 4000 + 5),  # bytes decide
        (Operation(flops=0, bytes_moved=0, kernels=3), 15),
    ],
)
def test_a_kernel_takes_the_longer_of_arithmetic_and_bytes_and_its_launch(operation, ns):
    device = Device(name="d", flops_per_s=2e9, bytes_per_s=1e9, launch_ns=5)
    assert device.time_ns([operation]) == pytest.approx(ns)
    half = device.model_copy(update={"efficiency": 0.5})
    assert half.time_ns([operation]) == pytest.approx(2 * ns - 5 * operation.kernels)


def test_data_sheets_have_sources_and_lower_precision_is_faster():
    assert all(device.source for device in DEVICES.values())
    for card, low in [("v100", "fp16"), ("a100-40gb", "bf16"), ("a100-80gb", "bf16"), ("h100", "bf16")]:
        assert DEVICES[f"{card}-{low}"].flops_per_s > 7 * DEVICES[f"{card}-fp32"].flops_per_s
    assert DEVICES["h100-bf16"].flops_per_s == pytest.approx(2 * DEVICES["h100-tf32"].flops_per_s)


def test_a_device_is_found_by_name_or_file(tmp_path):
    assert find_device("h100-bf16").name == "NVIDIA H100 SXM, bf16"
    (tmp_path / "mine.json").write_text(SLOW.model_dump_json())
    assert find_device(str(tmp_path / "mine.json")) == SLOW


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            '{"name": "d", "flops_per_s": -1, "bytes_per_s": 1}',
            "flops_per_s: input should be greater than",
        ),
        ('{"name": "d", "flops_per_s": 1, "bytes_per_s": NaN}', "bytes_per_s: "),
        ('{"name": "d", "flops_per_s": 1}', "bytes_per_s: field required"),
        ("no JSON", "not a data sheet: invalid JSON"),
    ],
)
def test_a_broken_data_sheet_is_told_in_one_line(tmp_path, content, says):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        find_device(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [("h200", "expected v100-fp32, v100-fp16, a100"), ("no/file.json", "no/file.json: cannot be read: No such file")],
)
def test_an_unknown_device_is_told_in_one_line(name, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        find_device(name)


# Rescaling


def except_for_the_name(trace: Trace) -> Trace:
    return trace.model_copy(update={"workload": trace.workload.model_copy(update={"device_name": ""})})


@given(recordings(), devices())
def test_the_same_device_gives_the_same_trace(recording, device):
    trace, operations = recording
    assert except_for_the_name(rescale(trace, operations, device, device)) == except_for_the_name(trace)


@given(recordings(), devices(most_launch_ns=0))
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


def test_each_gradient_brings_its_own_operations_whatever_the_order():
    """A gap belongs to the parameter that is ready at its end; the new device is faster for the weight's alone."""
    parameters = tuple(Parameter(name=name, shape=(2,), dtype="float32", size_bytes=8) for name in ("weight", "bias"))
    arithmetic, memory = Operation(flops=1000, bytes_moved=0), Operation(flops=0, bytes_moved=1000)
    operations = Operations(
        model="m", torch_version="", parameters=parameters, forward=(memory,), step=(memory,),
        gradients=(
            GradientOperations(parameter=0, operations=(arithmetic,)),
            GradientOperations(parameter=1, operations=(memory,)),
        ),
    )  # fmt: skip
    trace = synthesize(operations, SLOW)
    one = trace.ranks[0].iterations[0]
    swapped = one.model_copy(update={"ready_ns": (4000, 2500), "backward_end_ns": 4000, "optimizer_start_ns": 4000})
    swapped = swapped.model_copy(update={"optimizer_end_ns": 5000, "end_ns": 5000, "backward_start_ns": 1000})
    rank = trace.ranks[0].model_copy(update={"iterations": (swapped,)})
    fast = SLOW.model_copy(update={"flops_per_s": 1e10, "name": "fast"})
    rescaled = rescale(trace.model_copy(update={"ranks": (rank,)}), operations, SLOW, fast)
    assert rescaled.ranks[0].iterations[0].ready_ns == (2500 + 150, 2500)
    assert rescaled.workload.device_name == "slow by its roofline, rescaled from slow to fast"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "bias"}, "parameters[0].name: expected 'bias', as in the trace, got 'weight'"),
        ({"shape": (1, 2)}, "parameters[0].shape: expected (1, 2), as in the trace, got (2,)"),
        ({"dtype": "int32"}, "parameters[0].dtype: expected 'int32', as in the trace, got 'float32'"),
        ({"batch": 4}, "batch: expected 4, as in the trace, got 3"),
        ({"count": 2}, "parameters: expected 2, as in the trace, got 1"),
        ({"source": "torch"}, "workload.source: expected 'module', a trace of computation alone, got 'torch'"),
    ],
)
def test_operations_of_another_model_are_refused_in_one_line(change, says):
    operations = Operations.model_validate_json(json.dumps(DOCUMENT))
    trace = synthesize(operations, SLOW)
    parameter = trace.workload.parameters[0]
    more = (parameter.model_copy(update={"name": "more"}),) * (change.get("count", 1) - 1)
    parameters = (parameter.model_copy(update={k: v for k, v in change.items() if hasattr(parameter, k)}), *more)
    update = {"parameters": parameters} | {k: v for k, v in change.items() if k in ("batch", "source")}
    other = trace.model_copy(update={"workload": trace.workload.model_copy(update=update)})
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        rescale(other, operations, SLOW, SLOW)
    assert "\n" not in str(caught.value)


# Synthesis


@given(any_operations(), devices(), st.none() | st.integers(6, 10**12))
def test_a_synthesised_trace_is_valid_and_keeps_the_order_of_readiness(operations, device, step_ns):
    assume(device.time_ns((*operations.forward, *operations.loss, *operations.backward, *operations.step)))
    trace = synthesize(operations, device, step_ns=step_ns)
    assert validated(trace) == trace
    assert ready_order(trace) == list(operations.ready_order)
    if step_ns is not None:
        assert trace.ranks[0].iterations[0].duration_ns == step_ns
        assert predict(trace, FABRIC, world_size=1).iteration_ns == step_ns


@given(any_operations(), devices(most_launch_ns=0))
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
    with pytest.raises(ValueError, match="step_ns: expected at least 1, one nanosecond per gradient, got 0"):
        synthesize(operations, SLOW, step_ns=0)
    idle = Operations.model_validate_json(
        json.dumps(DOCUMENT | {"forward": [], "step": [], "gradients": [{"parameter": 0, "operations": []}]})
    )
    with pytest.raises(ValueError, match="expected operations that take time on slow, got none"):
        synthesize(idle, SLOW)


# Files of operations


@given(any_operations())
def test_what_is_written_is_what_is_read(tmp_path_factory, operations):
    path = tmp_path_factory.mktemp("operations") / "new" / "operations.json"
    operations.save(path)
    assert Operations.load(path) == operations


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("batch",), 0, "batch: input should be greater than or equal to 1"),
        (("gradients",), [], "gradients: expected each of the parameters 0 to 0 once, got []"),
        (("gradients", 0, "parameter"), 1, "gradients: expected each of the parameters 0 to 0 once, got [1]"),
        (("gradients", 0, "operations", 0, "flops"), -1, "gradients[0].operations[0].flops"),
        (("forward", 0, "bytes_moved"), float("nan"), "forward[0].bytes_moved"),
        (("step", 0, "kernels"), 1.5, "step[0].kernels"),
        (("colour",), "red", "colour: extra inputs are not permitted"),
        (("parameters",), [], "parameters: tuple should have at least 1 item"),
    ],
)
def test_an_inconsistent_file_names_file_field_and_reason(tmp_path, path, value, says):
    document = json.loads(json.dumps(DOCUMENT))
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    file = tmp_path / "operations.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        Operations.load(file)
    assert str(caught.value).startswith(f"{file}: not an operations file: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_told_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: No such file"):
        Operations.load(tmp_path / "operations.json")


# Counting


def of(operations) -> tuple[int, int]:
    """FLOPs and bytes."""
    return sum(o.flops for o in operations), sum(o.bytes_moved for o in operations)


def test_a_step_reads_parameter_and_gradient_and_writes_the_parameter():
    parameter = Parameter(name="w", shape=(5,), dtype="float32", size_bytes=20)
    assert of(sgd_step([parameter, parameter])) == (0, 120)


@given(intervals=st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 9)), min_size=1, max_size=9))
def test_no_interval_ends_before_its_kernels_were_launched_and_had_run(intervals):
    times, kernels = (list(some) for some in zip(*intervals, strict=True))
    assert _paced(times, kernels, 0) == pytest.approx(np.cumsum(times))
    paced = np.array(_paced(times, kernels, 10_000))
    launched = 10_000 * np.cumsum(kernels)
    assert (paced >= np.cumsum(times) - 1e-6).all()
    assert (paced >= np.where(kernels, launched, 0)).all()
    assert paced[-1] <= np.sum(times) + launched[-1] + 1e-6
    assert (np.diff(paced) >= np.array(times[1:]) - 1e-6).all()


def test_many_small_kernels_take_the_hosts_time():
    """1000 kernels of 1 us each, of which the host launches one every 5 us; one of them has 1 ms of work."""
    small = (Operation(flops=0, bytes_moved=1000 * 1000, kernels=1000),)
    large = (Operation(flops=0, bytes_moved=10**6),)
    operations = Operations(
        model="m", torch_version="", parameters=(Parameter(name="w", shape=(1,), dtype="float32", size_bytes=4),),
        forward=small, gradients=(GradientOperations(parameter=0, operations=large),), step=(),
    )  # fmt: skip
    device = Device(name="d", flops_per_s=1e12, bytes_per_s=1e9)
    (at_once,) = synthesize(operations, device).ranks[0].iterations
    (paced,) = synthesize(operations, device.model_copy(update={"pace_ns": 5000})).ranks[0].iterations
    assert (at_once.forward_end_ns, at_once.duration_ns) == (1_000_000, 2_000_001)
    assert (paced.forward_end_ns, paced.duration_ns) == (5_001_000, 6_005_001)
