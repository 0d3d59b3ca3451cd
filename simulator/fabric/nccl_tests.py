"""Reads all-reduce times by message size from logs of nccl-tests' `all_reduce_perf`.

A log lists the ranks, one line each (`#  Rank  3 Group ...`), and then has one row per message size: size, count,
type, redop and root, then the time in microseconds, the algorithm and bus bandwidth in GB/s and the number of wrong
elements, first out of place, then in place. Launchers put prefixes before lines, and NCCL's messages may share a line
with a row, so a row may begin anywhere in a line. Other lines are skipped. A damaged row or rank line is an error,
because skipping the line would silently change the measured table; so are rows of another collective, whose bus
bandwidth is another multiple of the algorithm bandwidth, and rows with wrong elements.
"""

import os
import re
from math import inf
from typing import NamedTuple

from reference.files.reading import read_text

from .algorithms import sent_share

TYPE_BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int", "int32", "uint32", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}
"""Element size by the type name that nccl-tests prints; the size of rows of other types is not checked."""
REDOPS = "sum|prod|max|min|avg|mulsum|none"
DECIMAL = r"\d{1,15}(?:\.\d{1,15})?"

RANK = re.compile(r"#\s+Rank\s+(\d{1,9})\s")
LOOKS_LIKE_A_RANK = re.compile(r"^\W*Rank\b.*\b(Pid|device)\b|\bPid\b.*\bdevice\b")
TIMES = rf"(?P<us>{DECIMAL})\s+(?P<algbw>{DECIMAL})\s+(?P<busbw>{DECIMAL})(?:\s+(?P<wrong>\S+))?"
ROW = re.compile(
    rf"(?<![\w.+-])(?P<size>\d{{1,18}})\s+(?P<count>\d{{1,18}})\s+(?P<type>\S+)\s+(?P<redop>{REDOPS})\s+(?P<root>-?\d+)"
    rf"\s+{TIMES}(?:\s+{DECIMAL}\s+{DECIMAL}\s+{DECIMAL}\s+(?P<wrong_in_place>\S+))?(?:\s|$)"
)
BEGINS_LIKE_A_ROW = re.compile(rf"^\s*\d+\s+\d+\s+(({'|'.join(TYPE_BYTES)})\s|\S+\s+({REDOPS})\s)")
HAS_A_ROW = re.compile(rf"(?<![\w.])\d+\s+\d+\s+(?:{'|'.join(TYPE_BYTES)})\s+(?:{REDOPS})\b")
COUNT = re.compile(r"\d+|\d(?:\.\d+)?e\+\d+")
"""A number of elements as C prints it with %g; an error of old versions, such as 2e-07, is none."""
NUMBER = re.compile(r"-?\d+(\.\d+)?")

ADVICE = "give the whole output of all_reduce_perf"


class LogRow(NamedTuple):
    """A row of all-reduce times; bandwidths in GB/s as they are printed."""

    size_bytes: int
    ns: int
    algbw: str
    busbw: str


def read_log(path: str | os.PathLike[str]) -> list[tuple[int, int, int]]:
    """Read the out-of-place times of all sums in a log, as rows `(world_size, size_bytes, ns)`.

    Raises:
        ValueError: The file cannot be read, has no rank or no row of a sum, or has a damaged line or a row of another
            collective. The message is one line that names the file and the number of the line.
    """
    lines = read_text(path).split("\n")
    world_sizes: list[int] = []  # one entry per list of ranks; a log of several runs has several lists
    rows: dict[int, LogRow] = {}  # by number of the line
    for number, line in enumerate(lines, start=1):
        try:
            if (rank := _rank(line)) is not None:
                if rank == 0:
                    world_sizes.append(0)
                if not world_sizes or rank != world_sizes[-1]:
                    raise ValueError(_damage(f"rank {world_sizes[-1] if world_sizes else 0} next", line))
                world_sizes[-1] += 1
            elif (row := _row(line)) is not None:
                rows[number] = row
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
    if not world_sizes:
        raise ValueError(f"{path}: expected a line `#  Rank  0 ...` for every rank, found none; {ADVICE}")
    if not rows:
        raise ValueError(f"{path}: expected rows of all-reduce times (redop sum), found none; {ADVICE}")
    if len(set(world_sizes)) > 1:
        raise ValueError(
            f"{path}: expected runs of one world size, got runs of {' and '.join(map(str, world_sizes))} ranks; "
            "use a separate log for each"
        )
    world_size = world_sizes[0]
    for number, row in rows.items():
        if not _is_bus_bandwidth_of_all_reduce(row, world_size):
            raise ValueError(
                f"{path}:{number}: expected a busbw of {sent_share(world_size):.4g} times algbw, as of an "
                f"all-reduce on {world_size} ranks, got {row.busbw} and {row.algbw}; give a log of all_reduce_perf "
                "with all its ranks"
            )
    return [(world_size, row.size_bytes, row.ns) for row in rows.values()]


def _rank(line: str) -> int | None:
    """Return the rank that a line lists; None if it lists none."""
    if match := RANK.search(line):
        return int(match[1])
    if LOOKS_LIKE_A_RANK.search(line):
        raise ValueError(_damage("a line `#  Rank  0 Group  0 Pid ...`", line))
    return None


def _row(line: str) -> LogRow | None:
    """Return the row in a line; None if the line has no row, or not of a sum."""
    match = ROW.search(line.partition("#")[0])
    if match is None:
        if _looks_like_a_row(line):
            raise ValueError(_damage("a row `size count type redop root time algbw busbw ...`", line))
        return None
    if HAS_A_ROW.search(line, match.end()):
        raise ValueError(_damage("one row on a line", line))
    size_bytes, width = int(match["size"]), TYPE_BYTES.get(match["type"])
    if width is not None and size_bytes != width * int(match["count"]):
        raise ValueError(_damage(f"a size of {width} bytes times count, for elements of {match['type']}", line))
    if not _is_consistent(size_bytes, match["us"], match["algbw"]):
        raise ValueError(_damage("an algbw in GB/s that is the size divided by the time in microseconds", line))
    if match["root"] != "-1":
        raise ValueError(_damage("the root -1 of an all-reduce", line))
    for wrong in (match["wrong"], match["wrong_in_place"]):
        if wrong is not None and COUNT.fullmatch(wrong) and float(wrong):
            raise ValueError(_damage("no wrong elements", line))
    if match["redop"] != "sum":
        return None
    return LogRow(size_bytes, round(float(match["us"]) * 1000), match["algbw"], match["busbw"])


def _looks_like_a_row(line: str) -> bool:
    """Whether a line without a valid row contains the beginning of a row, or consists mostly of numbers."""
    if line.lstrip().startswith("#"):
        return False
    words = line.split()
    numbers = sum(NUMBER.fullmatch(word) is not None for word in words)
    mostly_numbers = len(words) >= 8 and 2 * numbers > len(words) and "NCCL" not in line
    return mostly_numbers or bool(BEGINS_LIKE_A_ROW.match(line) or HAS_A_ROW.search(line))


def _is_consistent(size_bytes: int, us: str, algbw: str) -> bool:
    """Whether size / time is the algorithm bandwidth, within the rounding of the printed numbers."""
    time, half_us = float(us), _half_of_last_digit(us)
    least = size_bytes / (time + half_us) / 1e3
    most = size_bytes / (time - half_us) / 1e3 if time > half_us else inf
    slack = 1e-6 + _half_of_last_digit(algbw)
    return least - slack <= float(algbw) <= most + slack


def _is_bus_bandwidth_of_all_reduce(row: LogRow, world_size: int) -> bool:
    """Whether bus and algorithm bandwidth have the ratio of an all-reduce, within the rounding of the numbers."""
    ratio = sent_share(world_size)
    rounding = ratio * _half_of_last_digit(row.algbw) + _half_of_last_digit(row.busbw) + 1e-6
    return abs(float(row.busbw) - ratio * float(row.algbw)) <= rounding


def _half_of_last_digit(number: str) -> float:
    return 0.5 / 10.0 ** len(number.partition(".")[2])


def _damage(expected: str, line: str) -> str:
    seen = " ".join(line.split())
    return f"expected {expected}, got {seen if len(seen) <= 80 else seen[:77] + '...'!r}; {ADVICE}"
