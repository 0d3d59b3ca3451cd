"""Import of the modules that a user names: `--model MODULE:CALLABLE`, `ddplab conform MODULE:CLASS`."""

import os
import sys
from importlib import import_module
from types import ModuleType


def import_first_here(name: str) -> ModuleType:
    """Import a module that a user names; the working directory comes first, as with `python -m`.

    It comes first for this import only: a file `torch.py` there must not replace torch, which is imported as it is
    needed.

    Raises:
        ImportError: There is no such module.
    """
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        return import_module(name)
    finally:
        sys.path.remove(here)
