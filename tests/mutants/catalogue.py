"""The catalogue of mutants, and a copy of the source tree with one of them."""

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CATALOGUE = Path(__file__).with_name("mutants.toml")
TREE = ("ddplab", "reference", "simulator", "tests")
"""Folders that a copy of the source tree has."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A fault of a few lines.

    Attributes:
        name: Its name.
        file: The file, from the repository's root.
        before: Text that occurs exactly once in the file.
        after: Text in its place.
        mistake: What a person might get wrong.
        needs: What catches it if the quick checks cannot: `--baseline`, or a test of this repository. Empty: nothing.
        source: Where it was published: issues or pull requests on GitHub, or "found here". Empty: nowhere.
        area: What it spoils; a section of `docs/bugs.md`. Empty without a source.
    """

    name: str
    file: str
    before: str
    after: str
    mistake: str
    needs: str = ""
    source: str = ""
    area: str = ""

    def apply(self, text: str) -> str:
        """Return the text of the file with the fault.

        Raises:
            ValueError: The text before occurs not exactly once.
        """
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: expected {self.before!r} once in {self.file}, found it {count} times")
        return text.replace(self.before, self.after)


def catalogue() -> list[Mutant]:
    """Return all mutants, in the order of the file."""
    return [Mutant(**entry) for entry in tomllib.loads(CATALOGUE.read_text())["mutant"]]


def copy_tree(folder: Path, mutant: Mutant | None = None) -> None:
    """Copy the source tree into a folder, with a fault; compiled files too, which are valid for unchanged files."""
    for name in TREE:
        shutil.copytree(ROOT / name, folder / name, symlinks=True)
    shutil.copy2(ROOT / "pyproject.toml", folder)
    if mutant is not None:
        path = folder / mutant.file
        path.write_text(mutant.apply(path.read_text()))
