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

    ranks: list[int]  # in ascending order; empty if they are not listed
    rows: dict[int, LogRow]  # by number of the line


def ranks_and_log(path: str | os.PathLike[str]) -> tuple[int | None, str]:
    """Split `40:file.log` into the number of ranks and the log; the number is None if the path has none."""
    match = RANKS_AND_LOG.fullmatch(os.fspath(path))
    return (int(match[1]), match[2]) if match else (None, os.fspath(path))


def read_log(path: str | os.PathLike[str]) -> list[tuple[int, int, int]]:
    """Read the out-of-place times of all sums in a log, as rows `(world_size, size_bytes, ns)`.

    Args:
        path: The log, or `40:file.log` for a log of runs on 40 ranks.

    Raises:
        ValueError: The file cannot be read, has no row of a sum, does not show the number of ranks, or has a damaged
            line or a row of another collective. The message is one line that names the file and the number of the
            line.
    """
    given, log = ranks_and_log(path)
    runs, timings = [Run([], {})], []
    lines, number = read_text(log).split("\n"), 0
    try:
        for number, line in enumerate(lines, start=1):
            rank = _rank(line)
            if STARTS.search(line) or (runs[-1].rows and (rank == 0 or NAMES_COLUMNS.search(line))):
                runs.append(Run([], {}))
            run = runs[-1]
            if rank is None:
                if (row := _row(line)) is not None:
                    run.rows[number] = row
            elif rank == len(run.ranks):
                run.ranks.append(rank)
            elif rank > len(run.ranks):
                raise ValueError(_damage(f"rank {len(run.ranks)} next", line))
        for run in filter(lambda run: run.rows, runs):
            number = min(run.rows)
            world_size = _world_size(run, given)
            for number in sorted(run.rows):
                row = run.rows[number]
                _check_bandwidths(row, world_size)
                timings.append((world_size, row.size_bytes, row.ns))
    except ValueError as error:
        raise ValueError(f"{log}:{number}: {error}") from None
    if not timings:
        raise ValueError(f"{log}: expected rows of all-reduce times (redop sum), found none; {ADVICE}")
    return timings


def _world_size(run: Run, given: int | None) -> int:
    """Return the number of ranks: given by the user, listed, or the n for which busbw is 2 (n - 1) / n times algbw.

    The ratio is known within the rounding of the bandwidths, so the largest ones show it best.
    """
    if given and run.ranks and given != len(run.ranks):
        raise ValueError(
            f"expected a list of {given} ranks, as given, got one of {len(run.ranks)}; remove `{given}:`"
        )
    if given or run.ranks:
        return given or len(run.ranks)
    least, most = 0.0, 2.0
    for row in sorted(run.rows.values(), key=lambda row: float(row.busbw), reverse=True):
        algbw, half, slack = float(row.algbw), _half_of_last_digit(row.algbw), _half_of_last_digit(row.busbw) + 1e-6
        least = max(least, (float(row.busbw) - slack) / (algbw + half))
        most = min(most, (float(row.busbw) + slack) / (algbw - half) if algbw > half else 2.0)
        if max(least, most) < 2 and (ranks := ceil(2 / (2 - least))) == floor(2 / (2 - most)):
            return ranks
    raise ValueError(
        "expected lines `#  Rank  0 ...` or a busbw of 2 (n - 1) / n times algbw for a single number n of ranks, got "
        f"{least:.4g} to {most:.4g} times; give n before the name of an all_reduce_perf log, as in 40:file.log"
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


def _check_bandwidths(row: LogRow, world_size: int) -> None:
    """Check that both bandwidths have the ratio of an all-reduce, within the rounding of the numbers."""
    ratio = sent_share(world_size)
    rounding = ratio * _half_of_last_digit(row.algbw) + _half_of_last_digit(row.busbw) + 1e-6
    if abs(float(row.busbw) - ratio * float(row.algbw)) > rounding:
        raise ValueError(
            f"expected a busbw of {ratio:.4g} times algbw, as of an all-reduce on {world_size} ranks, got "
            f"{row.busbw} and {row.algbw}; check that this is a log of all_reduce_perf on {world_size} ranks"
        )


def _half_of_last_digit(number: str) -> float:
    return 0.5 / 10.0 ** len(number.partition(".")[2])


def _damage(expected: str, line: str) -> str:
    seen = " ".join(line.split())
    return f"expected {expected}, got {seen if len(seen) <= 80 else seen[:77] + '...'!r}; {ADVICE}"
