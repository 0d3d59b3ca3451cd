"""Tutorials as files: their shape, and that no output is committed. `make test-tutorials` runs them."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "tutorials").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def cells(request):
    return json.loads(request.param.read_text())["cells"]


def text(cell):
    return "".join(cell["source"])


def test_outputs_are_stripped(cells):
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


def test_each_opens_with_its_question_and_a_prediction_and_ends_with_what_to_read(cells):
    for words in ("**The question.**", "**You need**", "**Predict before you run.**"):
        assert words in text(cells[0])
    assert text(cells[-1]).startswith("**Read next:**")


def test_each_has_two_exercises_that_the_cell_after_them_checks(cells):
    exercises = [place for place, cell in enumerate(cells) if "exercise" in cell["metadata"].get("tags", ())]
    assert len(exercises) == 2
    assert all("assert" in text(cells[place + 1]) for place in exercises)


def test_what_moves_is_left_out_of_the_site_and_stands_still_before(cells):
    """A page has no kernel that could move a slider, so the cell before shows one of its pictures."""
    for before, cell in pairwise(cells):
        if "interact(" in text(cell):
            assert cell["metadata"]["tags"] == ["remove-cell"]
            assert re.search(r"^show\(.*\)$", text(before), flags=re.MULTILINE)


def test_there_are_nine_in_order():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(1, 10)]
