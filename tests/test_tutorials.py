"""Tutorials as files: their structure, and that no outputs are committed. `make test-tutorials` executes them."""

import ast
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from tutorials import own_code

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
FOLDED = {"source_hidden": True}
"""Metadata of a cell that JupyterLab folds."""


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def cells(request):
    return json.loads(request.param.read_text())["cells"]


def text(cell):
    return "".join(cell["source"])


def tags(cell):
    return cell["metadata"].get("tags", [])


def tree(cell):
    """The statements of a code cell; a cell that writes a module has those of the module."""
    magic, _, module = text(cell).partition("\n")
    return ast.parse(module if magic.startswith("%%writefile") else text(cell))


def names(node, context):
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}


def ellipses(node):
    return sum(isinstance(one, ast.Constant) and one.value is ... for one in ast.walk(node))


def code(cells):
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_outputs_are_stripped(cells):
    for cell in code(cells):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


def test_each_opens_with_its_question_and_a_prediction_and_ends_with_what_to_read(cells):
    for words in ("**The question.**", "**You need**", "**Predict before you run.**"):
        assert words in text(cells[0])
    assert text(cells[-1]).startswith("**Read next:**")


def test_guesses_are_open_and_the_last_code_cell_compares_them(cells):
    (guess,) = tree(cells[1]).body
    assert names(guess, ast.Store) == {"guess"}
    assert guess.value.values
    assert all(value.value is ... for value in guess.value.values)
    assert tags(cells[1]) == ["guess"]
    assert tags(cells[-2]) == ["guesses"]
    assert "compare_guesses(guess, " in text(cells[-2])


def test_each_has_open_exercises_with_a_folded_solution_a_check_and_a_hidden_verification(cells):
    """Run All must not answer for the learner: no cell but the exercise assigns the variables that are checked."""
    exercises = [place for place, cell in enumerate(cells) if "exercise" in tags(cell)]
    assert len(exercises) >= 2
    for place in exercises:
        exercise, solution, check, verification = cells[place : place + 4]
        answers = names(tree(exercise), ast.Store)
        assert ellipses(tree(exercise)) == len(answers)
        assert solution["metadata"]["jupyter"] == verification["metadata"]["jupyter"] == FOLDED
        assert tags(solution) == ["solution", "hide-input"]  # on the site
        assert (tags(check), tags(verification)) == (["check"], ["verify", "remove-cell"])
        called = tree(check).body[-1].value
        assert called.func.attr == "check"
        assert names(called, ast.Load) == {*answers, called.func.value.id}
        assert f"{called.func.value.id}.verify(solution,wrong=[" in re.sub(r"\s", "", text(verification))
        for other in code(cells):
            assert other is exercise or not answers & names(tree(other), ast.Store)


def test_asserts_stand_in_folded_cells_that_the_site_leaves_out(cells):
    for cell in code(cells):
        if any(isinstance(node, ast.Assert) for node in ast.walk(tree(cell))):
            assert "remove-cell" in tags(cell), text(cell)
            assert cell["metadata"]["jupyter"] == FOLDED


def test_an_interactive_cell_is_left_out_of_the_site_and_follows_a_still_picture(cells):
    """A page has no kernel for a slider, so the cell before shows one of its pictures."""
    for before, cell in pairwise(cells):
        if "interact(" in text(cell):
            assert tags(cell) == ["remove-cell"]
            assert re.search(r"^show\(.*\)$", text(before), flags=re.MULTILINE)


def test_there_are_twelve_in_order():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(12)]


def test_no_tutorial_writes_into_the_repository():
    """Run All must change no file that git tracks: modules of learners go to an ignored folder."""
    for path in NOTEBOOKS:
        for cell in code(json.loads(path.read_text())["cells"]):
            if "%%writefile" in text(cell):
                assert text(cell).startswith(own_code.WRITES)
    ignored = (ROOT / ".gitignore").read_text().split()
    assert f"{own_code.FOLDER.relative_to(ROOT).parts[0]}/" in ignored
