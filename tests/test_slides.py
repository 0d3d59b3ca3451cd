"""Slides of the tutorials: every tutorial gives some, none shows an answer, and notes name existing tutorials."""

import copy
import re

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbconvert")

from docs import slides  # noqa: E402 - after the check that nbconvert is installed

NOTEBOOKS = sorted(slides.TUTORIALS.glob("*.ipynb"))
NOTES = sorted((slides.TUTORIALS / "notes").glob("*.md"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def tutorial(request):
    return request.param


@pytest.fixture
def notebook(tutorial):
    return nbformat.read(tutorial, as_version=4)


@pytest.fixture
def made(tutorial, notebook):
    return slides.slides(notebook, slides.Notes.load(slides.notes_of(tutorial)))


def test_every_tutorial_gives_slides_that_start_with_its_title_and_guesses(notebook, made):
    starts = [cell for cell in made.cells if cell.metadata.slideshow.slide_type == "slide"]
    titles = [cell.source.partition("\n")[0] for cell in starts]
    assert titles[0].replace("`", "") == f"# {slides.title_of(notebook)}"
    assert ("## Predict before you run" in titles) == ("**Predict before you run.**" in notebook.cells[0].source)
    assert "give your guesses" not in " ".join(cell.source for cell in starts)  # an audience has no sliders
    has_exercises = any("exercise" in cell.metadata.get("tags", []) for cell in notebook.cells)
    assert any(title.startswith(("## Exercise ", "## Rung ")) for title in titles) == has_exercises


def test_no_hidden_cell_is_shown(notebook, made):
    shown = {cell.source for cell in made.cells}
    for cell in notebook.cells:
        if "remove-cell" in cell.metadata.get("tags", []):
            assert cell.source not in shown
    assert not any("source_hidden" in str(cell.metadata) for cell in made.cells)


def test_a_slide_has_no_more_text_or_code_than_fits(made):
    for cell in made.cells:
        if cell.metadata.slideshow.slide_type != "notes":
            is_long = cell.cell_type == "code" and len(cell.source.splitlines()) > slides.LONGEST_CODE
            assert not is_long or cell.metadata.transient.remove_source
            assert cell.cell_type == "code" or len(cell.source) < 2 * slides.LONGEST_TEXT


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_notes_name_an_existing_tutorial_and_have_the_parts_that_every_tutorial_has(path):
    (tutorial,) = slides.TUTORIALS.glob(f"{path.stem}_*.ipynb")
    notes = slides.Notes.load(path)
    assert set(slides.PARTS) <= set(notes.by_heading)
    made = slides.slides(nbformat.read(tutorial, as_version=4), notes)
    shown = [cell.source for cell in made.cells if cell.metadata.slideshow.slide_type == "notes"]
    assert {notes.by_heading[part] for part in slides.PARTS} <= set(shown)


def test_outputs_are_those_of_an_executed_copy_with_the_same_cells(notebook, tmp_path):
    executed = copy.deepcopy(notebook)
    code = next(cell for cell in executed.cells if cell.cell_type == "code")
    code.outputs = [nbformat.v4.new_output("stream", text="printed")]
    path = tmp_path / "copy.ipynb"
    assert slides.with_outputs(notebook, path) == notebook
    nbformat.write(executed, path)
    assert slides.with_outputs(notebook, path) == executed
    code.source += "  # changed"
    nbformat.write(executed, path)
    assert slides.with_outputs(notebook, path) == notebook


def test_a_page_needs_no_network_contains_its_pictures_and_has_words_for_links_to_files():
    text = "# Title\n\n![a figure](../figures/overlap.png) and [a file](../README.md)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text)])
    html = slides.page(slides.slides(notebook, slides.Notes({})), "title")
    assert "data:image/png;base64" in html
    assert "and a file" in html
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=\"https?:", html)
    assert 'src="reveal/dist/reveal.js"' in html
    assert "<title>title slides</title>" in html
