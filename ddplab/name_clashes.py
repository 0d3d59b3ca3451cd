"""Packages and modules of the user's that have the name of one of ours, `reference` or `simulator`.

Python imports the one that comes first in `sys.path` and does not report the others.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

NAMES = ("reference", "simulator")
"""Packages that ddplab installs beside its own."""
HOME = Path(__file__).resolve().parent.parent
"""Folder of the three packages."""


def import_first_here(name: str) -> ModuleType:
    """Import a module that a user names; the working directory comes first, as with `python -m`.

    It comes first for this import only: a folder `reference` or a file `torch.py` there must not replace the modules
    of this project or torch, which are imported as they are needed.

    Raises:
        ImportError: There is no such module.
    """
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return import_module(name)
    finally:
        sys.path.remove(here)


def check_own_packages() -> None:
    """Check that Python finds our packages under their names; imports neither of them.

    Raises:
        ImportError: Python finds another package or module first.
    """
    for name in NAMES:
        with suppress(ValueError):  # a module without a spec was put into `sys.modules` by hand, as in a test
            spec = find_spec(name)
            found = None if spec is None else (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
            if found is not None and not _is_ours(Path(found)):
                raise ImportError(
                    f"expected ddplab's package {name} in {HOME}, but Python imports {found} under this name; run "
                    "the command `ddplab` instead of `python -m ddplab`, or rename the other one"
                )


def hidden_by_ours() -> list[str]:
    """One line for each package or module of the user's that ours hides: `import reference` imports ours."""
    entries = [Path(entry or os.curdir).resolve() for entry in (os.getcwd(), *sys.path)]
    return [
        f"expected no other package or module named {name}, got {one}, which ddplab's package hides: "
        f"`import {name}` imports {HOME / name}; rename the one that is yours"
        for name in NAMES
        for entry in dict.fromkeys(entries)
        for one in _in_folder(entry, name)
    ]


def _is_ours(file: Path) -> bool:
    """Whether a file is of ddplab: of the copy that runs, or of another clone."""
    folder = file.resolve().parent
    return folder == HOME or HOME in folder.parents or (folder.parent / "ddplab" / "command.py").exists()


def _in_folder(entry: Path, name: str) -> Iterator[Path]:
    """What `import name` would find in a folder of `sys.path`, unless it is ours."""
    package, module = entry / name, entry / f"{name}.py"
    if module.is_file():
        yield module
    if next(package.glob("*.py"), None) is not None and not _is_ours(package / "__init__.py"):
        yield package
