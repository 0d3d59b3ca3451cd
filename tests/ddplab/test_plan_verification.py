"""Verification of plans: exact in virtual time, alternating turns, and the gain with its interval."""

import json
import warnings
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.emulation.time_dilation import ScaleModel
from ddplab.validation import machine_conditions
from ddplab.validation.plan_verification import (
    GainCheck,
    PlannedTraining,
    PlanVerification,
    TrainedTimes,
    train_alternately,
    verify_by_the_clock,
    verify_by_training,
    verify_in_virtual_time,
)
from ddplab.validation.training_runs import TargetRun, record_computation
from reference.launch import RankPool
from simulator import Fabric, Policy
from simulator.schedule.schedule import buckets_of
from simulator.workload.compute_times import recorded_model

from ..explore import examples
from ..reference.test_network_namespaces import links_are_permitted
from ..strategies import torch_emulations
from .small_trace import FABRIC, small_trace

pytestmark = pytest.mark.usefixtures("soon")

TINY = "tests.models_for_cli:tiny"


def training(trace=None, *, world_size: int = 2, policy: Policy | None = None, caps_mb=(1e-3, 1e-3)):
    """The plan that torch's class makes of these caps."""
    trace, policy = trace or small_trace(), policy or Policy()
    with_caps = policy.model_copy(update={"bucket_cap_mb_list": caps_mb})
    buckets = buckets_of(with_caps, recorded_model(trace, unused_allowed=policy.unused_allowed))
    return PlannedTraining(trace=trace, world_size=world_size, policy=policy, buckets=buckets, caps_mb=caps_mb)


@examples(25)
@given(
    torch_emulations().filter(lambda asked: asked.policy.rebuilds),
    st.lists(st.floats(1e-6, 3e-4), min_size=1, max_size=4),
)
def test_in_virtual_time_the_real_gain_is_the_predicted_one(asked, caps_mb):
    policy = asked.policy.model_copy(update={"bucket_cap_mb_list": None})
    planned = training(asked.trace, world_size=asked.world_size, policy=policy, caps_mb=tuple(caps_mb))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about settings that do not go together
        verified = verify_in_virtual_time(
            planned, asked.fabric, variation=asked.variation, stragglers=asked.stragglers
        )
    assert [check.reducer for check in verified.checks] == ["ddplab", "torch"]
    for check in verified.checks:
        assert check.default.measured_ns == check.default.predicted_ns
        assert check.plan.measured_ns == check.plan.predicted_ns
        assert check.measured_gain == check.predicted_gain


def test_without_a_list_of_caps_only_our_reducer_is_verified():
    planned = PlannedTraining(trace=small_trace(), world_size=2, policy=Policy(), buckets=[[0], [2, 1]], caps_mb=None)
    verified = verify_in_virtual_time(planned, FABRIC)
    (check,) = verified.checks
    assert check.reducer == "ddplab"
    assert check.plan.measured_ns == check.plan.predicted_ns != check.default.predicted_ns


def gain_check(default, plan) -> GainCheck:
    times = (TrainedTimes(predicted_ns=100, times_ns=tuple((ns,) for ns in turns)) for turns in (default, plan))
    return GainCheck(reducer="ddplab", default=next(times), plan=next(times))


@given(st.lists(st.integers(10**6, 10**9), min_size=1, max_size=12), st.floats(0.5, 2), st.integers(-(10**4), 10**4))
def test_a_drift_that_both_sides_of_a_turn_share_leaves_the_gain_as_it_is(default, factor, noise_ns):
    check = gain_check(default, [round(factor * ns) + noise_ns for ns in default])
    assert check.measured_gain == pytest.approx(1 - factor, abs=0.011)
    if len(default) < 5:
        assert check.gain_interval is None
    else:
        low, high = check.gain_interval
        assert low <= check.measured_gain <= high
        assert high - low <= 0.022
    document = PlanVerification(how="clock", world_size=2, checks=(check,)).to_json()
    assert json.loads(json.dumps(document))["checks"][0]["measured_gain"] == check.measured_gain


@given(st.integers(1, 9), st.integers(2, 3))
def test_each_run_trains_once_in_a_turn_and_comes_first_as_often_as_last(turns, count):
    runs = [TargetRun({}, str(number)) for number in range(count)]
    trained: list[list[str]] = []

    def train(some, turn):
        trained.append([run.hook_name for run in some])
        return [[(rank, turn, run.hook_name) for run in some] for rank in range(2)]

    measured = train_alternately(train, runs, turns)
    assert measured == [[tuple((rank, turn, str(number)) for rank in range(2)) for turn in range(turns)]
                        for number in range(count)]  # fmt: skip
    assert abs(sum(1 if names[0] == "0" else -1 for names in trained)) <= 1


def test_by_the_clock_default_and_plan_are_measured_in_the_original_time(tmp_path):
    """Over links, or a modelled network where these are not permitted.

    The machine may be too busy for valid conditions while tests run, so these are not checked here.
    """
    link_rate, modelled = (1e9, None) if links_are_permitted() else (None, Fabric.from_alpha_beta(10**6, 1e9))
    planned = training(slower(small_trace(), 5000))
    with (
        mock.patch.object(machine_conditions.Conditions, "check"),
        mock.patch.object(machine_conditions, "SLOW_DOWN_AT_MOST", float("inf")),
        RankPool(
            2, timeout_s=100, link_rate=link_rate
        ) as pool,  # ranks of their own, without what earlier tests left behind
    ):
        verified = verify_by_the_clock(
            planned, pool, out=tmp_path, scale=ScaleModel(dilation=2), turns=2, modelled=modelled
        )
    (check,) = verified.checks
    for times in (check.default, check.plan):
        assert [len(turn) for turn in times.times_ns] == [3, 3]
        assert min(times.quartiles_ns) >= 4200 * 5000  # what sleeps is never faster than it should be
        assert times.predicted_ns >= 4200 * 5000
    assert verified.conditions.shortest_ns >= 2 * 4200 * 5000
    assert verified.to_json()["scale_model"] == {"dilation": 2.0, "byte_scale": 1.0}


def slower(trace, factor: float):
    """The trace of a device that takes `factor` times as long."""
    return ScaleModel(dilation=factor).trace(trace, 2)


def test_real_training_measures_our_reducer_and_torchs_class(two_ranks):
    trace = two_ranks.run(record_computation, TINY, 2)[0]
    verified = verify_by_training(training(trace, caps_mb=(1e-3, 1e-2)), two_ranks, TINY, FABRIC, turns=2)
    assert [check.reducer for check in verified.checks] == ["ddplab", "torch"]
    for check in verified.checks:
        assert [len(turn) for turn in check.plan.times_ns] == [3, 3]
        assert check.default.measured_ns > 0
    with_hook = training(trace, policy=Policy(hook="fp16"))
    (check,) = verify_by_training(with_hook, two_ranks, TINY, FABRIC, turns=1).checks
    assert check.reducer == "ddplab"


def test_what_real_ranks_cannot_train_is_refused_by_name(two_ranks, tmp_path):
    planned = training(policy=Policy(sync_every=2))
    for verify in (
        lambda: verify_by_training(planned, two_ranks, TINY, FABRIC),
        lambda: verify_by_the_clock(planned, two_ranks, out=tmp_path),
    ):
        with pytest.raises(
            ValueError, match=r"^sync_every: expected 1 where real ranks train, got 2; verify the plan"
        ):
            verify()
