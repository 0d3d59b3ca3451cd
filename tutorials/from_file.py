"""Runs rank functions of files that a notebook writes, because a spawned process cannot import from a notebook."""

import runpy
from typing import Any


def call(rank: int, world_size: int, path: str, name: str, *args: Any) -> Any:
    """Call the function `name` of a Python file as a rank function.

    The file is read at each call, so ranks that already run see its latest version. Results must not contain objects
    of classes that the file defines, because the notebook could not unpickle them.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        path: The file, relative to the folder of the notebook.
        name: Name of the function.
        args: Further arguments of the function.
    """
    return runpy.run_path(path)[name](rank, world_size, *args)
