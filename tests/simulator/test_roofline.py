"""Rooflines: times of operations on devices, data sheets, and operations that are inconsistent."""

import json
import re

import pytest
from hypothesis import given

from ddplab.reference.files.reading import one_line_errors
from ddplab.simulator.workload.roofline import Device, Operation, Operations, find_device, measured_ceilings, merge

from .random_operations import DOCUMENT, OPERATION, SLOW, devices, some_operations


@given(some_operations(), devices())
def test_merged_operations_take_as_long_on_every_device(operations, device):
    merged = merge([*operations, *operations])
    assert device.time_ns(merged) == pytest.approx(2 * device.time_ns(operations), rel=1e-12)
    assert len(merged) <= len(operations)
    for field in ("flops", "bytes_moved", "kernels"):
        assert sum(getattr(o, field) for o in merged) == 2 * sum(getattr(o, field) for o in operations)


def test_a_kernel_takes_the_longer_of_arithmetic_and_bytes():
    device = Device(name="d", flops_per_s=2e9, bytes_per_s=1e9)
    for flops, bytes_moved, ns in ((4000, 10, 2000), (10, 4000, 4000), (0, 0, 0)):
        assert device.time_ns([Operation(flops=flops, bytes_moved=bytes_moved)]) == pytest.approx(ns)


def test_a_device_or_model_that_was_not_measured_widens_the_interval():
    def error(model="my:resnet50", parameters=25_557_032, generation="Hopper", *, is_listed=True):
        return measured_ceilings().error(model, parameters, generation, is_listed=is_listed)

    assert error() < error(is_listed=False) < error(generation="Rubin", is_listed=False)
    assert error() < error(parameters=10**6) < error("mlp")
    listed = find_device("h100-bf16")
    own = listed.model_copy(update={"name": "mine"})
    operations = Operations.model_validate(DOCUMENT, strict=False)
    bounds = [one.bounds(operations)[1] for one in (listed, own, own.model_copy(update={"generation": None}))]
    assert bounds == sorted(bounds)


def test_measured_ceilings_make_kernels_slower_by_kind():
    kernel = Operation(flops=10**12, bytes_moved=10**6)
    sheet = find_device("h100-bf16")
    at_peak = sheet.model_copy(update={"generation": None}).time_ns([kernel])
    kernels = [kernel.model_copy(update={"kind": kind}) for kind in ("matmul", "attention", "depthwise")]
    times = [sheet.time_ns([one]) for one in kernels]
    assert at_peak < times[0] < times[1] < times[2] * 1.2
    moving = kernel.model_copy(update={"flops": 1, "bytes_moved": 10**9, "kind": "conv"})
    last = moving.model_copy(update={"channels_last": True})
    assert sheet.time_ns([last]) < sheet.time_ns([moving])


def test_a_device_is_found_by_name_or_file(tmp_path):
    assert find_device("h100-bf16").name == "NVIDIA H100 SXM, bf16"
    (tmp_path / "mine.json").write_text(SLOW.model_dump_json())
    assert find_device(str(tmp_path / "mine.json")) == SLOW


@pytest.mark.parametrize(
    ("gradients", "says"),
    [
        ([], "gradients: expected each of the parameters 0 to 0 once, got []"),
        ([{"parameter": 1, "operations": []}], "gradients: expected each of the parameters 0 to 0 once, got [1]"),
        ([{"parameter": 0, "operations": [OPERATION | {"flops": -1}]}], "gradients[0].operations[0].flops"),
    ],
)
def test_inconsistent_operations_name_field_and_reason(gradients, says):
    with pytest.raises(ValueError, match=re.escape(says)), one_line_errors():
        Operations.model_validate_json(json.dumps(DOCUMENT | {"gradients": gradients}))
