"""Tutorials as files: their structure, no committed outputs, no answer in sight; and, slow, as executed notebooks."""

import ast
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from docs.executed_tutorials import EXECUTED, shown
from tutorials import own_code
from tutorials.exercises import NOT_ATTEMPTED, TO_WRITE

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
SHOWN = yaml.safe_load(Path(__file__).with_name("tutorials.yaml").read_text())
"""By tutorial, what is true of its variables at the end."""
RUNG = "%%rung "
"""First characters of a cell in which the learner writes a rung of the ladder."""
SCREEN = 40
"""Lines that a cell may print."""
DRAWS = re.compile(r"\b(ax|axes|plt|figure)\.|\bdraw_|\bshow_")
"""A line that draws; modules contain the code of pictures."""
MOST_DRAWING_LINES = 8
PICTURE = re.compile(r"\b(draw|show)_(?!graph|solution)\w+\(")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def cells(request):
    return json.loads(request.param.read_text())["cells"]


def text(cell):
    return "".join(cell["source"])


def tags(cell):
    return cell["metadata"].get("tags", [])


def tree(cell):
    """The statements of a code cell, of the module if it writes one, without magics."""
    return ast.parse("\n".join(line for line in text(cell).splitlines() if not line.startswith("%")))


def names(node, context):
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}


def ellipses(node):
    return sum(isinstance(one, ast.Constant) and one.value is ... for one in ast.walk(node))


def code(cells):
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_published_tutorial_is_this_one_with_outputs(path):
    """After a change of a tutorial, `python -m docs --publish` runs all and publishes them again."""
    published = json.loads((ROOT / EXECUTED / path.name).read_text())["cells"]
    assert list(map(text, published)) == list(map(text, shown(json.loads(path.read_text())["cells"])))
    outputs = [output for cell in code(published) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" for output in outputs)
    assert not re.search(r"/(tmp|home|root|work)/", json.dumps(outputs))
    for cell in code(published):
        printed = [output.get("text", output.get("data", {}).get("text/markdown", "")) for output in cell["outputs"]]
        assert sum(len("".join(one).splitlines()) for one in printed) <= SCREEN, text(cell)


def test_outputs_are_stripped_and_no_cell_asserts(cells):
    """What must be true of a tutorial is in `tutorials.yaml`, where no learner has to read it."""
    for cell in code(cells):
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(tree(cell))), text(cell)
        assert ".verify(" not in text(cell)


def test_each_opens_with_its_question_and_a_prediction_and_ends_with_what_to_read(cells):
    for words in ("**The question.**", "**You need**", "**Predict before you run.**"):
        assert words in text(cells[0])
    summary, _, after = text(cells[-1]).partition("\n\n")
    assert summary.startswith("**In short.**")
    assert len(re.findall(r"\.(?:\s|$)", summary)) in (3, 4, 5)  # a few sentences after its two words
    assert after.startswith("**Read next:**")


def test_each_has_a_picture_and_draws_it_in_a_module(cells):
    assert any(PICTURE.search(text(cell)) for cell in code(cells))
    for cell in code(cells):
        lines = [line for line in text(cell).splitlines() if DRAWS.search(line)]
        assert len(lines) <= MOST_DRAWING_LINES, text(cell)


def test_the_first_cell_asks_for_guesses_and_the_last_code_cell_scores_them(cells):
    """The first cell contains no answer, because the last code cell passes the measured values."""
    *_, guess = tree(cells[1]).body
    assert names(guess, ast.Store) == {"guess"}
    assert tags(cells[1]) == ["guess"]
    assert tags(cells[-2]) == ["guesses"]
    questions = {one.arg: one.value for one in guess.value.keywords}
    assert guess.value.func.id == "ask"
    assert {one.func.id for one in questions.values()} <= {"slider", "choice", "several"}
    score = scored(cells)
    assert ast.unparse(score.func) == "guess.score"
    assert {one.arg for one in score.keywords} - {None} <= set(questions)
    read = {name for cell in code(cells) for name in re.findall(r'guess\["(\w+)"\]', text(cell))}
    assert read <= set(questions), "a picture shows only guesses that the first cell asks for"


def scored(cells):
    """The call of `guess.score`, whose keywords are the measured values."""
    return tree(cells[-2]).body[-1].value


def exercises(cells):
    """Places of the cells in which learners answer."""
    return [place for place, cell in enumerate(cells) if "exercise" in tags(cell)]


def checked(cell):
    """The last statement of an exercise: the call of `check`; None for a rung."""
    if text(cell).startswith(RUNG):
        return None
    called = tree(cell).body[-1].value
    assert called.func.attr == "check"
    return called


def test_each_has_open_exercises_with_a_check(cells):
    """Run All must not answer for the learner: no cell but the exercise assigns the variables that are checked."""
    assert len(exercises(cells)) >= 2
    for place in exercises(cells):
        before, exercise = cells[place - 1 : place + 1]
        if (called := checked(exercise)) is None:
            assert TO_WRITE in text(exercise)
            continue
        (answer,) = called.args
        assert not called.keywords  # one hint at first
        names_of_answers = names(answer, ast.Load) - {"own_code"}
        gaps = ellipses(tree(exercise)) + text(before).count(TO_WRITE)
        assert gaps == max(1, len(names_of_answers))
        for other in code(cells):
            stored = names(tree(other), ast.Store)
            assert other is exercise or not names_of_answers & stored


def constants(module):
    """Solutions that are written down in a module of answers, not computed from the notebook's values."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "solution" and isinstance(node.body[0], ast.Return):
            value = node.body[0].value
            if not any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(value)):
                yield value


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_cell_contains_a_solution_or_a_judge(path):
    """JupyterLab shows the first line of a folded cell, and GitHub shows all of them."""
    module = ROOT / "tutorials" / "answers" / f"{path.stem[3:]}.py"
    written = [ast.unparse(value) for value in constants(module)] if RUNG not in path.read_text() else []
    for cell in json.loads(path.read_text())["cells"]:
        assert set(tags(cell)).isdisjoint({"solution", "check"})
        if cell["cell_type"] == "code":
            assert not re.search(r"\b(solution\b(?! of)|judge|Exercise\(|wrong=)", text(cell)), text(cell)
        for answer in written:
            if len(answer) > 1:
                assert f"= {answer}" not in text(cell).replace('"', "'"), text(cell)
            if not answer.startswith("'") and len(answer) > 1:
                assert answer not in text(cell), text(cell)


def shows(output, answer):
    """Whether one line of an output contains an answer, in order, that cannot be there by accident."""
    parts = answer if isinstance(answer, list | tuple) else [answer]
    flat = [str(one) for part in parts for one in (part if isinstance(part, list | tuple) else [part])]
    if isinstance(answer, bool | str) or len("".join(flat)) < 4:
        return False  # a choice of the question's words, or a number as small as many others
    in_order = r"\D+".join(map(re.escape, flat))
    return any(re.search(rf"(?<![\w.]){in_order}(?![\w.])", line) for line in output.splitlines())


def test_an_output_with_the_answer_is_seen():
    assert shows("done at 55 and 70 ms", (55, 70))
    assert shows("averages [3.0, 3.0, 2.0]", [3.0, 3.0, 2.0])
    assert not shows("done at 55 ms\nand at 70 ms", (55, 70))
    assert not shows("it has 134848.5 bytes", 34848)


AT_THE_END = """
import json
def is_outside(question, value):
    if question.control == "slider":
        return not question.options[0] <= value <= question.options[-1]
    return question.by_chance(value) == 0
measured = dict({measured})
wrong = [fact for fact in {facts!r} if not eval(fact)]
outside = [name for name, value in measured.items() if value is not None and is_outside(guess.questions[name], value)]
print(json.dumps([outside, wrong]))
"""
"""Prints names of measured values outside the range of their slider or not among the options, and wrong facts."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_run_all_answers_no_exercise_and_every_fact_is_true_and_every_measured_value_can_be_guessed(path):
    """Execute the notebook, ask its exercises for their answers, and look for them in its outputs."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    places = exercises(notebook.cells)
    calls = [called.func.value.id for place in places if (called := checked(notebook.cells[place]))]
    answers = ", ".join(f"[{name}.verify(), {name}.solution(), {name}.code is None]" for name in calls)
    ask = f"import json\nprint(json.dumps([{answers}], default=str))"
    position = max(places) + 1  # after the last exercise, before the ranks end
    measured = ", ".join(map(ast.unparse, scored(notebook.cells).keywords))
    end = AT_THE_END.format(measured=measured, facts=SHOWN[path.stem[3:]])
    notebook.cells.insert(-1, nbformat.v4.new_code_cell(end))
    notebook.cells.insert(position, nbformat.v4.new_code_cell(ask))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(path.parent)}}).execute()
    (told,) = notebook.cells.pop(position).outputs
    (found,) = notebook.cells[-2].outputs
    assert json.loads(found.text) == [[], []]
    for place in places:
        (output,) = notebook.cells[place].outputs
        assert output.text.strip() == NOT_ATTEMPTED
    outputs = [str(one.get("text", one.get("data", ""))) for cell in code(notebook.cells) for one in cell.outputs]
    for _, answer, is_value in json.loads(told.text):
        assert not is_value or not [one for one in outputs if shows(one, answer)]


def test_an_interactive_cell_is_left_out_of_the_site_and_follows_a_still_picture(cells):
    """A page has no kernel for a slider, so the cell before shows one of its pictures."""
    for before, cell in pairwise(cells):
        if "interact(" in text(cell):
            assert tags(cell) == ["remove-cell"]
            assert re.search(r"^(\w+\.)?show(_\w+)?\(.*\)$", text(before), flags=re.MULTILINE)


def test_there_are_ten_in_order_and_the_third_has_the_first_eight_rungs():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number:02}" for number in range(10)]
    assert list(SHOWN) == [path.stem[3:] for path in NOTEBOOKS]
    written = [text(cell) for cell in code(json.loads(NOTEBOOKS[2].read_text())["cells"])]
    rungs = [cell.partition("\n")[0] for cell in written if cell.startswith(RUNG)]
    assert rungs == [f"{RUNG}{number}" for number in range(1, 9)]


def test_before_you_buy_fits_on_two_screens():
    (path,) = (path for path in NOTEBOOKS if path.stem.endswith("before_you_buy"))
    visible = [cell for cell in code(json.loads(path.read_text())["cells"]) if "remove-cell" not in tags(cell)]
    assert sum(len(text(cell).splitlines()) for cell in visible) <= 60


def test_no_tutorial_writes_into_the_repository():
    """Run All must change no file that git tracks: modules of learners go to an ignored folder."""
    for path in NOTEBOOKS:
        for cell in code(json.loads(path.read_text())["cells"]):
            if "%%writefile" in text(cell):
                assert text(cell).startswith(own_code.WRITES)
    ignored = (ROOT / ".gitignore").read_text().split()
    assert f"{own_code.FOLDER.relative_to(ROOT).parts[0]}/" in ignored
