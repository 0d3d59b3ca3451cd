"""The map of the code, a page of the site: the first docstring line of each file."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("ddplab", "reference", "simulator", "validation", "tutorials", "figures", "benchmarks", "docs")
INTRODUCTION = """\
# Map of the code

[DESIGN.md](../DESIGN.md#layers) has the layers. Read `reference/minimal.py`, `reference/reducer.py` and
`simulator/engines/event_replay.py` first.

"""


def site_page() -> str:
    """The page `docs/code_map.md` of the site: all files with their first docstring lines, grouped by folder."""
    return INTRODUCTION + "\n".join(_folder(folder) for package in PACKAGES for folder in _folders(ROOT / package))


def _folders(package: Path) -> list[Path]:
    return [package, *sorted(path.parent for path in package.glob("*/__init__.py"))]


def _folder(folder: Path) -> str:
    name = folder.relative_to(ROOT).as_posix()
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    lines = [f"- [`{path.name}`](../{name}/{path.name}): {_first_line(path)}" for path in files]
    return "\n".join([f"**`{name}/`** {_first_line(folder / '__init__.py')}\n", *lines, ""])


def _first_line(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} has no docstring"
    return docstring.partition("\n")[0]
