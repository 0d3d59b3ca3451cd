"""The figures: drawn from committed data, each equals the committed file, byte for byte."""

import re
from xml.etree import ElementTree

import pytest

from figures import __main__ as figures
from figures import backward_pass, bucket_sizes, five_ways, overlap, scaling, skipped_synchronization
from figures.drawing import FOLDER, FORMATS
from figures.emulated_runs import Run, committed_ns

EMULATED = (overlap, bucket_sizes, scaling, skipped_synchronization)


@pytest.mark.parametrize("figure", figures.FIGURES, ids=figures.name_of)
def test_a_figure_is_drawn_the_same_again(figure):
    drawn = figure.files()
    for format_ in FORMATS:
        committed = FOLDER / f"{figures.name_of(figure)}.{format_}"
        assert drawn[format_] == committed.read_bytes(), f"{committed.name}: data or code changed; run `make figures`"


def test_captions_match_the_data_and_begin_with_a_number():
    assert figures.page() == (FOLDER / "README.md").read_text(), "run `make figures`"
    for figure in figures.FIGURES:
        first = re.split(r"(?<!\d)\. ", figure.caption())[0]
        assert re.search(r"\d", first)
        assert len(first) < 330


def test_every_picture_has_its_module():
    drawn = {f"{figures.name_of(figure)}.{format_}" for figure in figures.FIGURES for format_ in FORMATS}
    found = {path.name for format_ in FORMATS for path in FOLDER.glob(f"*.{format_}")}
    assert found == drawn | {backward_pass.PATH.name}


def test_the_animation_is_drawn_the_same_again_and_shows_every_gradient_and_ends_with_exposed_communication():
    shown = backward_pass.iteration()
    assert sum(len(bucket.filled) for bucket in shown.buckets) == 161
    for bucket in shown.buckets:
        assert bucket.filled[-1][1] == 1
        assert bucket.filled[-1][0] <= bucket.sent_ms[0] < bucket.sent_ms[1]
    assert 0 < shown.exposed_ms < shown.end_ms - shown.backward_ms + 1e-6
    drawn = backward_pass.svg(shown)
    assert drawn == backward_pass.PATH.read_text(), "run `make figures`"
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_each_number_of_the_table_of_the_paper_is_in_a_caption():
    rows = [line.split(" | ")[1] for line in figures.PAPER.splitlines() if line.startswith("| figure")]
    named = {number for cell in rows for number in re.findall(r"\d+\.?\d*", cell)} - {"50", "8"}  # ResNet-50, 8
    captions = " ".join(one.caption() for one in figures.FIGURES)
    assert len(rows) == 8
    assert len(named) > 10
    assert not [number for number in named if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d]|\.\d)", captions)]


def test_the_rank_of_each_way_computes_or_waits_at_any_moment_of_its_iteration():
    for way in five_ways.panels()[0]:
        ends = 0
        for kind, start, end in sorted(way.spans, key=lambda span: span[1:]):
            if kind != "hidden":
                assert start == ends, way.name
                ends = end
        assert ends == way.iteration_ns


def test_ways_without_overlap_take_as_long_as_predicted():
    naive, flat, *_ = five_ways.panels()[0]
    trace = five_ways.page.models()["ResNet-50"]
    each, all_of_them = [[index] for index in range(len(trace.keys))], [list(range(len(trace.keys)))]
    assert naive.iteration_ns == five_ways._predicted(trace, each).no_overlap_ns
    assert flat.iteration_ns == five_ways._predicted(trace, all_of_them).no_overlap_ns


def test_overlap_saves_at_most_the_backward_pass_and_at_most_the_communication():
    """Fails if the bars with and without overlap have different numbers of collectives in flight."""
    for panel in overlap.panels():
        for pair in panel.pairs:
            backward, comm = pair.computation_ms - pair.forward_ms, pair.without_ms - pair.computation_ms
            assert 0 < pair.without_ms - pair.with_ms <= min(backward, comm)


def test_the_real_reducer_takes_the_predicted_time_in_every_emulated_run_that_a_figure_shows():
    assert set(committed_ns()) == {run for figure in EMULATED for run in figure.runs()}
    for run, ns in committed_ns().items():
        assert run.predict().iteration_ns == ns, run


@pytest.mark.parametrize(
    "run", [Run("ResNet-50", "NCCL-like", 32), Run("ResNet-50", "Gloo-like", 32, overlaps=False)]
)
def test_an_emulated_run_takes_the_same_time_again(run):
    assert run.emulate().iteration_ns == committed_ns()[run]
