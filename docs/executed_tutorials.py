"""Publish executed tutorials in the repository, for `python -m docs --publish`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EXECUTED = "tutorials/executed"
"""Folder of the published tutorials in the repository; the site shows executed ones in `tutorials`."""
HIDDEN = "remove-cell"
"""Tag of cells that no page shows."""


def publish(tutorials: Path, folder: Path) -> None:
    """Write executed tutorials to a folder: cells as `shown` returns them."""
    folder.mkdir(exist_ok=True)
    for path in sorted(tutorials.glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        notebook["cells"] = shown(notebook["cells"])
        (folder / path.name).write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


def shown(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the visible cells without execution times, with links that fit a folder one level deeper."""
    return [
        dict(cell)
        | {
            "metadata": {name: value for name, value in cell["metadata"].items() if name != "execution"},
            "source": [line.replace("](../", "](../../") for line in cell["source"]],
        }
        for cell in cells
        if HIDDEN not in cell["metadata"].get("tags", [])
    ]
