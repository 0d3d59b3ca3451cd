"""Reports: what predictions and measurements amount to."""

import json
from dataclasses import replace

import pytest

from ddplab.prediction_errors import Configuration, make_row, policy_of, predict_target, summarize
from ddplab.simulator.baseline_predictions import baselines_ns
from ddplab.simulator.schedule.policy import Policy
from ddplab.training_runs import Turn

from ..validation_rows import FABRIC, TRACE, row


def test_a_report_counts_errors_as_it_says():
    report = summarize([row(1, 100, 104), row(5, 200, 180), row(25, 300, 170), row(9, 302, 400, spread=9)], "abc")
    assert report.worst_error == pytest.approx(170 / 300 - 1)
    assert report.mape == pytest.approx((0.04 + 0.1 + 130 / 300 + 98 / 302) / 4)
    assert report.coverage == 0.25
    assert list(report.baselines.values()) == [0.5, 0.5, 0.25, 0.1]


def turns(*medians: int) -> tuple[Turn, ...]:
    return tuple(Turn((ns,)) for ns in medians)


def test_turns_that_differ_are_noise_and_what_all_rows_of_a_turn_have_in_common_is_not():
    """A machine is slower in one turn than in another."""
    changes = ((-4, 0, 4), (0, 4, -4), (4, -4, 0))
    rows = [
        replace(row(cap_mb, measured, measured), turns=turns(*(measured + change for change in of_row)))
        for (cap_mb, measured), of_row in zip(((1, 200), (5, 205), (25, 220)), changes, strict=True)
    ]
    report = summarize(rows, "abc")
    assert report.noise == pytest.approx(1.645 * 4 / 208, rel=0.01)
    assert summarize([replace(one, turns=turns(one.measured_ns)) for one in rows], "abc").noise is None
    rows = [replace(row(cap, 100 * cap, 1), turns=turns(90 * cap, 110 * cap)) for cap in (1, 2, 3)]
    assert summarize(rows, "abc").noise == pytest.approx(0)
    assert summarize(rows[:1], "abc").noise == pytest.approx(1.645 * (2 * 0.02 / 2) ** 0.5)


def test_a_report_is_written(tmp_path):
    rows = [row(1, 100, 104), row(float("inf"), 200, 180)]
    report = summarize(rows, "abc", world_size=2)
    report.save(tmp_path)
    written = json.loads((tmp_path / "report.json").read_text())
    assert written == json.loads(json.dumps(report.to_json()))
    assert written["rows"][1]["cap_mb"] is None
    assert written["rows"][0]["turns"] == [{"times_ns": [100], "torchs_ns": []}] * 3
    assert set(written["yardsticks"]) == {"perfect_scaling", "no_overlap", "naive_overlap", "pipelined_overlap"}


def test_a_row_compares_measured_iterations_with_all_predictions():
    target = predict_target(TRACE, FABRIC, policy_of(Configuration(25.0)), 2)
    made = make_row("m", Configuration(25.0), target, turns(1000, 2000, 4000))
    assert made.measured_ns == 2000
    assert made.error == target.prediction.iteration_ns / 2000 - 1
    simpler = baselines_ns(TRACE, FABRIC, world_size=2, policy=Policy(bucket_cap_mb=25.0))
    assert made.no_overlap_error == target.prediction.no_overlap_ns / 2000 - 1
    assert made.naive_overlap_error == simpler["naive overlap"] / 2000 - 1
    assert made.perfect_scaling_error == simpler["perfect scaling"] / 2000 - 1


def test_a_gain_is_the_median_of_the_gains_of_turns():
    """The machine becomes twice as slow from the first turn to the last; the plan saves a tenth in each turn."""
    default = replace(row("default", 150, 200), turns=turns(100, 120, 140, 160, 180, 200))
    plan = replace(row("plan", 135, 160), turns=turns(90, 108, 126, 144, 162, 180))
    gain = summarize([default, plan], "abc").gain
    assert gain.predicted == pytest.approx(0.2)
    assert gain.measured == pytest.approx(0.1)
    assert gain.interval == pytest.approx((0.1, 0.1))
    assert summarize([replace(one, turns=one.turns[:2]) for one in (default, plan)], "abc").gain.interval is None
