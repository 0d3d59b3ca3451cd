"""Emulated devices by the clock: they sleep until deadlines, and are measured in the time of the original."""

import time
from math import inf

from ddplab import models
from ddplab.prediction_errors import Configuration
from ddplab.reference.launch import RankPool
from ddplab.reference.trace import Trace
from tests.ddplab.small_trace import small_trace
from validation.emulated import LaboratoryReport, validate_devices
from validation.emulated_devices import EMULATED, EmulatedTraining, WallClock
from validation.scale_model import ScaleModel

MS = 1_000_000


def test_a_wall_clock_sleeps_until_absolute_deadlines():
    clock = WallClock()
    before_ns = time.monotonic_ns()
    with clock.computing(2_000_000, "forward"):
        time.sleep(0.001)  # work of the host, beside the device
    for _ in range(5):
        with clock.computing(1_000_000, "backward"):
            pass
    with clock.computing(0, "step"):
        pass
    assert time.monotonic_ns() - before_ns >= 7_000_000
    assert len(clock.overslept_ns) == 5
    assert min(clock.overslept_ns) >= 0


def test_a_late_host_costs_the_device_no_time_but_copies_do():
    clock = WallClock()
    with clock.computing(0, "forward"):
        pass
    start_ns = time.monotonic_ns()
    with clock.computing(1_000_000, "backward"):
        time.sleep(0.02)
    with clock.computing(1_000_000, "backward"):
        pass
    assert clock.overslept_ns[0] >= 18_000_000
    assert clock.overslept_ns[1] >= 17_000_000  # its deadline had passed, too
    clock.bucket_packing(0)
    time.sleep(0.01)
    clock.bucket_ready(0)
    clock.bucket_launching(0)
    time.sleep(0.01)
    clock.bucket_launched(0, None)
    with clock.computing(30_000_000, "backward"):
        pass
    assert time.monotonic_ns() - start_ns >= 51_500_000


def test_a_trace_is_a_model(tmp_path):
    small_trace().save(tmp_path / "trace.json")
    module, loss_fn = models.build(f"{EMULATED}{tmp_path / 'trace.json'}")
    optimizer = models.optimizer_of(module, loss_fn)
    for _ in range(4):  # it has three iterations
        optimizer.zero_grad()
        loss_fn(module).backward()
        optimizer.step()
        assert all(bool((parameter.grad == 1).all()) for parameter in module.parameters())
    assert isinstance(loss_fn, EmulatedTraining)


def test_emulated_devices_are_measured_in_the_original_time(tmp_path):
    configurations = [Configuration(0.01), Configuration(inf, "forward")]
    scale = ScaleModel(dilation=2, byte_scale=0.5)
    with RankPool(2, timeout_s=100) as pool:  # ranks of their own, without what earlier tests left behind
        how = {"scale": scale, "out": tmp_path, "repeat": 1}
        report = validate_devices(pool, small_trace(unit=5000), configurations, **how)
    assert [row.configuration for row in report.rows] == configurations
    recorded = Trace.load(tmp_path / "trace.json.gz")
    assert len(recorded.ranks) == 2
    for rank in recorded.ranks:  # what the devices slept for, and the work of their hosts
        assert all(one.end_ns - one.forward_start_ns >= 2 * 20 * MS for one in rank.iterations)
    for row in report.rows:
        assert len(row.times_ns) == 3
        assert min(row.times_ns) > 20 * MS
        assert 20 * MS < row.predicted_ns < 200 * MS
    assert report.scale_model == scale
    assert report.overslept_ns >= 0
    assert LaboratoryReport.load(tmp_path) == report
