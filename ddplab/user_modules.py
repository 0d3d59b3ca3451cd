"""Import of the modules that a user names: `--model MODULE:CALLABLE`, `ddplab conform MODULE:CLASS`."""

import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from types import ModuleType


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
        place = traceback.extract_tb(error.__traceback__)[-1]
        cure = "; put what it runs under `if __name__ == '__main__':`" if isinstance(error, SystemExit) else ""
        where = "" if isinstance(error, SyntaxError) else f" ({place.filename}, line {place.lineno})"  # it says where
        seen = f"{type(error).__name__}: {error}{where}"
        raise ImportError(f"it raised {seen} when it was imported{cure}") from error
    finally:
        sys.path.remove(here)
        if here not in sys.path:
            sys.path.append(here)
