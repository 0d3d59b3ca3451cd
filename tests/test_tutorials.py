"""Tutorials as files: their structure, and that no outputs are committed. `make test-tutorials` executes them."""

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


def test_each_has_two_exercises_left_open_with_a_folded_solution_and_a_check(cells):
    exercises = [place for place, cell in enumerate(cells) if "exercise" in cell["metadata"].get("tags", ())]
    assert len(exercises) == 2
    for place in exercises:
        left_open, solution, check = cells[place : place + 3]
        assert all("= ..." in line for line in text(left_open).splitlines())
        assert solution["metadata"]["jupyter"] == {"source_hidden": True}  # in JupyterLab
        assert solution["metadata"]["tags"] == ["solution", "hide-input"]  # on the site
        assert re.match(r"if \w+ is \.\.\.:\n", text(solution))
        assert "assert" in text(check)


def test_an_interactive_cell_is_left_out_of_the_site_and_follows_a_still_picture(cells):
    """A page has no kernel for a slider, so the cell before shows one of its pictures."""
    for before, cell in pairwise(cells):
        if "interact(" in text(cell):
            assert cell["metadata"]["tags"] == ["remove-cell"]
            assert re.search(r"^show\(.*\)$", text(before), flags=re.MULTILINE)


def test_there_are_nine_in_order():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(1, 10)]
