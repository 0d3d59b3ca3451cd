"""Make slides of the tutorials for a class: reveal.js pages with notes for the instructor, which need no network.

The structure of a notebook and the tags of its cells decide what becomes a slide. Question, guesses and each heading
start a slide; text, pictures and short code follow below it; exercises become slides without their solutions.
Controls and sliders are left out. The notes for the instructor come from `tutorials/notes/NN.md`.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal, NamedTuple

import nbformat
from nbconvert.exporters import SlidesExporter
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
TUTORIALS = ROOT / "tutorials"
EXECUTED = ROOT / "out" / "site" / "tree" / "tutorials"
"""Where `make site` leaves the executed tutorials."""
LEFT_OUT = {"guess", "remove-cell", "exercise"}
"""Tags of cells that no slide shows. An exercise is its text; its cell only has a place for the answer."""
LONGEST_CODE = 22
"""Lines of the longest code that a slide shows; of longer cells it shows the output only."""
LETTERS_OF_A_LINE = 90
"""Letters of text that fit on a line."""
HOUSEKEEPING = re.compile(r"^import |^pool\.close|^show\(|\bplt\.|\bax\b", re.MULTILINE)
"""Code that imports, ends ranks, draws or shows code."""
LONGEST_TEXT = 620
"""Characters of text on a slide; longer texts continue on the next."""

Kind = Literal["slide", "subslide", "-", "notes"]
Part = Literal["Start", "Guesses", "Exercises"]
PARTS: tuple[Part, ...] = ("Start", "Guesses", "Exercises")
"""Slides that every tutorial has, by the heading of their notes."""


class Notes(NamedTuple):
    """Notes for the instructor, as Markdown: by part, and of all other headings."""

    by_heading: dict[str, str]

    @classmethod
    def load(cls, path: Path) -> "Notes":
        """Read a file with one section for each heading. A tutorial without a file has no notes."""
        if not path.exists():
            return cls({})
        sections = re.split(r"^## +", path.read_text(), flags=re.MULTILINE)[1:]
        return cls(
            {head.strip(): body.strip() for head, _, body in (section.partition("\n") for section in sections)}
        )


def notes_of(tutorial: Path) -> Path:
    """The file with the notes of a tutorial, which need not exist."""
    return TUTORIALS / "notes" / f"{tutorial.stem[:2]}.md"


def slides(notebook: NotebookNode, notes: Notes) -> NotebookNode:
    """Return a notebook whose cells are the slides, with the metadata that nbconvert's exporter reads."""
    made = nbformat.v4.new_notebook(metadata=notebook.metadata)
    for cell in notebook.cells:
        tags = set(cell.metadata.get("tags", []))
        if cell.cell_type == "markdown":
            made.cells += _text_slides(_for_an_audience(cell.source), notes)
        elif not tags & LEFT_OUT:
            made.cells += _code_slide(
                cell, hides_code=bool(tags & {"guesses", "hide-input"}), room=_room_below(made.cells)
            )
    return made


def _text_slides(text: str, notes: Notes) -> Iterator[NotebookNode]:
    """Slides of one cell of text: a new one at each heading and exercise, and where the text becomes too long."""
    for title, body in _sections(text):
        kind: Kind = "slide" if title else "subslide"
        part = _part(title, body)
        for number, piece in enumerate(_pieces(body)):
            if piece.startswith("**Read next:**"):
                kind = "slide"
            shown = f"{title}\n\n{piece}".strip() if not number else piece
            yield _cell("markdown", shown, "subslide" if number else kind)
            if not number and part in notes.by_heading:
                yield _cell("markdown", notes.by_heading[part], "notes")


def _part(title: str, body: str) -> str:
    """The heading of a section's notes."""
    if title.startswith("# "):
        return "Start"
    if title == "## Predict before you run":
        return "Guesses"
    return title.removeprefix("## ") if body or title else ""


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Split text into titles, with their marks of headings, and bodies; the first title may be empty."""
    text = text.replace("## Exercises\n", "## Exercises\n\nAnswer alone first, then compare with your neighbour.\n")
    text = text.replace("**Predict before you run.**", "## Predict before you run\n\n")
    text = re.sub(r"^(\*\*\d+\.\*\*)", r"## Exercise \n\n\1", text, flags=re.MULTILINE)
    pieces = re.split(r"^(#{1,2} .*)$", text, flags=re.MULTILINE)
    if pieces[0].strip():
        yield "", pieces[0].strip()
    for title, body in zip(pieces[1::2], pieces[2::2], strict=True):
        number = re.match(r"\s*\*\*(\d+)\.\*\*", body)
        yield f"## Exercise {number[1]}" if number else title.strip(), body.strip()


def _pieces(body: str) -> list[str]:
    """Whole paragraphs that fit on one slide each; a paragraph that does not fit has its own."""
    pieces: list[str] = []
    for paragraph in re.split(r"\n\n+", body):
        if pieces and len(pieces[-1]) + len(paragraph) <= LONGEST_TEXT:
            pieces[-1] += f"\n\n{paragraph}"
        else:
            pieces.append(paragraph)
    return pieces


def _room_below(cells: Sequence[NotebookNode]) -> int:
    """Lines that still fit below the text of the last slide; none if it has code."""
    texts = [cell for cell in cells[-2:] if cell.metadata.slideshow.slide_type != "notes"]
    if not texts or texts[-1].cell_type == "code":
        return 0
    return LONGEST_CODE - len(texts[-1].source) // LETTERS_OF_A_LINE * 2 - 2


def _code_slide(cell: NotebookNode, *, hides_code: bool, room: int) -> Iterator[NotebookNode]:
    """A slide of code and what it printed, or more of the last slide if that has room; then one of each picture.

    Long code and the code of pictures are left out; a cell without code and outputs gives no slide.
    """
    lines = len(cell.source.splitlines())
    is_shown = lines <= LONGEST_CODE and not (hides_code or HOUSEKEEPING.search(cell.source))
    printed = [output for output in cell.outputs if output.output_type == "stream"]
    if is_shown or printed:
        height = (lines if is_shown else 0) + sum(len(str(output.text).splitlines()) for output in printed)
        yield _outputs(cell, printed, "-" if height <= room else "subslide", is_shown=is_shown)
    for output in cell.outputs:
        if output not in printed and not _is_long_code(output):
            yield _outputs(cell, [output], "subslide", is_shown=False)


def _is_long_code(output: NotebookNode) -> bool:
    """Whether a cell shows a class that is too long for a slide."""
    return len(output.get("data", {}).get("text/markdown", "").splitlines()) > LONGEST_CODE


def _outputs(cell: NotebookNode, outputs: Sequence[NotebookNode], kind: Kind, *, is_shown: bool) -> NotebookNode:
    """A cell with some of the outputs of another, and with its code if it is shown."""
    made = _cell("code", cell.source, kind)
    made.outputs = list(outputs)
    made.metadata["transient"] = {"remove_source": not is_shown}
    return made


def _for_an_audience(text: str) -> str:
    """Leave out how to fill in cells, and the targets of links to files, which are not beside the slides."""
    text = re.sub(
        r"((?:In|Run)\s+the\s+next\s+cell\b|^Replace `\.\.\.` by).*?\.\s*(?=\n\n|\Z)",
        "",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    return re.sub(r"(?<!!)\[([^\]]*)\]\((?!https?://)[^)]*\)", r"\1", text)


def _cell(cell_type: Literal["markdown", "code"], source: str, kind: Kind) -> NotebookNode:
    make = nbformat.v4.new_markdown_cell if cell_type == "markdown" else nbformat.v4.new_code_cell
    return make(source, metadata={"slideshow": {"slide_type": kind}})


def page(notebook: NotebookNode, title: str) -> str:
    """The slides as an HTML page with all pictures, which loads reveal.js from the folder `reveal` beside it."""
    exporter = SlidesExporter(
        extra_template_basedirs=[str(Path(__file__).parent)],
        template_name="slides_template",
        reveal_url_prefix="reveal",
        reveal_theme="white",
        mermaid_js_url="",
        embed_images=True,
    )
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    html, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": title, "path": str(TUTORIALS)}})
    return str(html)


def write(tutorials: Path, out: Path) -> list[Path]:
    """Write the slides of all notebooks in a folder, and reveal.js beside them; return the pages."""
    reveal = Path(str(files("sphinx_revealjs"))) / "_static" / "revealjs"
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(reveal / "dist", out / "reveal" / "dist", ignore=shutil.ignore_patterns("*.map", "*.esm.js"))
    shutil.copytree(reveal / "plugin" / "notes", out / "reveal" / "plugin" / "notes")
    shutil.copy(reveal / "LICENSE", out / "reveal")
    pages = []
    for path in sorted(tutorials.glob("*.ipynb")):
        notebook = with_outputs(nbformat.read(path, as_version=4), EXECUTED / path.name)
        made = slides(notebook, Notes.load(notes_of(path)))
        pages.append(out / f"{path.stem}.html")
        pages[-1].write_text(page(made, title_of(notebook)))
    return pages


def site_page(tutorials: Path) -> str:
    """A page of the site, in Markdown, that links to the slides; they lie in the site's folder `slides`."""
    items = [
        f'- <a href="../slides/{path.stem}.html">{title_of(nbformat.read(path, as_version=4))}</a>'
        for path in sorted(tutorials.glob("*.ipynb"))
    ]
    return "\n".join(
        [
            "# Slides",
            "",
            "Slides of the tutorials; press S for the instructor's notes. See [teaching](teaching.md).",
            "",
            *items,
            "",
        ]
    )


def with_outputs(notebook: NotebookNode, executed: Path) -> NotebookNode:
    """Return the executed copy of a notebook if there is one with the same cells, else the notebook."""
    if not executed.exists():
        return notebook
    copy = nbformat.read(executed, as_version=4)
    same = [cell.source for cell in copy.cells] == [cell.source for cell in notebook.cells]
    return copy if same else notebook


def title_of(notebook: NotebookNode) -> str:
    """The first heading."""
    return str(notebook.cells[0].source).partition("\n")[0].removeprefix("# ").replace("`", "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the slides, with the outputs of the last `make site` if the tutorial has not changed since."""
    options = argparse.ArgumentParser(prog="python -m docs.slides", description=__doc__)
    options.add_argument("--tutorials", type=Path, default=TUTORIALS, help="folder with notebooks, executed or not")
    options.add_argument("--out", type=Path, default=ROOT / "out" / "slides")
    chosen = options.parse_args(arguments)
    pages = write(chosen.tutorials, chosen.out)
    if not pages:
        sys.exit(f"{chosen.tutorials}: expected notebooks, found none")
    print(f"written: {len(pages)} presentations in {chosen.out}; press S in the browser for the instructor's notes")


if __name__ == "__main__":
    main()
