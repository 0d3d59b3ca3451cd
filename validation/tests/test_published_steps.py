"""Operations of published models, beside their measured steps."""

import pytest

from ddplab import models
from ddplab.operation_counter import measure_operations
from ddplab.simulator.workload.roofline import built_in_operations, data_sheets
from ddplab.simulator.workload.trace_synthesis import synthesize
from validation import published_models


def test_a_published_step_under_autocast_is_not_below_its_floor():
    """ResNet-152 in bf16 on an A100 of 80 GB: 512 images take 505.8 ms; counted as float32, 1.11 times the floor."""
    device = data_sheets()["a100-80gb-bf16"].model_copy(update={"generation": None})
    counted = measure_operations("validation.published_models:resnet152", autocast=device.autocast)
    floor_ns = device.time_ns((*counted.forward, *counted.loss, *counted.backward, *counted.step))
    assert 505.78e6 / floor_ns == pytest.approx(1.85, abs=0.05)


@pytest.mark.parametrize(
    ("model", "device", "batch", "ms"),
    [
        ("resnet50-224", "a100-40gb-tf32", 32, 40.8),  # mvsjober/ml-benchmarks
        ("resnet50-224", "a100-80gb-tf32", 512, 600.4),  # Lambda
        ("resnet50-224", "v100-fp16", 32, 47.47),  # mvsjober/ml-benchmarks
        ("resnet152-224", "a100-80gb-bf16", 512, 505.78),  # willgpaik/pytorch-ddp-scaling-benchmark
        ("vit-b-16", "a100-80gb-bf16", 1024, 991.02),  # the same
    ],
)
def test_published_steps_are_within_the_interval_of_a_plan_from_names(model, device, batch, ms):
    sheet = data_sheets()[device]
    operations = built_in_operations(model, sheet.autocast)
    trace = synthesize(operations.with_batch(batch / operations.batch), sheet)
    low, high = trace.workload.compute_bounds
    (one,) = trace.ranks[0].iterations
    assert low * one.duration_ns < ms * 1e6 < high * one.duration_ns
    assert high / low < 1.6 or one.duration_ns < 100e6, "host's pace aside"
    assert "by measured utilisation" in trace.workload.device_name


def resnet152_batch_32() -> models.Model:
    return published_models.resnet152(32)


@pytest.mark.parametrize(
    ("model", "device", "ms"),
    [
        # the host launches more slowly than the GPU runs: 8 of these batches at once take 266 ms, not 8 times 108
        ("validation.tests.test_published_steps:resnet152_batch_32", "a100-80gb-bf16", 107.77),
        ("validation.published_models:resnet50", "a100-40gb-bf16", 28.35),
        ("validation.published_models:resnet50", "v100-fp16", 47.47),
    ],
)
def test_published_small_batches_are_within_the_bounds_of_a_data_sheet(model, device, ms):
    """Steps of willgpaik/pytorch-ddp-scaling-benchmark and mvsjober/ml-benchmarks with 32 images a GPU."""
    sheet = data_sheets()[device]
    trace = synthesize(measure_operations(model, autocast=sheet.autocast), sheet)
    low, high = trace.workload.compute_bounds
    (one,) = trace.ranks[0].iterations
    assert low * one.duration_ns < ms * 1e6 < high * one.duration_ns
    assert one.duration_ns > 0.5 * ms * 1e6
