"""Writing files so that nothing is lost."""

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, and the folders it lies in; a crash leaves the old file or the new one, never a piece.

    Several processes may write the same path at the same time: the last one wins.

    Raises:
        OSError: It cannot be written; the message names the path and the reason.
    """
    path = Path(path)
    check_writable(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written: {error.strerror or error}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Find out before the work is done that its result could not be written.

    Raises:
        OSError: The path is a folder, or lies where no file can be made.
    """
    path = Path(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise OSError(f"{path}: cannot be written: it is a folder; name a file")
    if not folder.is_dir():
        raise OSError(f"{path}: cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise OSError(f"{path}: cannot be written: no permission in {folder}")
