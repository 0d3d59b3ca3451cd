"""Reports: what predictions and measurements amount to."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from ddplab.validation.validation_report import (
    Configuration,
    Measurement,
    SpeedCheck,
    TargetPrediction,
    draw_validation,
    join_rows,
    make_row,
    predict_targets,
    summarize,
)
from simulator import Fabric, predict

from ..strategies import iteration, trace_of
from ..validation_rows import FABRIC, TRACE, row


def test_a_report_counts_errors_as_it_says():
    report = summarize([row(1, 100, 104), row(5, 200, 180), row(25, 300, 170), row(9, 302, 400, spread=9)], "abc")
    assert report.worst_error == pytest.approx(170 / 600 - 1)
    assert report.mape == pytest.approx((96 / 200 + 220 / 400 + 430 / 600 + 204 / 604) / 4)
    assert report.paired_mape == pytest.approx((0.04 + 0.1 + 130 / 300 + 98 / 302) / 4)
    assert report.coverage == 0.25
    assert report.drift == pytest.approx(1.5)
    assert report.pairs_apart == 5  # all of six but 300 and 302, which are within the noise
    assert report.sign_errors == 1  # 200 and 300 are ranked the wrong way round
    assert report.fastest_found == 1
    assert report.baselines == {
        "perfect_scaling": 0.5,
        "no_overlap": 0.5,
        "naive_overlap": 0.25,
        "pipelined_overlap": 0.1,
    }


def test_turns_that_differ_are_noise_and_pairs_within_it_do_not_count():
    changes = ((-4, 0, 4), (0, 4, -4), (4, -4, 0))
    rows = [
        replace(row(cap_mb, measured, measured), paired_turns_ns=tuple(measured + change for change in of_row))
        for (cap_mb, measured), of_row in zip(((1, 200), (5, 205), (25, 220)), changes, strict=True)
    ]
    report = summarize(rows, "abc")
    assert report.noise == pytest.approx(1.645 * 4 / 208, rel=0.01)
    assert report.pairs_apart == 2  # the quartiles of 200 and 205 do not overlap either
    assert summarize([replace(one, paired_turns_ns=(one.paired_ns,)) for one in rows], "abc").noise is None


def test_what_all_rows_of_a_turn_have_in_common_is_no_noise():
    """Each turn of emulated devices trains other recorded iterations."""
    rows = [replace(row(cap, 100 * cap, 1), paired_turns_ns=(90 * cap, 110 * cap)) for cap in (1, 2, 3)]
    assert summarize(rows, "abc").noise == pytest.approx(0)
    assert summarize(rows[:1], "abc").noise == pytest.approx(1.645 * (2 * 0.02 / 2) ** 0.5)


@given(st.integers(1, 99), st.integers(101, 300), st.lists(st.integers(1, 500), min_size=1, max_size=9))
def test_an_interval_pays_for_its_width_and_twentyfold_for_what_lies_outside(low, high, times):
    of_row = replace(row(1, 100, 100), paired_times_ns=tuple(times))
    outside = [low - ns if ns < low else ns - high if ns > high else 0 for ns in times]
    score = of_row.interval_score((low, high))
    assert score == pytest.approx((high - low + 20 * sum(outside) / len(times)) / 100)
    report = summarize([replace(of_row, interval_ns=(low, high))], "abc")
    assert report.interval_score == pytest.approx(score)
    assert report.half_width == pytest.approx((high - low) / 200)


def test_fastest_found_counts_models():
    rows = [row(1, 100, 180), row(5, 200, 120), row(1, 100, 104), row(5, 200, 180)]
    named = [replace(one, model=f"m{number // 2}") for number, one in enumerate(rows)]
    assert summarize(named, "abc").fastest_found == 0.5
    assert summarize([row(1, 199, 180), row(5, 200, 120)], "abc").fastest_found == 1, "within the noise"


def test_a_report_is_drawn_and_written(tmp_path):
    report = summarize([row(1, 100, 104), row(float("inf"), 200, 180)], "abc")
    figure = Figure()
    draw_validation(report.to_frame(), figure.add_subplot())
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["1 MB, ready", "single, ready"]
    assert figure.axes[0].get_title(loc="left") == "m\nmean error 7.0%, worst -10.0%"
    written = json.loads(json.dumps(report.to_json()))
    assert written["rows"][1]["cap_mb"] is None
    assert set(written["rows"][0]["turns"][0]) == {"times_ns", "reference", "torchs_ns"}
    assert set(written["yardsticks"]) == {"perfect_scaling", "no_overlap", "naive_overlap", "pipelined_overlap"}
    report.save(tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["predictions_sha256"] == "abc"
    written = pd.read_csv(tmp_path / "report.csv")
    assert list(written["measured_ns"]) == [200, 400]
    assert list(written["interval_ns_low"]) == [99, 175]
    assert list(written["interval_ns_high"]) == [109, 185]


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(50, 200)), min_size=1, max_size=5))
def test_pairing_takes_the_machines_speed_out(turns):
    """However fast the machine is from turn to turn, iteration and reference alike: the same paired time."""
    (predicted,) = predict_targets(TRACE, FABRIC, [Configuration(25.0)], 2)
    steady = [measurement(100 * ns, 1, 1) for ns, _ in turns]
    drifting = [measurement(speed * ns, speed / 100, speed / 100) for ns, speed in turns]
    rows = [make_row("m", Configuration(25.0), predicted, turns) for turns in (steady, drifting)]
    assert rows[0].paired_ns == pytest.approx(rows[1].paired_ns, abs=2, rel=1e-3)
    assert rows[0].paired_ns == rows[0].measured_ns
    assert rows[1].drift == pytest.approx(np.median([speed for _, speed in turns]) / 100 - 1, abs=1e-3)


@given(st.floats(0.7, 1.4), st.floats(0.7, 1.4))
def test_pairing_takes_out_processor_and_network_each_by_its_part(processor, network):
    """A training on a machine with both changed, as the simulator has it, is worth the one on the machine as it was.

    Half of the bytes are hidden, so neither speed scales the whole.
    """
    half_hidden = trace_of([[iteration(300, (400, 800), 900, 100)]], [4000, 4000])
    fabric = Fabric.from_alpha_beta(alpha_ns=10, bytes_per_s=10e9, concurrency=1)
    configuration = Configuration(0.001)
    (predicted,) = predict_targets(half_hidden, fabric, [configuration], 2)
    times = [round(processor * ns) for ns in (300, 400, 800, 900, 100)]
    changed = trace_of([[iteration(times[0], tuple(times[1:3]), times[3], times[4])]], [4000, 4000])
    took_ns = predict(changed, fabric.scaled(network), world_size=2, bucket_cap_mb=0.001).iteration_ns
    made = make_row("m", configuration, predicted, [measurement(took_ns, processor, network, predicted)])
    assert made.paired_ns == pytest.approx(predicted.prediction.iteration_ns, rel=0.01)


def measurement(ns: int, processor: float, network: float, predicted: TargetPrediction | None = None) -> Measurement:
    """One iteration, and a reference by how much longer it took than predicted."""
    expected = (predicted or predict_targets(TRACE, FABRIC, [Configuration(25.0)], 2)[0]).speed_check
    scaled = SpeedCheck(round(processor * expected.compute_ns), round(network * expected.all_reduce_ns))
    return Measurement((ns,), scaled)


@given(st.integers(1, 10**6))
def test_one_rank_is_as_fast_as_its_processor(compute_ns):
    (alone,) = predict_targets(TRACE, FABRIC, [Configuration(25.0)], 1)
    assert alone.speed(SpeedCheck(compute_ns, 0)) == pytest.approx(1000 / compute_ns)


def test_a_speed_check_is_computation_and_then_one_all_reduce():
    (target,) = predict_targets(TRACE, FABRIC, [Configuration(25.0)], 2)
    assert target.speed_check == SpeedCheck(1000, FABRIC.all_reduce_ns(400, 2))


@given(st.lists(st.integers(1, 10**4), min_size=1, max_size=9))
def test_coverage_is_of_iterations(times):
    prediction = predict(TRACE, FABRIC, world_size=2)
    made = make_row(
        "m",
        Configuration(25.0),
        TargetPrediction(prediction, 1, 1, SpeedCheck(50, 50), lambda _: prediction.iteration_ns),
        [Measurement(tuple(times), SpeedCheck(50, 50))],
    )
    low, high = prediction.interval_ns
    assert made.coverage == pytest.approx(np.mean([low <= ns <= high for ns in times]))


@given(st.lists(st.tuples(st.integers(50, 150), st.integers(50, 150), st.integers(1, 3)), min_size=1, max_size=4))
def test_a_joined_row_compares_the_mean_prediction_with_all_turns(shares):
    rows = [
        replace(
            row(1, measured, predicted),
            turns=(Measurement((measured,), SpeedCheck(1, 1)),) * turns,
            paired_turns_ns=(measured,) * turns,
            paired_times_ns=(measured,) * turns,
        )
        for measured, predicted, turns in shares
    ]
    joined = join_rows(rows)
    each_turn = [share for share in shares for _ in range(share[2])]
    measured_ns, predicted_ns = (
        round(np.median([turn[0] for turn in each_turn])),
        np.mean([turn[1] for turn in each_turn]),
    )
    assert joined.paired_times_ns == tuple(turn[0] for turn in each_turn)
    assert joined.paired_ns == joined.measured_ns == measured_ns
    assert joined.predicted_ns == pytest.approx(predicted_ns, abs=0.51)
    assert joined.error == joined.paired_error == joined.predicted_ns / measured_ns - 1
    assert joined.coverage == pytest.approx(np.mean([abs(one - other) <= 5 for one, other, _ in each_turn]))
    assert joined.no_overlap_error == pytest.approx(1.5 * np.mean([turn[0] for turn in each_turn]) / measured_ns - 1)
