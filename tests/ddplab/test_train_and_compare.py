"""Validate: predictions that come before the training, turns, and what is trained."""

import hashlib
import json
from unittest import mock

import pytest

from ddplab import train_and_compare
from ddplab.prediction_errors import Configuration
from ddplab.reference.launch import RankPool
from ddplab.simulator import BucketPlan, tune
from ddplab.train_and_compare import validate
from ddplab.training_runs import TargetRun, Turn, record_computation, train_turn

from ..validation_rows import FABRIC, TRACE
from .small_trace import small_trace

TINY = "tests.models_for_cli:tiny"


@pytest.mark.parametrize("measured_ns", [1, 10**9])
def test_predictions_are_written_before_the_first_target_run_and_do_not_depend_on_it(tmp_path, measured_ns):
    """The file exists when the ranks of this pool begin to train; they measure what the test wants."""
    written = tmp_path / "predictions.json"
    orders: list[list[TargetRun]] = []
    seen: list[bytes] = []

    def run(body, *arguments, **_):
        if body is record_computation:
            return [TRACE]
        model, runs, _turn, word = arguments
        assert (body, model) == (train_turn, "m")
        if "rehearsal" in word:
            assert not written.exists()
            return [[Turn((1000,))] * len(runs)] * 2
        seen.append(written.read_bytes())
        orders.append(runs)
        return [[Turn((measured_ns,))] * len(runs)] * 2

    pool = mock.create_autospec(RankPool, instance=True, world_size=2)
    pool.run.side_effect = run
    with mock.patch.object(train_and_compare, "calibrate", return_value=FABRIC):
        report = validate(pool, "m", [Configuration(1.0), Configuration(25.0)], out=tmp_path, repeat=2)
    assert seen == [written.read_bytes()] * 2
    assert orders[0] == orders[1][::-1], "every other turn is in reverse order"
    assert [row.measured_ns for row in report.rows] == [measured_ns] * 2
    assert [row["iteration_ns"] for row in json.loads(seen[0])] == [row.predicted_ns for row in report.rows]
    assert report.predictions_sha256 == hashlib.sha256(seen[0]).hexdigest()
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(report.to_json()))


def test_a_plan_trains_beside_torchs_default_and_both_classes_train_its_buckets(tmp_path, two_ranks):
    recorded = two_ranks.run(record_computation, TINY)[0]
    plan = tune(recorded, FABRIC, world_size=2, assume=False)
    both = [Configuration("default"), Configuration("plan")]
    with mock.patch.object(train_and_compare, "calibrate", return_value=FABRIC):
        report = validate(two_ranks, TINY, both, out=tmp_path, repeat=2, plan=plan, with_torch=True)
    assert [row.cap_mb for row in report.rows] == ["default", "plan"]
    assert report.rows[1].buckets == len(plan.buckets)
    assert report.gain is not None
    assert json.loads((tmp_path / "report.json").read_text())["gain"]["interval"] is None, "two turns are too few"
    assert [row.torchs_multiple is not None for row in report.rows] == [True, plan.bucket_cap_mb_list is not None]


def test_settings_that_torch_lacks_and_a_plan_of_another_model_are_refused_before_anything_is_calibrated(tmp_path):
    pool = mock.create_autospec(RankPool, instance=True, world_size=2)
    with pytest.raises(ValueError, match=r"torch: expected the order ready and the hook none, got forward and none"):
        validate(pool, "m", [Configuration(1.0, "forward")], out=tmp_path, with_torch=True)
    assert not pool.run.called
    pool.run.side_effect = lambda *_, **__: [TRACE]
    plan: BucketPlan = tune(small_trace(), FABRIC, world_size=2, assume=False)
    with pytest.raises(ValueError, match="plan: expected"):
        validate(pool, "m", [Configuration("plan")], out=tmp_path, plan=plan)
    assert pool.run.call_count == 1, "only the recording"
