"""Make slides of the executed tutorials in `out/slides`, by nbconvert: each text cell starts a slide."""

from pathlib import Path

import nbformat
from nbconvert.exporters import SlidesExporter
from traitlets.config import Config

ROOT = Path(__file__).parent.parent
LEFT_OUT = {"guess", "exercise"}
"""Tags of cells that no slide shows: controls, and places for the learner's answers."""


def main() -> None:
    """Write a page for each tutorial."""
    exporter = SlidesExporter(config=Config(SlidesExporter={"reveal_scroll": True}))
    folder = ROOT / "out" / "slides"
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((ROOT / "tutorials" / "executed").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            starts = "slide" if cell.cell_type == "markdown" else "-"
            skipped = LEFT_OUT & set(cell.metadata.get("tags", []))
            cell.metadata.slideshow = {"slide_type": "skip" if skipped else starts}
        (folder / f"{path.stem}.html").write_text(exporter.from_notebook_node(notebook)[0])
    print(f"slides are in {folder}")


if __name__ == "__main__":
    main()
