"""Reads all-reduce times by message size from logs of `all_reduce_perf`, a program of nccl-tests and rccl-tests.

A log has one or more runs. A run lists its ranks, one line each (`#  Rank  3 Group ...`), and then has one row per
message size: size, count, type, redop and root (not in old versions), then the time in microseconds, the algorithm
and bus bandwidth in GB/s and the number of wrong elements, first out of place, then in place. Where the ranks are not
listed, their number follows from the ratio of the bandwidths. Launchers put prefixes before lines, and messages of
the library may share a line with a row, so a row may begin anywhere in a line. Lines may occur twice. Other lines are
skipped. A damaged row or rank line is an error, because skipping the line would silently change the measured table;
so are rows of another collective, whose bus bandwidth is another multiple of the algorithm bandwidth, and rows with
wrong elements.
"""

import os
import re
from collections.abc import Collection
from math import ceil, floor, inf
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

STARTS = re.compile(r"#\s+nThread\b")
"""The first line of a run."""
NAMES_COLUMNS = re.compile(r"#\s+size\s+count\s+type\b")
RANK = re.compile(r"#\s+Rank\s+(\d{1,9})\s")
LOOKS_LIKE_A_RANK = re.compile(r"^\W*Rank\b.*\b(Pid|device)\b|\bPid\b.*\bdevice\b")
BANDWIDTH = r"\d{1,15}\.\d{1,15}"
TIMES = rf"(?P<us>{DECIMAL})\s+(?P<algbw>{BANDWIDTH})\s+(?P<busbw>{BANDWIDTH})(?:\s+(?P<wrong>\S+))?"
ROW = re.compile(
    rf"(?<![\w.+-])(?P<size>\d{{1,18}})\s+(?P<count>\d{{1,18}})\s+(?P<type>\S+)\s+(?P<redop>{REDOPS})"
    rf"(?:\s+(?P<root>-?\d+))?\s+{TIMES}(?:\s+{DECIMAL}\s+{DECIMAL}\s+{DECIMAL}\s+(?P<wrong_in_place>\S+))?(?:\s|$)"
)
BEGINS_LIKE_A_ROW = re.compile(rf"^\s*\d+\s+\d+\s+(({'|'.join(TYPE_BYTES)})\s|\S+\s+({REDOPS})\s)")
HAS_A_ROW = re.compile(rf"(?<![\w.])\d+\s+\d+\s+(?:{'|'.join(TYPE_BYTES)})\s+(?:{REDOPS})\b")
COUNT = re.compile(r"\d+|\d(?:\.\d+)?e\+\d+")
"""A number of elements as C prints it with %g; an error of old versions, such as 2e-07, is none."""
NUMBER = re.compile(r"-?\d+(\.\d+)?")

ADVICE = "give the whole output of all_reduce_perf"
RANKS_AND_LOG = re.compile(r"([1-9]\d{0,5}):(.+)", re.DOTALL)


class LogRow(NamedTuple):
    """A row of all-reduce times; bandwidths in GB/s as they are printed."""

    size_bytes: int
    ns: int
    algbw: str
    busbw: str


class Run(NamedTuple):
    """A run of `all_reduce_perf` on one number of ranks."""

    ranks: list[int]  # listed ones, in ascending order; empty if the log has no list
    rows: dict[int, LogRow]  # by number of the line

    def world_size(self, given: int | None) -> int:
        """Return the number of ranks; `given` is the user's."""
        listed = len(self.ranks)
        if given and listed and given != listed:
            raise ValueError(f"expected {given} ranks, as given, got a list of {listed} ranks; leave {given}: out")
        return given or listed or _world_size_of(self.rows.values())


def ranks_and_log(path: str | os.PathLike[str]) -> tuple[int | None, str]:
    """Split `40:file.log`, a number of ranks and a log; the number is None for a path without it."""
    match = RANKS_AND_LOG.fullmatch(os.fspath(path))
    return (int(match[1]), match[2]) if match else (None, os.fspath(path))


def read_log(path: str | os.PathLike[str]) -> list[tuple[int, int, int]]:
    """Read the out-of-place times of all sums in a log, as rows `(world_size, size_bytes, ns)`.

    Args:
        path: The log, or `40:file.log` for a log of runs on 40 ranks.

    Raises:
        ValueError: The file cannot be read, has no row of a sum, does not show the number of ranks, or has a damaged
            line or a row of another collective. The message is one line that names the file and, for a line, its
            number.
    """
    given, log = ranks_and_log(path)
    runs = [Run([], {})]
    for number, line in enumerate(read_text(log).split("\n"), start=1):
        try:
            rank = _rank(line)
            if STARTS.search(line) or (runs[-1].rows and (rank == 0 or NAMES_COLUMNS.search(line))):
                runs.append(Run([], {}))
            run = runs[-1]
            if rank is not None:
                if rank > len(run.ranks):
                    raise ValueError(_damage(f"rank {len(run.ranks)} next", line))
                run.ranks.extend([rank] * (rank == len(run.ranks)))
            elif (row := _row(line)) is not None:
                run.rows[number] = row
        except ValueError as error:
            raise ValueError(f"{log}:{number}: {error}") from None
    timings = []
    for run in runs:
        if not run.rows:
            continue
        try:
            world_size = run.world_size(given)
        except ValueError as error:
            raise ValueError(f"{log}:{min(run.rows)}: {error}") from None
        for number, row in run.rows.items():
            if not _is_bus_bandwidth_of_all_reduce(row, world_size):
                raise ValueError(
                    f"{log}:{number}: expected a busbw of {sent_share(world_size):.4g} times algbw, as of an "
                    f"all-reduce on {world_size} ranks, got {row.busbw} and {row.algbw}; "
                    + (f"leave {given}: out" if given else "give a log of all_reduce_perf with all its ranks")
                )
            timings.append((world_size, row.size_bytes, row.ns))
    if not timings:
        raise ValueError(f"{log}: expected rows of all-reduce times (redop sum), found none; {ADVICE}")
    return timings


def _world_size_of(rows: Collection[LogRow]) -> int:
    """Return the number n of ranks for which busbw is 2 (n - 1) / n times algbw, within the rounding of all rows."""
    least, most = 0.0, 2.0
    for row in rows:
        algbw, half, slack = float(row.algbw), _half_of_last_digit(row.algbw), _half_of_last_digit(row.busbw) + 1e-6
        least = max(least, (float(row.busbw) - slack) / (algbw + half))
        most = min(most, (float(row.busbw) + slack) / (algbw - half) if algbw > half else 2.0)
    fewest = ceil(2 / (2 - least)) if least < 2 else inf
    largest = floor(2 / (2 - most)) if most < 2 else inf
    if fewest == largest:
        return int(fewest)
    if fewest > largest:
        raise ValueError(
            f"expected a busbw of 2 (n - 1) / n times algbw for one number n of ranks, got {least:.4g} to {most:.4g} "
            "times; give a log of all_reduce_perf, runs of different numbers of ranks with their first lines"
        )
    numbers = f"{fewest} to {largest}" if largest < inf else f"{fewest} or more"
    raise ValueError(
        f"expected lines `#  Rank  0 ...`, or bandwidths that show the number of ranks, got any of {numbers} ranks; "
        "give the number before the name, as in 40:file.log"
    )


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
    if match["root"] not in (None, "-1"):
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
