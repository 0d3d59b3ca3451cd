"""Validation: no prediction has seen a measurement, and each calibration predicts its own turns."""

import hashlib
import json
from math import inf
from unittest import mock

import pandas as pd
import pytest

from ddplab.validation import validate
from ddplab.validation.reducer_step_times import StepMoment
from ddplab.validation.training_runs import TargetRun, Turn, measure_configurations
from ddplab.validation.validation_report import (
    Configuration,
    Measurement,
    SpeedCheck,
)
from reference.launch import RankPool

from ..validation_rows import FABRIC, TRACE


@pytest.mark.parametrize("measured_ns", [1, 10**9])
def test_predictions_are_written_before_the_first_target_run_and_do_not_depend_on_it(tmp_path, measured_ns):
    """The file exists when the ranks of this pool begin to train; they measure what the test wants."""
    written = tmp_path / "predictions.json"

    def run(body, *arguments, **_):
        assert body is validate.measure_configurations
        seen.append(written.read_bytes())
        ended = ((StepMoment("ended", None, measured_ns),),)
        return [[Turn(Measurement((measured_ns,), SpeedCheck(1, 1)), ended)] * len(arguments[1])]

    seen: list[bytes] = []
    pool = mock.create_autospec(RankPool, instance=True, world_size=2)
    pool.run.side_effect = run
    with mock.patch.object(validate, "_calibrate", return_value=(TRACE, FABRIC, None)):
        report = validate.validate(pool, "m", [Configuration(1.0), Configuration(25.0)], out=tmp_path, repeat=2)
    assert seen == [written.read_bytes()] * 2
    assert [row.measured_ns for row in report.rows] == [measured_ns] * 2
    assert [row["iteration_ns"] for row in json.loads(seen[0])] == [row.predicted_ns for row in report.rows]
    assert report.predictions_sha256 == hashlib.sha256(seen[0]).hexdigest()
    assert pd.read_parquet(tmp_path / "samples.parquet")["ns"].tolist() == [measured_ns] * 4


def test_with_several_calibrations_each_share_of_the_turns_is_predicted_by_its_own(tmp_path):
    """The second calibration finds a network that is twice as slow; the ranks measure 100 ns throughout."""

    def run(_body, *arguments, **_):
        ended = ((StepMoment("ended", None, 100),),)
        return [[Turn(Measurement((100,), SpeedCheck(1, 1)), ended)] * len(arguments[1])]

    pool = mock.create_autospec(RankPool, instance=True, world_size=2)
    pool.run.side_effect = run
    found = [(TRACE, FABRIC, None), (TRACE, FABRIC.scaled(2), None)]
    with mock.patch.object(validate, "_calibrate", side_effect=found):
        report = validate.validate(pool, "m", [Configuration(1.0)], out=tmp_path, repeat=5, calibrations=2)
    shares = [json.loads((tmp_path / f"calibration-{number}" / "report.json").read_text()) for number in (1, 2)]
    assert [len(share["rows"][0]["turns"]) for share in shares] == [3, 2]
    first, second = (share["rows"][0]["predicted_ns"] for share in shares)
    assert first < second
    (joined,) = report.rows
    assert len(joined.turns) == 5
    assert joined.predicted_ns == round((3 * first + 2 * second) / 5)
    for share in shares:
        assert share["predictions_sha256"] != report.predictions_sha256
    assert json.loads((tmp_path / "report.json").read_text())["predictions_sha256"] == report.predictions_sha256


def test_torchs_class_trains_in_turns_with_ours(two_ranks):
    runs = [
        TargetRun({"bucket_cap_mb": cap}, torchs_arguments=torchs)
        for cap, torchs in [(1e-4, {"bucket_cap_mb": 1e-4}), (inf, None), (inf, {"bucket_cap_mb": 1.0})]
    ]
    turns = two_ranks.run(measure_configurations, "tests.models_for_cli:tiny", runs, "training")[0]
    assert [len(turn.measurement.torchs_ns) for turn in turns] == [3, 0, 3]
    assert min(turns[0].measurement.torchs_ns) > 0
    ours = [[moment.kind for moment in iteration] for turn in turns for iteration in turn.iterations]
    assert ours[3:6] == ours[6:]  # torch's class has left nothing behind


def test_torchs_class_trains_with_torchs_settings_only(tmp_path):
    pool = mock.create_autospec(RankPool, instance=True, world_size=2)
    with pytest.raises(ValueError, match=r"torch: expected the order ready and the hook none.* got forward and none"):
        validate.validate(pool, "m", [Configuration(1.0, "forward")], out=tmp_path, with_torch=True)
    assert not pool.run.called


def test_more_calibrations_than_turns_are_refused_before_anything_runs(tmp_path):
    pool = mock.create_autospec(RankPool, instance=True, world_size=2)
    with pytest.raises(ValueError, match="at most one before each of 2 turns, got 3"):
        validate.validate(pool, "m", [Configuration(1.0)], out=tmp_path, repeat=2, calibrations=3)
    pool.run.assert_not_called()
