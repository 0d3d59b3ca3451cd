"""The figures: drawn from committed data, each equals the committed file, byte for byte."""

import pytest

from figures import __main__ as figures
from figures import overlap
from figures.drawing import FOLDER, FORMATS, render


@pytest.mark.parametrize("figure", figures.FIGURES, ids=figures.name_of)
def test_a_figure_is_drawn_the_same_again(figure):
    drawn = render(figure.draw, figure.panels(), size=figure.SIZE)
    for format_ in FORMATS:
        committed = FOLDER / f"{figures.name_of(figure)}.{format_}"
        assert drawn[format_] == committed.read_bytes(), f"{committed.name}: data or code changed; run `make figures`"


def test_captions_match_the_data():
    assert figures.page() == (FOLDER / "README.md").read_text(), "run `make figures`"


def test_every_picture_has_its_module():
    drawn = {f"{figures.name_of(figure)}.{format_}" for figure in figures.FIGURES for format_ in FORMATS}
    found = {path.name for format_ in FORMATS for path in FOLDER.glob(f"*.{format_}")}
    assert found == drawn


def test_overlap_saves_at_most_the_backward_pass_and_at_most_the_communication():
    """Fails if the bars with and without overlap have different numbers of collectives in flight."""
    for panel in overlap.panels():
        for backward, comm, added in zip(panel.backward_ms, panel.all_comm_ms, panel.added_ms, strict=True):
            assert 0 < comm - added <= min(backward, comm)
