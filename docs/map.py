"""The map of the code: the first docstring line of each file. `python -m docs.map` writes it into code_map.md."""

import ast
from pathlib import Path

from reference.files.writing import write_atomically

ROOT = Path(__file__).parent.parent
PACKAGES = ("ddplab", "reference", "simulator", "validation", "tutorials", "figures", "benchmarks", "docs")
PAGE = ROOT / "docs" / "code_map.md"
BEGIN, END = "<!-- map: python -m docs.map -->", "<!-- end of map -->"


def code_map() -> str:
    """Markdown list of all files with their first docstring lines, grouped by folder; links from `docs/`."""
    return "\n".join(_folder(folder) for package in PACKAGES for folder in _folders(ROOT / package))


def with_map(page: str) -> str:
    """Return the page with the current map between its two markers.

    Raises:
        ValueError: The page has no markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"docs/code_map.md: expected the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{code_map()}\n{END}{after}"


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


def main() -> None:
    """Write the map into its page."""
    write_atomically(PAGE, with_map(PAGE.read_text()).encode())


if __name__ == "__main__":
    main()
