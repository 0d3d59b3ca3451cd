"""The figures: drawn from committed data, each equals the committed file, byte for byte."""

from xml.etree import ElementTree

import pytest

from figures import __main__ as figures
from figures import backward_pass, overlap
from figures.drawing import FOLDER, FORMATS


@pytest.mark.parametrize("figure", figures.FIGURES, ids=figures.name_of)
def test_a_figure_is_drawn_the_same_again(figure):
    drawn = figure.files()
    for format_ in FORMATS:
        committed = FOLDER / f"{figures.name_of(figure)}.{format_}"
        assert drawn[format_] == committed.read_bytes(), f"{committed.name}: data or code changed; run `make figures`"


def test_captions_match_the_data():
    assert figures.page() == (FOLDER / "README.md").read_text(), "run `make figures`"


def test_every_picture_has_its_module():
    drawn = {f"{figures.name_of(figure)}.{format_}" for figure in figures.FIGURES for format_ in FORMATS}
    found = {path.name for format_ in FORMATS for path in FOLDER.glob(f"*.{format_}")}
    assert found == drawn | {backward_pass.PATH.name}


def test_the_animation_is_drawn_the_same_again():
    assert backward_pass.svg(backward_pass.iteration()) == backward_pass.PATH.read_text(), "run `make figures`"


def test_the_animation_shows_every_gradient_and_ends_with_exposed_communication():
    shown = backward_pass.iteration()
    assert sum(len(bucket.filled) for bucket in shown.buckets) == 161
    for bucket in shown.buckets:
        assert bucket.filled[-1][1] == 1
        assert bucket.filled[-1][0] <= bucket.sent_ms[0] < bucket.sent_ms[1]
    assert 0 < shown.exposed_ms < shown.end_ms - shown.backward_ms + 1e-6
    assert ElementTree.fromstring(backward_pass.svg(shown)).tag.endswith("svg")


def test_overlap_saves_at_most_the_backward_pass_and_at_most_the_communication():
    """Fails if the bars with and without overlap have different numbers of collectives in flight."""
    for panel in overlap.panels():
        for backward, comm, added in zip(panel.backward_ms, panel.all_comm_ms, panel.added_ms, strict=True):
            assert 0 < comm - added <= min(backward, comm)
