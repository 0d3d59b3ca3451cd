"""Import of the modules that a user names: `--model MODULE:CALLABLE`, `ddplab conform MODULE:CLASS`."""

import os
import sys
import sysconfig
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType

FOLDERS = (os.path.dirname(__file__), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
LIBRARIES = ("<frozen", *(os.path.join(folder, "") for folder in FOLDERS))
"""Beginnings of the names of files that are not the user's."""


def module_name(name: str) -> str:
    """Return the name of a module that a user names, perhaps by its file, as `models/mine.py`."""
    return ".".join(Path(name).with_suffix("").parts) if name.endswith(".py") else name


def import_first_here(name: str) -> ModuleType:
    """Import a module that a user names; the working directory comes first, as with `python -m`.

    It comes first for this import only: a file `torch.py` there must not replace torch, which is imported as it is
    needed. Afterwards it comes last, where modules of the user's import each other. Raises ImportError if there is no
    such module, or it raises an error or exits when it is imported.
    """
    here = os.getcwd()
    if (module := module_name(name)).startswith("."):
        raise ImportError(f"{name} is not below the working directory")
    sys.path.insert(0, here)
    try:
        return import_module(module)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:
        cure = "; put what it runs under `if __name__ == '__main__':`" if isinstance(error, SystemExit) else ""
        seen = f"{type(error).__name__}: {error}{place_of(error)}"
        raise ImportError(f"it raised {seen} when it was imported{cure}") from error
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)


def place_of(error: BaseException | None, function: object = None) -> str:
    """Return the user's line that raised an error, as `(mine.py, line 3)`; else that of `function`; else nothing."""
    calls = traceback.extract_tb(None if error is None else error.__traceback__)
    found = [(one.filename, one.lineno) for one in calls if not one.filename.startswith(LIBRARIES)]
    call = function if hasattr(function, "__code__") else type(function).__call__
    if not found and (code := getattr(call, "__code__", None)):  # it was called with wrong arguments, say
        found = [(code.co_filename, code.co_firstlineno)]
    return "".join(f" ({file.removeprefix(os.getcwd() + os.sep)}, line {line})" for file, line in found[-1:])
