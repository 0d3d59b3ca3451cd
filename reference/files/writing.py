"""Writing: complete files, outputs that replace no input, and printable text."""

import os
import re
import secrets
import stat
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

NOT_PRINTABLE = re.compile("[^\t\n -~\xa0-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 or UTF-8 cannot encode, and characters that control a terminal or the direction of text."""
STANDARD_OUTPUT = 1
"""Number of the open file that is the standard output."""


def milliseconds(ns: float, form: str = ".1f") -> str:
    """Return nanoseconds as text in milliseconds, without the unit."""
    return f"{ns / 1e6:{form}}"


def printable(text: str) -> str:
    r"""Replace each character that a file or a terminal may not show by its Python escape, such as `\x1b`."""
    return NOT_PRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file and make its folders; a crash leaves either the old file or the new one, never a partial file.

    A symbolic link is followed, and a file keeps its owner and mode. A file with several hard links, and what is no
    regular file (a device, a FIFO, /dev/fd/3, `-` for the standard output), is written in place.

    Several processes and threads may write the same path at the same time; the last write remains. If the file cannot
    be written, an OSError names the path and the reason.
    """
    path = Path(path)
    check_writable(path)
    try:
        number = open_descriptor(path)
        target = Path(os.path.realpath(path))
        if number is not None:
            sys.stdout.flush()
            with open(number, "wb", closefd=False) as file:
                file.write(data)
        elif target.exists() and (target.stat().st_nlink > 1 or not target.is_file()):
            target.write_bytes(data)
        else:
            _replace(target, data)
    except OSError as error:
        raise OSError(f"{path}: cannot be written: {error.strerror or error}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise OSError if a file cannot be written; call this before an expensive computation of its content."""
    path = Path(path)
    if open_descriptor(path) is not None:
        return
    target = Path(os.path.realpath(path))
    folder = next(parent for parent in target.parents if parent.exists())
    if target.is_dir():
        reason = "it is a folder; name a file"
    elif target.exists() and not (os.access(target, os.W_OK) and target.stat().st_mode & 0o222):
        reason = "it is read-only"  # for root too, whom the system lets write it
    elif not folder.is_dir():
        reason = f"{folder} is not a folder"
    elif not os.access(folder, os.W_OK) and not (target.exists() and not target.is_file()):
        reason = f"no permission in {folder}"
    else:
        return
    raise OSError(f"{path}: cannot be written: {reason}")


def check_distinct(outputs: Iterable[Path], inputs: Collection[Path]) -> None:
    """Raise ValueError if an output would overwrite an input or another output; devices may be named twice."""
    outputs = [path for path in outputs if open_descriptor(path) is None and (path.is_file() or not path.exists())]
    for number, path in enumerate(outputs):
        for others, role in ((inputs, "an input"), (outputs[:number], "another output")):
            linked = (one for one in others if path.exists() and one.exists() and path.samefile(one))
            if os.path.realpath(path) in map(os.path.realpath, others) or any(linked):
                raise ValueError(f"{path}: expected a name for an output, got that of {role}; choose another name")


def open_descriptor(path: Path) -> int | None:
    """The number of the open file that a path stands for, such as 1 for `-` and /dev/stdout; None for other paths.

    To open the path of a redirected output anew would overwrite what has been written before.
    """
    name = {"-": "/dev/fd/1", "/dev/stdout": "/dev/fd/1", "/dev/stderr": "/dev/fd/2"}.get(str(path), str(path))
    match = re.fullmatch(r"/(?:dev|proc/self)/fd/(\d+)", name)
    return int(match[1]) if match else None


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            file.write(data)
        if path.exists():
            before = path.stat()
            with suppress(PermissionError):
                os.chown(part, before.st_uid, before.st_gid)
            part.chmod(stat.S_IMODE(before.st_mode))
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
