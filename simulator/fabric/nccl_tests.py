"""Read what nccl-tests' `all_reduce_perf` prints: one all-reduce time by message size.

The lines that count: `#  Rank  3 Group ...`, one a rank, and rows of `size count type redop root` followed by
time in microseconds, algorithm and bus bandwidth and errors, first out of place, then in place.
"""

import os
import re
from pathlib import Path

RANK = re.compile(r"^#\s+Rank\s+(\d+)\b")
ROW = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+sum\s+-?\d+\s+([\d.]+)\s")


def read_log(path: str | os.PathLike[str]) -> list[tuple[int, int, int]]:
    """Rows `(world_size, size_bytes, ns)` of the out-of-place times in a log.

    Raises:
        ValueError: The file cannot be read, or names no rank, or has no row of a sum.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    ranks = {match[1] for line in lines if (match := RANK.match(line))}
    rows = [(int(match[1]), round(float(match[2]) * 1000)) for line in lines if (match := ROW.match(line))]
    for found, what in (
        (ranks, "a line `#  Rank  0 ...` for every rank"),
        (rows, "rows of all-reduce times (redop sum)"),
    ):
        if not found:
            raise ValueError(f"{path}: expected {what}, found none; give the whole output of all_reduce_perf")
    return [(len(ranks), size_bytes, ns) for size_bytes, ns in rows]
