"""Executed tutorials as readers of the repository see them: `python -m docs --publish` writes them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXECUTED = "tutorials/executed"
"""Folder of the executed tutorials, for readers of the repository; the site has executed ones in their own place."""
HIDDEN = "remove-cell"
"""Tag of cells that no page shows."""


def publish(tutorials: Path, folder: Path) -> None:
    """Write executed tutorials without hidden cells, and with links that are right in the folder."""
    folder.mkdir(exist_ok=True)
    for path in sorted(tutorials.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        notebook["cells"] = shown(notebook["cells"])
        (folder / path.name).write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def shown(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the cells that a page shows, without their times of execution, for a folder that is one level deeper."""
    return [
        dict(cell)
        | {
            "metadata": {name: value for name, value in cell["metadata"].items() if name != "execution"},
            "source": [line.replace("](../", "](../../") for line in cell["source"]],
        }
        for cell in cells
        if HIDDEN not in cell["metadata"].get("tags", [])
    ]
