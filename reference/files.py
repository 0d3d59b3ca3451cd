"""Files: immutable pydantic schemas, JSON files with one-line validation errors, and atomic writes."""

import os
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError


class Schema(BaseModel):
    """Base of all file formats: flat, typed and immutable; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Settings(Schema):
    """A schema that users construct themselves; an invalid field is a one-line ValueError that names it."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from None


R = TypeVar("R", bound=Schema)


def validated(kind: type[R], /, **fields: object) -> R:
    """Construct a schema from fields.

    Raises:
        ValueError: A field is invalid; one line, which names the first such field.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def read_schema(kind: type[R], path: str | os.PathLike[str], *, what: str, cure: str = "") -> R:
    """Read a JSON file.

    Args:
        kind: The schema of the file.
        path: The file.
        what: Noun phrase for this kind of file in messages, such as "a fabric".
        cure: Advice that is appended to messages.

    Raises:
        ValueError: The file is missing, not JSON or inconsistent; one line, which names file, field and reason.
    """
    advice = f"; {cure}" if cure else ""
    try:
        return kind.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}{advice}") from None
    except ValidationError as error:
        raise ValueError(f"{path}: not {what}: {first_problem(error)}{advice}") from None


def first_problem(error: ValidationError) -> str:
    """The first problem that pydantic found, in one line: the field, then the reason."""
    first = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    reason = first["msg"].removeprefix("Value error, ")
    if reason.startswith("Input should") and isinstance(first["input"], str | int | float | None):
        reason += f", got {first['input']!r}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return (f"{field}: " if field else "") + reason[:1].lower() + reason[1:] + more


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file and make its folders; a crash leaves either the old file or the new one, never a partial file.

    Several processes may write the same path at the same time; the last write remains.

    Raises:
        OSError: The file cannot be written; the message names the path and the reason.
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
    """Check that a file can be written; call this before an expensive computation of its content.

    Raises:
        OSError: The path is a folder, or no file can be made there.
    """
    path = Path(path)
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir():
        raise OSError(f"{path}: cannot be written: it is a folder; name a file")
    if not folder.is_dir():
        raise OSError(f"{path}: cannot be written: {folder} is not a folder")
    if not os.access(folder, os.W_OK):
        raise OSError(f"{path}: cannot be written: no permission in {folder}")
