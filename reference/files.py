"""Writing files so that nothing is lost."""

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, and the folders it lies in; a crash leaves the old file or the new one, never a piece.

    Several processes may write the same path at the same time: the last one wins.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)
