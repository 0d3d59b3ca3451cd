"""Explain: the causes of an error are found, and they add up to it."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ddplab.validation.error_causes import (
    CAUSES,
    PARTS,
    FixedDurations,
    causes_of,
    draw_waterfall,
    explain,
    explain_run,
    measured_timelines,
    part_times,
)
from ddplab.validation.reducer_step_times import Iterations, StepMoment, to_samples
from ddplab.validation.validation_report import Configuration, model_folder, predict_one, summarize
from simulator.engines.engine_choice import simulate
from simulator.engines.timeline import Timeline
from simulator.fabric import Fabric, Linear
from simulator.prediction import predict
from simulator.schedule.policy import Policy
from simulator.schedule.schedule import Compute, Wait

from ..explore import examples
from ..strategies import engine_inputs, fluid_fabrics, iteration, partitions, steady_fabrics, trace_of, traces
from ..test_readers import EXTREMES, with_another_value
from ..validation_rows import row as row_of_a_report

STEP_MOMENTS = {
    "forward": "forward_computed", "pack": "packed", "compress": "launching", "launch": "launched",
    "copy_out": "copied_out", "step": "ended",
}  # fmt: skip


def as_measured(timeline: Timeline) -> list[Iterations]:
    """What `watch` reads on each rank of an iteration that happens as in this timeline."""
    schedule = timeline.engine_input.schedule
    by_rank = []
    for row in range(len(timeline.end_ns)):
        moments = [
            StepMoment("done", one.bucket, int(timeline.done_ns[number]))
            for number, one in enumerate(schedule.collectives)
            if one.bucket is not None
        ]
        for one, end_ns in zip(schedule.instructions, timeline.end_ns[row].tolist(), strict=True):
            if isinstance(one, Wait):
                bucket = schedule.collectives[one.collective].bucket
                moments.append(StepMoment("buffers_received" if bucket is None else "woken", bucket, end_ns))
            elif isinstance(one, Compute) and one.kind == "backward":
                kind = "backward_computed" if one.bucket is None else "packing"
                moments.append(StepMoment(kind, one.bucket, end_ns))
            elif isinstance(one, Compute) and one.kind in STEP_MOMENTS:
                moments.append(StepMoment(STEP_MOMENTS[one.kind], one.bucket, end_ns))
        by_rank.append((tuple(moments),))
    return by_rank


@st.composite
def pairs_of_timelines(draw) -> tuple[Timeline, Timeline]:
    """Predictions of one plan on two fabrics, from the same computation."""
    trace, ranks = draw(traces()), draw(st.integers(1, 4))
    policy = Policy(plan=tuple(map(tuple, draw(partitions(len(trace.keys), tuple(trace.keys))))))
    predicted, other = (
        predict(trace, draw(steady_fabrics(ranks) | fluid_fabrics(ranks)), world_size=ranks, policy=policy)
        for _ in range(2)
    )
    every_rank = range(ranks)
    assume(tuple(other.timeline.engine_input.ranks) == tuple(every_rank))  # no rank stands for another
    return predicted.timeline, other.timeline


@given(engine_inputs(fluid_fabrics))
def test_fixed_durations_give_the_same_iteration_again(engine_input):
    timeline = simulate(engine_input, "events")
    assert FixedDurations.of(timeline).iteration_ns() == timeline.iteration_ns


@given(pairs_of_timelines())
def test_causes_and_the_rest_add_up_to_the_error(timelines):
    predicted, other = timelines
    (measured,) = measured_timelines(predicted, as_measured(other))
    assert measured.iteration_ns == other.iteration_ns
    causes = causes_of(predicted, measured)
    assert [*causes] == [*CAUSES, "not explained"]
    assert sum(causes.values()) == other.iteration_ns - predicted.iteration_ns
    assert causes["not explained"] == 0, "all durations are those of the measurement"


@given(pairs_of_timelines())
def test_parts_add_up_to_the_iteration(timelines):
    predicted, other = timelines
    for timeline in (predicted, *measured_timelines(predicted, as_measured(other))):
        parts = part_times(timeline)
        assert tuple(parts) == PARTS
        assert sum(parts.values()) == timeline.iteration_ns
        assert min(parts.values()) >= 0


PLANTED_COSTS = ("packing", "in flight", "copy-out", "launch")
PLANTED_TIMES = {
    "forward": (17, (37, 27), 47, 5),
    "gaps between gradients": (10, (37, 27), 47, 5),
    "optimiser": (10, (30, 20), 40, 12),
}
"""The iteration of `plain_trace`, with 7 ns more in one part."""


@pytest.mark.parametrize("cause", [*PLANTED_COSTS, *PLANTED_TIMES])
def test_a_planted_error_is_found(cause):
    """One cost is 7 ns higher than predicted for each of two buckets, or one computing part takes 7 ns longer."""
    right = TWO_RANKS
    pack, copy_out = Linear(fixed_ns=7 * (cause == "packing")), Linear(fixed_ns=7 * (cause == "copy-out"))
    processor = right.processor.model_copy(
        update={"pack": pack, "copy_out": copy_out, "launch_ns": 7 * (cause == "launch")}
    )
    other = right.model_copy(update={"processor": processor})
    if cause == "in flight":
        other = Fabric.from_table([(2, 8, 37)])
    slower = trace_of([[iteration(*PLANTED_TIMES[cause])]], [4, 4]) if cause in PLANTED_TIMES else plain_trace()
    policy = Policy(plan=((1,), (0,)))
    predicted, truth = (
        predict(trace, one, world_size=2, policy=policy).timeline
        for trace, one in ((plain_trace(), right), (slower, other))
    )
    explanation = explain(
        predicted,
        as_measured(truth) * 2,  # one rank stands for both
        Configuration(1.0),
        model="m",
    )
    assert explanation.main_cause[0] == cause
    assert explanation.main_cause[1] == explanation.measured_ns - explanation.predicted_ns > 0
    assert explanation.buckets["bucket"].tolist() == [0, 1]
    json.dumps(explanation.to_json(), allow_nan=False)


TWO_RANKS = Fabric.from_table([(2, 8, 30)])


def plain_trace():
    return trace_of([[iteration(10, (30, 20), 40, 5)]], [4, 4])


def test_waking_up_late_is_found():
    """Both ranks go on 9 ns after the end of the last collective for which they wait."""
    predicted = predict(plain_trace(), TWO_RANKS, world_size=2, policy=Policy(plan=((1,), (0,)))).timeline
    late = ("woken", "copied_out", "ended")
    last = int(predicted.done_ns[-1])
    by_rank = [
        (tuple(one._replace(ns=one.ns + 9 * (one.kind in late and one.ns >= last)) for one in iteration),)
        for (iteration,) in as_measured(predicted)
    ]
    explanation = explain(predicted, by_rank * 2, Configuration(1.0), model="m")
    assert explanation.main_cause == ("waking up", 9)
    assert explanation.not_explained_ns == 0


@given(pairs_of_timelines())
def test_without_the_ends_of_collectives_causes_still_add_up(timelines):
    """A collective for which no rank waits counts as done when it was predicted to be, and delays nothing."""
    predicted, other = timelines
    by_rank = [
        tuple(tuple(one for one in iteration if one.kind != "done") for iteration in iterations)
        for iterations in as_measured(other)
    ]
    (measured,) = measured_timelines(predicted, by_rank)
    assert measured.iteration_ns == other.iteration_ns
    causes = causes_of(predicted, measured)
    assert sum(causes.values()) == other.iteration_ns - predicted.iteration_ns


def test_collectives_that_are_not_watched_are_refused():
    timeline = predict(
        plain_trace(), Fabric.from_table([(2, 8, 30)]), world_size=2, policy=Policy(find_unused_parameters=True)
    ).timeline
    with pytest.raises(ValueError, match=r"^explain: expected only collectives of kind .*, got bitmap"):
        measured_timelines(timeline, as_measured(timeline))


def test_a_waterfall_ends_at_the_measured_iteration():
    from matplotlib.figure import Figure

    trace, policy = plain_trace(), Policy(plan=((1,), (0,)))
    predicted, truth = (
        predict(trace, Fabric.from_table([(2, 8, ns)]), world_size=2, policy=policy).timeline for ns in (30, 50)
    )
    explanation = explain(predicted, as_measured(truth) * 2, Configuration(1.0), model="m")
    ax = draw_waterfall(explanation, Figure().subplots())
    last = ax.patches[-1]
    assert (last.get_y() + last.get_height()) * 1e6 == pytest.approx(explanation.measured_ns)


def test_a_folder_without_a_report_or_samples_is_told_in_one_line(tmp_path):
    with pytest.raises(ValueError, match=r"report.json: cannot be read: .*expected the folder of a run"):
        explain_run(tmp_path)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(ValueError, match=r"report.json: not a report: invalid JSON"):
        explain_run(tmp_path)
    report = summarize([row_of_a_report(1, 1, 1)], "abc")
    for wrong in ({"rows": 5}, {"rows": [{}]}, {"scale_model": {"dilation": 0}}, {"rows": []}, {"mape": "low"}):
        (tmp_path / "report.json").write_text(json.dumps(report.to_json() | wrong))
        with pytest.raises(ValueError, match=r"report.json: not a report: .*; expected the folder of a run"):
            explain_run(tmp_path)
    report.save(tmp_path)
    TWO_RANKS.save(model_folder(tmp_path, "m") / "fabric.json")
    plain_trace().save(model_folder(tmp_path, "m") / "trace.json.gz")
    (tmp_path / "calibration-1").mkdir()
    with pytest.raises(ValueError, match=r"several calibrations .*run `ddplab explain .*calibration-1`"):
        explain_run(tmp_path)
    (tmp_path / "calibration-1").rmdir()
    with pytest.raises(ValueError, match=r"samples.parquet: cannot be read: .*run `ddplab validate` again"):
        explain_run(tmp_path)
    (tmp_path / "samples.parquet").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"samples.parquet: expected samples"):
        explain_run(tmp_path)
    row = {"model": "m", **asdict(Configuration(1.0))}
    samples = to_samples(as_measured(predict(plain_trace(), TWO_RANKS, world_size=1).timeline), turn=0, **row)
    samples.drop(columns="turn").to_parquet(tmp_path / "samples.parquet")
    with pytest.raises(ValueError, match=r"samples.parquet: expected the columns .*, got none named turn"):
        explain_run(tmp_path)
    samples.assign(model="other").to_parquet(tmp_path / "samples.parquet")
    with pytest.raises(ValueError, match=r"samples.parquet: expected samples of 1 MB ready, got none"):
        explain_run(tmp_path)


RUN = Path(__file__).parents[2] / "validation" / "runs" / "gru-1gbit-3ranks"
MODEL_FOLDER = "validation.unseen.gru"
VALUES = st.sampled_from(EXTREMES) | st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.just([])


@st.composite
def damaged_samples(draw, samples: pd.DataFrame) -> pd.DataFrame:
    """Samples without some rows, or with another value in one row or in all rows of a column."""
    samples = samples.copy()
    column = draw(st.sampled_from(list(samples.columns)))
    at = draw(st.integers(0, len(samples) - 1))
    match draw(st.sampled_from(["rows", "value", "column"])):
        case "rows":
            return samples.drop(index=range(at, min(len(samples), at + draw(st.sampled_from([1, 50, 10_000])))))
        case "value":
            samples[column] = samples[column].astype(object)
            samples.at[at, column] = draw(VALUES)
        case "column":
            value = draw(VALUES)
            samples[column] = [value] * len(samples)
    return samples


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A folder with the trace and fabric of a run; each example writes its report and samples."""
    folder = tmp_path_factory.mktemp("run")
    (folder / MODEL_FOLDER).mkdir()
    for name in (f"{MODEL_FOLDER}/trace.json.gz", f"{MODEL_FOLDER}/fabric.json"):
        (folder / name).write_bytes((RUN / name).read_bytes())
    return folder


@examples(60)
@given(data=st.data())
def test_a_damaged_run_is_explained_or_told_in_one_line(run_folder, data):
    report = RUN.joinpath("report.json").read_text()
    samples = pd.read_parquet(RUN / "samples.parquet")
    samples = samples[(samples["turn"] < 1) & (samples["cap_mb"] == 10)].reset_index(drop=True)
    document = json.loads(report)
    document["rows"] = [row for row in document["rows"] if row["cap_mb"] == 10]
    report = json.dumps(document)
    if data.draw(st.booleans()):
        (run_folder / "report.json").write_bytes(data.draw(with_another_value(report)))
    else:
        (run_folder / "report.json").write_text(report)
        samples = data.draw(damaged_samples(samples))
    try:
        samples.to_parquet(run_folder / "samples.parquet")
    except (ValueError, TypeError, OverflowError):  # of pyarrow: no file has such values
        assume(False)
    try:
        explained = explain_run(run_folder)
    except ValueError as error:
        message = str(error)
        assert "\n" not in message
        return
    assert explained.explanations or explained.left_out


def test_a_configuration_that_is_not_watched_is_left_out_with_its_reason(tmp_path):
    """The second collectives of PowerSGD are not watched; the other configuration is explained nevertheless."""
    configurations = [Configuration(25.0), Configuration(25.0, hook="batched_power_sgd:1")]
    trace = plain_trace()
    TWO_RANKS.save(model_folder(tmp_path, "m") / "fabric.json")
    trace.save(model_folder(tmp_path, "m") / "trace.json.gz")
    rows, samples = [], []
    for one in configurations:
        prediction = predict_one(trace, TWO_RANKS, one, 2)
        row = {"model": "m", **asdict(one)}
        rows.append(replace(row_of_a_report(25, 1, 1), hook=one.hook, predicted_ns=prediction.iteration_ns))
        samples.append(to_samples(as_measured(prediction.timeline) * 2, turn=0, **row))
    summarize(rows, "abc").save(tmp_path)
    pd.concat(samples).to_parquet(tmp_path / "samples.parquet")
    explanations, left_out = explain_run(tmp_path)
    assert [one.configuration.hook for one in explanations] == ["none"]
    assert re.match(r"left out 25 MB ready, batched_power_sgd:1: explain: expected only", *left_out)
    summarize(rows[1:], "abc").save(tmp_path)
    with pytest.raises(ValueError, match=r"no configuration can be explained; left out 25 MB ready, batched"):
        explain_run(tmp_path)
