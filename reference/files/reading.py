"""Reading files: size limits, unambiguous JSON and YAML, and one-line validation errors."""

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from io import BytesIO
from os import PathLike
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core.core_schema import CoreSchema, no_info_after_validator_function

from .writing import printable

LARGEST_BYTES, LARGEST_TEXT, LARGEST_YAML = 2**30, 2**26, 2**16
"""Largest file that is read, after decompression; largest file of text, as a log; largest YAML, in characters."""
LARGEST_RATIO, SMALL_BYTES = 50, 2**20
"""Most bytes that one byte of gzip may stand for, in a file that is not small; 21 in traces, 1,032 in a bomb."""
BYTES_PER_OBJECT, MOST_FIELDS, DEEPEST = 10, 1000, 50
"""In files that are not small, bytes for each object or list of JSON, of which real files have at least 30; fields of
an object; and depth. What is parsed, and the errors in it, then take memory in proportion to the file."""
SHORT = Repr()
"""Shows values in messages."""
SHORT.maxstring, SHORT.maxlong = 80, 40
GZIP_MAGIC = b"\x1f\x8b"
LINE_ENDS = re.compile("[\t\n\x0b-\r\x1c-\x1e\x85\u2028\u2029]")
R = TypeVar("R")


def in_one_line(text: str) -> str:
    """Escape what a terminal may not show and every end of a line, with which a name could forge lines of output."""
    return LINE_ENDS.sub(lambda match: ascii(match[0])[1:-1], printable(text))


def _guarded(node: Any, owner: type) -> Any:
    """Return a part of a class's core schema in which texts are in one line, and lists have one error at most.

    An error takes a kilobyte. Other classes in it have been guarded.
    """
    if isinstance(node, list):
        return [_guarded(part, owner) for part in node]
    if not isinstance(node, dict) or node.get("cls", owner) is not owner:
        return node
    node = {name: _guarded(part, owner) for name, part in node.items()}
    if node.get("type") in ("list", "tuple", "set"):
        node["fail_fast"] = True
    return no_info_after_validator_function(in_one_line, node) if node.get("type") == "str" else node


class Schema(BaseModel):
    """Base of all records: flat, typed and immutable; unknown fields are errors; no text or error has two lines."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    if not TYPE_CHECKING:  # fields keep their types

        def __init__(self, /, **fields: Any) -> None:
            with one_line_errors():
                super().__init__(**fields)

        __init__.__pydantic_base_init__ = True  # files are read without it, so all their errors have a place

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _guarded(handler(source), cls)  # type: ignore[no-any-return]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Around code that constructs schemas, or as a decorator: errors of pydantic become a ValueError of one line."""
    try:
        yield
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def read_schema(
    kind: type[R], path: str | PathLike[str], *, what: str, cure: str = "", mistaken: tuple[bytes, str] | None = None
) -> R:
    """Read a JSON file.

    Args:
        kind: The schema of the file, or a dataclass.
        path: The file.
        what: Noun phrase for this kind of file in messages, such as "a fabric".
        cure: Advice that is appended to messages.
        mistaken: Bytes that occur in another kind of file, which users confuse with this one, and the message then.

    Raises:
        ValueError: The file is missing, not JSON or inconsistent; one line, which names file, field and reason.
    """
    advice = f"; {cure}" if cure else ""
    try:
        data = read_bytes(path)
    except ValueError as error:
        raise ValueError(f"{error}{advice}") from None
    try:
        parse_json(data)  # refuses what pydantic accepts silently
        with one_line_errors():
            return TypeAdapter(kind).validate_json(data)
    except ValueError as error:
        if mistaken and mistaken[0] in data:
            raise ValueError(f"{path}: {mistaken[1]}") from None
        raise ValueError(f"{path}: not {what}: {error}{advice}") from None


def parse_json(data: str | bytes) -> Any:
    """Parse JSON; refuse repeated fields, of which parsers silently keep the last.

    Raises:
        ValueError: The text is not JSON, has a repeated field, or more objects, fields or depth than real files have.
    """
    marks = ("{", "[") if isinstance(data, str) else (b"{", b"[")
    most = max(SMALL_BYTES, len(data)) // BYTES_PER_OBJECT
    if (seen := sum(map(data.count, marks))) > most:  # type: ignore[arg-type]
        raise ValueError(f"expected at most {most} objects and lists in {len(data)} bytes, got {seen}")
    try:
        return json.loads(data, object_pairs_hook=_without_repetition)
    except json.JSONDecodeError as error:
        raise json.JSONDecodeError(f"invalid JSON: {error.msg}", error.doc, error.pos) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_yaml(text: str) -> Any:
    """Parse YAML by the core schema of YAML 1.2, without what could mean two things.

    `1:30` and `yes` are text, where YAML 1.1 has 90 and true. Numbers with leading zeros, octal in YAML 1.1, are text
    too. Repeated fields, tags and aliases are refused; aliases could expand a short file into a huge one. Raises
    ValueError, in one line, if the text is not YAML, too large or nested too deeply, or has a refused feature.
    """
    if len(text) > LARGEST_YAML:
        raise ValueError(f"expected at most {LARGEST_YAML} characters of YAML, got {len(text)}")
    try:
        depth = 0
        for event in yaml.parse(text, _CoreLoader):
            where = _line(event.start_mark)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise RecursionError
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"{where}: expected no alias, got *{event.anchor}; write the value again")
            if tag := getattr(event, "tag", None):
                raise ValueError(f"{where}: expected no tag, got {in_one_line(tag)}")
        return yaml.load(text, _CoreLoader)  # a subclass of SafeLoader
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        where = _line(error.problem_mark or error.context_mark)
        raise ValueError(f"{where}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def read_text(path: str | PathLike[str]) -> str:
    """Read a file of text in UTF-8, with or without a byte-order mark, gzipped or not.

    Raises:
        ValueError: The file cannot be read, is too large or is not such text; the message names the file.
    """
    try:
        return read_bytes(path, LARGEST_TEXT).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, got {error}") from None


def read_bytes(path: str | PathLike[str], largest: int = LARGEST_BYTES) -> bytes:
    """Read a file of at most `largest` bytes, gzipped or not; a byte-order mark is left out.

    Raises:
        ValueError: The file cannot be read, is too large, or is truncated or corrupt; the message names the file.
    """
    try:
        with Path(path).open("rb") as file:
            data = _read(file, largest + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    if data.startswith(GZIP_MAGIC):
        most = max(SMALL_BYTES, LARGEST_RATIO * len(data))
        try:
            with gzip.GzipFile(fileobj=BytesIO(data)) as packed:
                data = _read(packed, min(largest, most) + 1)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}: truncated or corrupt gzip data: {error}; copy or write it again") from None
        if len(data) > most:
            expected = f"expected at most {LARGEST_RATIO} bytes of content for each of gzip, got more"
            raise ValueError(f"{path}: {expected}; unpack it with gunzip if you know where it comes from")
    if len(data) > largest:
        raise ValueError(f"{path}: expected at most {largest >> 20} MiB of content, got more")
    return data.removeprefix(b"\xef\xbb\xbf")


def _read(file: BinaryIO | gzip.GzipFile, most: int) -> bytes:
    """Read at most so many bytes; `file.read(most)` would take the memory for all of them at once."""
    pieces = []
    while most and (piece := file.read(min(most, SMALL_BYTES))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)


def first_problem(error: ValidationError) -> str:
    """The first problem that pydantic found, in one line: the field, then the reason."""
    first = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    reason = first["msg"].removeprefix("Value error, ").replace("valid tuple", "list, [...]")
    if reason.startswith("Input should") and len(seen := SHORT.repr(first["input"])) <= 90:
        reason += f", got {seen}"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return in_one_line((f"{field}: " if field else "") + reason[:1].lower() + reason[1:] + more)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{in_one_line(name)}: the field occurs twice")
    if len(found) > MOST_FIELDS:
        raise ValueError(f"expected objects of at most {MOST_FIELDS} fields, got one of {len(found)}")
    return found


def _line(mark: Any) -> str:
    return f"line {mark.line + 1}" if mark else "somewhere"


if TYPE_CHECKING:
    from yaml import SafeLoader as _Loader
else:
    # The parser in C is ten times as fast; PyYAML may have been built without it.
    _Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _CoreLoader(_Loader):
    """Resolves only null, booleans and decimal numbers; rejects fields that occur twice."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  # those of YAML 1.1 do not apply

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:  # noqa: FBT001, FBT002  # the signature is PyYAML's
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # which is refused below
            if key in seen:  # `4` and `+4` too
                problem = f"{in_one_line(str(key))} occurs twice"
                raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


for tag, pattern, first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9]\d*)", list("-+0123456789")),
    ("float", r"[-+]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?", list("-+.0123456789")),
):
    _CoreLoader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$", re.ASCII), first)
