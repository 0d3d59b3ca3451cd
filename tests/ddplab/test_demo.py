"""The demo: its trace, its exact first part, its network where links are not permitted, and its table."""

from dataclasses import replace
from unittest import mock

from ddplab.validation import demo
from ddplab.validation.machine_conditions import ConditionsError
from ddplab.validation.validation_report import BASELINES
from figures.traces_and_fabrics import resnet50
from reference.errors import LinkError
from reference.trace import Trace

from ..validation_rows import row


def test_its_trace_is_the_one_of_the_figures():
    recorded, figures = Trace.load(demo.TRACE), resnet50()
    assert recorded.ranks == figures.ranks
    assert recorded.workload.parameters == figures.workload.parameters


def test_in_virtual_time_reducer_and_prediction_agree_to_the_nanosecond(tmp_path):
    report = demo._in_virtual_time(tmp_path)
    assert [one.predicted_ns - one.measured_ns for one in report.rows] == [0] * len(demo.CONFIGURATIONS)
    assert report.coverage == 1
    assert (tmp_path / "perfetto.json").exists()


def summary(title: str, error: float) -> demo.ValidationReport:
    rows = [replace(row(cap, 1_000_000, round(1_000_000 * (1 + error))), model=title) for cap in (1.0, float("inf"))]
    return demo.summarize(rows, "")


def test_without_links_the_network_is_modelled(tmp_path):
    used = []

    def validate(_pool, modelled, **_arguments):
        used.append(modelled)
        return summary("resnet50", 0.01)

    def pool(_world_size, link_rate=None):
        if link_rate is not None:
            raise LinkError("links: expected root")
        return mock.MagicMock()

    with mock.patch.object(demo, "RankPool", pool), mock.patch.object(demo, "validate_emulated", validate):
        report = demo._by_the_clock(tmp_path, lambda *_: None)
    assert [fabric.library for fabric in used] == ["gloo"]
    assert report.rows[0].model == "by the clock: ResNet-50 on 4 emulated V100s, a modelled network"


def test_one_table_has_the_rows_of_all_reports():
    ladder = demo.Ladder(summary("virtual time: a", 0.0), summary("by the clock: b", 0.01), summary("c: d", -0.1))
    reports = [report.to_json() for report in ladder]
    table = demo.ladder_table(reports)
    assert [(cells["run"], cells["ranks"], cells["cap"], cells["error"]) for cells in table] == [
        ("virtual time", "8", "1 MB", "+0.0%"), ("virtual time", "8", "single", "+0.0%"),
        ("by the clock", "4", "1 MB", "+1.0%"), ("by the clock", "4", "single", "+1.0%"),
        ("c", "2", "1 MB", "-10.0%"), ("c", "2", "single", "-10.0%"),
    ]  # fmt: skip
    sentences = demo.ladder_sentences(reports)
    assert sentences[0].endswith("at most 0 ns.")
    assert sentences[2].startswith("C: d: mean error 10.0% (baselines: ")
    assert all(name.replace("_", " ") in sentences[1] for name in BASELINES)
    figure = demo.ladder_figure(ladder)
    assert [ax.get_title(loc="left").partition("\n")[2] for ax in figure.axes] == [
        "mean error 0.0%, worst +0.0%", "mean error 1.0%, worst +1.0%", "mean error 10.0%, worst -10.0%",
    ]  # fmt: skip


def test_a_machine_that_is_too_slow_for_emulated_devices_still_gets_the_other_two(tmp_path):
    with (
        mock.patch.object(demo, "_by_the_clock", side_effect=ConditionsError("too slow")),
        mock.patch.object(demo, "_on_the_processor", return_value=summary("c: d", -0.1)),
    ):
        ladder = demo.demo(tmp_path, on_progress=lambda *_: None)
    assert ladder.wall is None
    assert (tmp_path / "1-virtual" / "report.json").exists()
    assert (tmp_path / "demo.png").exists()
    reports = [None if report is None else report.to_json() for report in ladder]
    assert {cells["run"] for cells in demo.ladder_table(reports)} == {"virtual time", "c"}
    assert len(demo.ladder_sentences(reports)) == 2
