"""Validation on emulated devices: which sizes are calibrated, what is measured, and when nothing is reported."""

import json
from itertools import pairwise
from unittest import mock

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.calibration.collective_times import AllReduceQueue
from ddplab.calibration.repeated_timing import slowdown_factor
from ddplab.emulation.time_dilation import ScaleModel
from ddplab.models import EMULATED
from ddplab.validation import machine_conditions, validate_emulated
from ddplab.validation.error_causes import explain_run
from ddplab.validation.machine_conditions import ConditionsError
from ddplab.validation.validate_emulated import (
    FEWEST_ROUNDS,
    SIZE_RATIO,
    every_message_size,
    extrapolated,
    fabric_in_model,
    message_sizes,
    spaced,
    time_slow_downs,
)
from ddplab.validation.validation_report import Configuration
from reference.bucketing import ORDERS
from reference.launch import RankPool
from reference.trace import Iteration, Parameter, RankTrace, Trace, Workload
from simulator import Fabric
from simulator.fabric import Sharing, Timing
from simulator.schedule.policy import Policy
from simulator.schedule.schedule import build_schedule
from simulator.workload.compute_times import recorded_model

from ..strategies import traces

MS = 1_000_000


def small_trace(iterations: int = 2) -> Trace:
    """Two tensors of 40 kB; the iterations take 20 ms, 21 ms, ..."""
    parameters = tuple(
        Parameter(name=f"{name}.weight", shape=(10_000,), dtype="float32", size_bytes=40_000) for name in "ab"
    )
    recorded, start = [], 0
    for number in range(iterations):
        end = start + (20 + number) * MS
        recorded.append(
            Iteration(
                forward_start_ns=start, forward_end_ns=start + 5 * MS, backward_start_ns=start + 5 * MS,
                backward_end_ns=end - MS, end_ns=end, synchronized=False, ready_ns=(end - MS, start + 8 * MS),
            )
        )  # fmt: skip
        start = end
    workload = Workload(
        model="small", source="module", parameters=parameters, device="cuda", device_name="a GPU", backend=None,
        world_size=1, torch_version="2.13.0",
    )  # fmt: skip
    return Trace(workload=workload, ranks=(RankTrace(rank=0, iterations=tuple(recorded)),))


@given(st.sets(st.integers(0, 10**9), min_size=1))
def test_calibrated_sizes_span_all_messages_and_leave_no_wide_gap_without_a_reason(sizes):
    kept = spaced(sizes)
    aligned = sorted({max(4, size - size % 4) for size in sizes})
    assert (kept[0], kept[-1]) == (aligned[0], aligned[-1])
    assert set(kept) <= set(aligned)
    for before, after in pairwise(kept[:-1]):
        assert after >= SIZE_RATIO * before
    for low, high in pairwise(kept):
        between = [size for size in aligned if low < size < high]
        assert all(size < SIZE_RATIO * low or SIZE_RATIO * size > high for size in between)


@given(traces(), st.lists(st.tuples(st.floats(1e-5, 100), st.sampled_from(ORDERS)), min_size=1, max_size=4))
def test_every_message_lies_within_the_calibrated_sizes(trace, configured):
    policies = [Policy(bucket_cap_mb=cap, order=order) for cap, order in configured]
    sizes, model = message_sizes(trace, policies), recorded_model(trace)
    assert set(sizes.two) <= set(sizes.all_reduce)
    for policy in policies:
        for collective in build_schedule(policy, model).collectives:
            measured = sizes.broadcast if collective.transport == "broadcast" else sizes.all_reduce
            assert measured[0] <= max(4, collective.size_bytes)
            assert collective.size_bytes < measured[-1] + 4


@given(st.floats(1.0, 20.0), st.integers(0, 10**6), st.floats(1.0, 3.0), st.sampled_from([8, 16, 64]))
def test_the_network_of_more_ranks_follows_from_those_calibrated(ns_per_byte, alpha_ns, sharing, world_size):
    """One at a time and two at a time, a ring's time of bytes grows with 2 (n - 1) / n, its latency with n - 1."""
    sizes = (4, 400_000, 40_000_000)

    def ns(size: int, ranks: int) -> float:
        return alpha_ns * (ranks - 1) + ns_per_byte * size * 2 * (ranks - 1) / ranks

    calibrated = [
        Fabric(
            all_reduce=tuple(Timing(world_size=n, size_bytes=size, ns=round(ns(size, n))) for size in sizes),
            sharing=tuple(Sharing(size_bytes=size, factor=sharing) for size in sizes),
            library="gloo",
        )
        for n in (2, 4)
    ]
    fabric = extrapolated(calibrated, world_size)
    for size in sizes[1:]:
        assert fabric.all_reduce_ns(size, world_size) == pytest.approx(ns(size, world_size), rel=0.01)
        assert fabric.sharing_factor(size, 2, world_size) == pytest.approx(sharing, rel=0.01)


@given(traces(), st.floats(0.1, 50), st.floats(1e-3, 1), st.integers(2, 64))
def test_a_modelled_network_costs_in_the_scale_model_what_it_costs_in_the_original(
    trace, dilation, byte_scale, ranks
):
    scale, original = ScaleModel(dilation=dilation, byte_scale=byte_scale), Fabric.from_alpha_beta(10**4, 1e9)
    sizes = every_message_size(trace, [Policy(bucket_cap_mb=cap) for cap in (1e-3, float("inf"))])
    fabric = fabric_in_model(original, sizes, scale, ranks)
    for cost_ns, original_ns, of_kind in (
        (fabric.all_reduce_ns, original.all_reduce_ns, sizes.all_reduce),
        (fabric.broadcast_ns, original.broadcast_ns, sizes.broadcast),
    ):
        for size in of_kind:
            assert cost_ns(size, ranks) == round(dilation * original_ns(round(size / byte_scale), ranks))


@pytest.mark.parametrize("modelled", [None, Fabric.from_alpha_beta(10**6, 1e9)], ids=["real network", "modelled"])
def test_emulated_devices_are_measured_in_the_original_time_and_predictions_come_first(tmp_path, modelled):
    """The machine may be too busy for valid conditions while tests run, so these are not checked here."""
    trace, configurations = small_trace(), [Configuration(0.01), Configuration(float("inf"), "forward")]
    with (
        mock.patch.object(machine_conditions.Conditions, "check"),
        mock.patch.object(machine_conditions, "SLOW_DOWN_AT_MOST", float("inf")),
        RankPool(2, timeout_s=100) as pool,  # ranks of their own, without what earlier tests left behind
    ):
        report = validate_emulated.validate_emulated(
            pool,
            trace,
            configurations,
            scale=ScaleModel(dilation=2, byte_scale=0.5),
            out=tmp_path,
            repeat=1,
            modelled=modelled,
        )
    assert [row.buckets for row in report.rows] == [2, 1]
    for row in report.rows:
        (turn,) = row.turns
        assert len(turn.times_ns) == 3
        fastest_ns = 20 * MS if modelled is None else 21 * MS  # with a millisecond for the last bucket's all-reduce
        assert min(turn.times_ns) >= fastest_ns  # what sleeps is never faster than it should be
        assert row.predicted_ns >= 20 * MS
        assert row.drift is None
    assert report.conditions.shortest_ns >= 2 * 20 * MS
    assert len(report.conditions.overslept_ns) == 3
    saved = Trace.load(tmp_path / "trace.json.gz")
    assert [parameter.size_bytes for parameter in saved.workload.parameters] == [20_000, 20_000]
    assert (tmp_path / "predictions.json").stat().st_mtime_ns <= (tmp_path / "report.json").stat().st_mtime_ns
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["conditions"]["shortest_ns"] == report.conditions.shortest_ns
    assert document["scale_model"] == {"dilation": 2, "byte_scale": 0.5}
    explained, left_out = explain_run(tmp_path)
    assert left_out == []
    assert [one.predicted_ns for one in explained] == [row.predicted_ns for row in report.rows]
    assert [one.measured_ns for one in explained] == pytest.approx([row.measured_ns for row in report.rows], abs=1)
    assert "done" in set(pd.read_parquet(tmp_path / "samples.parquet")["moment"])


def time_slow_downs_without_a_core(rank: int, world_size: int, model: str):
    """Time slow-downs on a rank whose main thread finds that every queue of all-reduces has already ended."""
    with mock.patch.object(AllReduceQueue, "running", False):
        return time_slow_downs(rank, world_size, model, 4)


def test_every_round_measures_a_pass_beside_the_network_on_a_busy_machine(two_ranks, tmp_path):
    small_trace(1).save(tmp_path / "trace.json.gz")
    by_rank = two_ranks.run(time_slow_downs_without_a_core, f"{EMULATED}{tmp_path / 'trace.json.gz'}")
    for passes, collectives in by_rank:
        assert len(passes.alone) == len(passes.contended) == len(collectives.contended) >= FEWEST_ROUNDS
        assert all(passes.contended)
    assert slowdown_factor([passes for passes, _ in by_rank])[0] >= 1


@pytest.mark.parametrize(
    ("limits", "predicted"),
    [({"IDLE_AT_LEAST": 1.1, "SLOW_DOWN_AT_MOST": float("inf")}, True), ({"SLOW_DOWN_AT_MOST": 0.0}, False)],
)
def test_nothing_is_reported_under_bad_conditions(two_ranks, tmp_path, limits, predicted):
    """Slow-downs are known before anything is predicted or trained."""
    with (
        mock.patch.multiple(machine_conditions, **limits),
        pytest.raises(ConditionsError, match="try a larger --dilation"),
    ):
        validate_emulated.validate_emulated(
            two_ranks, small_trace(), [Configuration(25.0)], scale=ScaleModel(), out=tmp_path, repeat=1
        )
    assert (tmp_path / "predictions.json").exists() == predicted
    assert not (tmp_path / "report.json").exists()
