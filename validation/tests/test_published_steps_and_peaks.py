"""The published tables of training steps and memory peaks, and what the measured utilisation makes of them."""

import csv
import json
from collections import Counter

import pytest
import torch

from ddplab.operation_counter import measure_operations
from ddplab.simulator.workload.roofline import CEILINGS_FILE
from validation import measured_utilisation
from validation.published_nodes import counted_operations, models_of_cases, operations_of
from validation.published_steps import DATA, read, read_steps


def test_every_published_step_has_a_source_a_positive_time_and_its_throughput():
    rows = list(read("steps"))
    assert len(rows) >= 120
    assert {row["device"] for row in rows} >= {"v100", "a100-80gb", "h100", "h200", "b200", "gb200"}
    for row in rows:
        assert all(row[field] for field in ("model", "device", "precision", "source", "date")), row
        assert min(float(row[field]) for field in ("step_ms", "batch_per_gpu", "gpus")) > 0, row
        if row["unit"] in ("images/s", "sequences/s"):
            samples = float(row["throughput"]) * float(row["step_ms"]) / 1e3
            assert samples == pytest.approx(int(row["batch_per_gpu"]) * int(row["gpus"]), rel=1e-4), row


def test_every_counted_step_reaches_a_part_of_the_peak_rate_that_is_below_1():
    steps = read_steps()
    assert len(steps) >= 400
    assert all(0 < step.utilisation < 1 for step in steps)


@pytest.mark.parametrize("model", ["resnet50", "resnet101", "resnet152", "resnext101_32x4d"])
def test_counted_operations_are_those_of_our_own_counter(model):
    counted = [row for row in read("operations") if (row["model"], row["dtype"]) == (model, "float32")]
    flops, own = Counter(), Counter()
    for row in counted:
        flops[row["kind"]] += (int(row["forward_flops"]) + int(row["backward_flops"])) / int(row["batch"])
    ours = measure_operations(f"validation.published_models:{model}")
    for one in (*ours.forward, *ours.loss, *ours.backward):
        own[one.kind] += one.flops / ours.batch
    assert own == pytest.approx(flops, rel=0.001)


@pytest.mark.parametrize("model", ["resnext101_32x4d", "gpt2_512_batch_4", "cs336_xl_batch_2", "transformer_xl_base"])
def test_the_file_of_operations_equals_a_new_count_and_has_all_models_of_the_cases(model):
    assert list(counted_operations()) == models_of_cases()
    name = f"validation.published_models:{model}"
    if operations_of(name).torch_version != torch.__version__:
        pytest.skip("other versions of torch may run other operations")
    assert operations_of(name) == measure_operations(name)


def test_a_prediction_does_not_use_the_published_time():
    steps = read_steps()
    fitted = measured_utilisation.Efficiencies(steps[::8])
    for step in steps[::40]:
        assert fitted.predict_ms(step._replace(ms=1.0)) == fitted.predict_ms(step)


@pytest.fixture(scope="module")
def errors():
    steps = read_steps()
    return {by: measured_utilisation.leave_out(steps, by) for by in measured_utilisation.LEFT_OUT}


@pytest.mark.timeout(300)
def test_steps_of_left_out_models_and_devices_are_predicted_within_their_interval(errors):
    for by in ("cell", "model", "device"):
        assert 0.85 <= errors[by].inside <= 0.95
        assert errors[by].half_width <= 0.4


@pytest.mark.timeout(300)
def test_the_file_of_measured_ceilings_is_what_the_analysis_gives(errors):
    steps = read_steps()
    found = measured_utilisation.ceilings(measured_utilisation.Efficiencies(steps), steps, errors)
    written = json.loads(CEILINGS_FILE.read_text())
    for field in ("logs", "errors"):
        assert written.pop(field) == pytest.approx(found.pop(field), abs=0.002)
    assert written == found


def test_every_published_peak_fits_its_device_and_has_a_source():
    gb = {
        "v100-16gb": 17.2,
        "a100-80gb": 85.9,
        "b200": 193,
        "h100-96gb-hbm2e": 103,
        "rtx-4090": 25.8,
        "rtx-a6000": 51.6,
    }
    with (DATA / "published_peaks.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 20
    for row in rows:
        assert all(row[field] for field in ("model", "source", "measured_as")), row
        value, unit = row["printed"].split()
        size = float(value) * {"GB": 1, "GiB": 2**30 / 1e9, "MiB": 2**20 / 1e9}[unit]
        assert float(row["peak_gb"]) == pytest.approx(size, rel=1e-3)
        assert size < gb[row["device"]], row


def test_a_device_without_a_data_sheet_has_no_steps():
    assert not any(step.device == "h200-nvl" for step in read_steps())
