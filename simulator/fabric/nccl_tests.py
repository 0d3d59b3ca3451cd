"""Reads all-reduce times by message size from logs of nccl-tests and rccl-tests.

A log has one or more runs. A run lists its ranks, one line each (`#  Rank  3 Group ...`), and then has one row per
message size: size, count, type, redop and root (not in old versions), then the time in microseconds, the algorithm
and bus bandwidth in GB/s and the number of wrong elements, first out of place, then in place. Both send the same, and
the first use of a buffer can take many times as long, so the smaller time counts. The `#` may be lost.
Where the list of ranks is missing or shortened, their number follows from the ratio of the bandwidths. Launchers put
prefixes before lines, and messages of the library may share a line with a row, so a row may begin anywhere in a line,
or be cut after its redop and go on in a later line.
Lines may occur twice. Runs of other collectives are left out. Other lines are skipped. A damaged row or rank line is
an error, because skipping the line would silently change the measured table; so are rows whose bandwidths are not
those of an all-reduce, and rows with wrong elements. JSON of nccl-tests (`-J`), and JSON or CSV of rccl-tests, are
read as the rows of a log.
"""

import csv
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from itertools import zip_longest
from math import ceil, floor, inf
from typing import Annotated, Any, NamedTuple

from pydantic import AliasChoices, AliasPath, Field

from ...reference.files.reading import Schema, parse_json, read_text
from ...reference.files.value_ranges import MILLION, Rank, WorldSize
from .algorithms import sent_share
from .measured_tables import ranks_and_log

TYPE_BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int", "int32", "uint32", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}
"""Element size by the type name that nccl-tests prints; the size of rows of other types is not checked."""
REDOPS = "sum|prod|max|min|avg|mulsum|none"
MOST_COLUMNS = 100
DECIMAL = r"\d{1,15}(?:\.\d{1,15})?(?:e\+\d{1,2})?"

SAYS_SOMETHING = re.compile(r"\d\s+-?\d|\b(?:Rank|Pid|nGpus|starting|size)\b|\.{3}|\u2026")
"""In every line that is read."""
STARTS = re.compile(r"\bnThread:? \d+ nGpus\b")
"""The first line of a run."""
PROGRAM = re.compile(r"\bCollective test starting: (\w+?)(?:_perf)?\b")
NAMES_COLUMNS = re.compile(r"(?:#|^)\s+size\s+count\s+type\b")
RANK = re.compile(r"(?:#\s+|\b)Rank\s+(\d{1,9})\s+(?:Group\s+(\d{1,9})\s+)?Pid\b.*")
LOOKS_LIKE_A_RANK = re.compile(r"\W*Rank\b.*\b(?:Pid|device)\b|(?>.*?\bPid\b).*\bdevice\b")
SHORTENED = re.compile(r"(?!.*\w).*(?:\.{3}|\u2026)")
"""Stands for ranks that a document leaves out."""
STATES_RANKS = "ranks of a record: "
FASTEST_GB_PER_S = 20_000
"""More than ten times the rate of the fastest links to a GPU, those of NVLink 5."""
BANDWIDTH = r"\d{1,15}\.\d{1,15}"
TIMES = rf"(?P<us>{DECIMAL})\s+(?P<algbw>{BANDWIDTH})\s+(?P<busbw>{BANDWIDTH})(?:\s+(?P<wrong>\S+))?"
ROW = re.compile(
    rf"(?<![\w.+-])(?P<size>\d{{1,18}})\s+(?P<count>\d{{1,18}})\s+(?P<type>\S+)\s+(?P<redop>{REDOPS})"
    rf"(?:\s+(?P<root>-?\d+))?\s+{TIMES}"
    rf"(?:\s+(?P<in_place>{DECIMAL}\s+{DECIMAL}\s+{DECIMAL})\s+(?P<wrong_in_place>\S+))?(?:\s|$)"
)
CUT_BY_NCCL = re.compile(
    rf"(?<![\w.+-])(\d{{1,18}}\s+\d{{1,18}}\s+\S+\s+(?:{REDOPS}))\s.*\bNCCL (?:INFO|WARN|TRACE)\b"
)
REST_OF_A_ROW = re.compile(rf"(?:^|\s)(-1\s+{TIMES}.*)")
BEGINS_LIKE_A_ROW = re.compile(rf"^\s*\d+\s+\d+\s+(({'|'.join(TYPE_BYTES)})\s|\S+\s+({REDOPS})\s)")
HAS_A_ROW = re.compile(rf"(?<![\w.])\d+\s+\d+\s+(?:{'|'.join(TYPE_BYTES)})\s+(?:{REDOPS})\b")
COUNT = re.compile(r"\d+|\d(?:\.\d+)?e\+\d+")
"""A number of elements as C prints it with %g; an error of old versions, such as 2e-07, is none."""
NUMBER = re.compile(r"-?\d+(\.\d+)?")

ADVICE = "give the whole output of all_reduce_perf"
OF_OTHERS = (
    ", or of another benchmark (oneCCL, hccl_test, nccom-test, mscclpp-test) three columns, in Python: "
    "`ddplab.Fabric.from_table([(ranks, bytes, nanoseconds), ...]).save('fabric.json')`"
)
WITHOUT_MESSAGES = "set NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE to a file, and measure again"


class ListedRank(Schema, extra="ignore", strict=False):
    """A rank in the JSON of nccl-tests."""

    rank: Rank
    group: Rank = 0


class Config(Schema, extra="ignore", strict=False):
    """The part of the JSON of nccl-tests that says where it ran."""

    devices: tuple[ListedRank, ...] = ()


Measured = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0, lt=10**18)]


def timed(*names: str, default: Any = ...) -> Any:
    """Return the field of one of these names, at the top or of the times out of place; required without a default."""
    paths = [AliasPath(*above, name) for name in names for above in (["out_of_place"], [])]
    return Field(default, validation_alias=AliasChoices(*paths))


class InPlace(Schema, extra="ignore", strict=False):
    """The second time in a row of the JSON of nccl-tests."""

    time: Measured
    algbw: Measured = Field(validation_alias="alg_bw")
    busbw: Measured = Field(validation_alias="bus_bw")


class Record(Schema, extra="ignore", strict=False):
    """A row of times in JSON of nccl-tests, or in JSON or CSV of rccl-tests."""

    name: str = ""
    ranks: WorldSize | None = None
    size: Whole
    count: Whole | None = None
    type: str = Field(pattern=r"^\S{1,20}$")
    redop: str = Field(pattern=f"^({REDOPS})$")
    root: int = Field(default=-1, ge=-1, le=MILLION)
    in_place: int = Field(default=0, validation_alias="inPlace")
    also: InPlace | None = Field(default=None, validation_alias="in_place")
    time: Measured = timed("time", "cpu_time")
    algbw: Measured = timed("alg_bw", "algBw")
    busbw: Measured = timed("bus_bw", "busBw")
    wrong: float | str | None = timed("nwrong", "wrong", default=None)


class Results(Schema, extra="ignore", strict=False):
    """JSON of nccl-tests; that of rccl-tests has the results alone."""

    config: Config = Config()
    results: tuple[Record, ...] = ()


class LogRow(NamedTuple):
    """A row of times; bandwidths in GB/s as they are printed."""

    size_bytes: int
    ns: int
    algbw: str
    busbw: str
    redop: str
    other: str  #: the collective, by its columns, if it is no all-reduce


@dataclass
class Run:
    """A run on one number of ranks."""

    program: str = ""  #: without `_perf`; "" if it is not named
    stated: int = 0  #: number of ranks, if a record of rccl-tests states it
    groups: dict[int, int] = field(default_factory=dict)  #: by listed rank; with NCCL_TESTS_SPLIT there are several
    zeros: set[str] = field(default_factory=set)  #: lines of rank 0 before the first row, also of lists before this
    shortened: bool = False  #: whether the list says that it leaves out ranks
    rows: dict[int, LogRow] = field(default_factory=dict)  #: by number of the line
    cut: str = ""  #: the beginning of a row whose rest has not come

    @property
    def other(self) -> str:
        """The collective, if the run is of another one than all-reduce."""
        if self.program.replace("_", "").lower() not in ("", "allreduce"):
            return self.program
        kinds = [row.other for row in self.rows.values()]
        return kinds[0] if all(kinds) else ""


class LogContents(NamedTuple):
    """Times `(world_size, size_bytes, ns)` of all-reduces, and the names of the collectives that are left out."""

    rows: list[tuple[int, int, int]]
    others: tuple[str, ...]


def read_log(path: str | os.PathLike[str]) -> LogContents:
    """Read the times of all sums in a log, or of the averages in a run that has no sums.

    Args:
        path: The log, or `40:file.log` for a log of runs on 40 ranks.

    Raises:
        ValueError: The file cannot be read, has no all-reduces of several ranks, does not show the number of ranks,
            or has a damaged line. The message is one line that names the file and the number of the line.
    """
    given, log = ranks_and_log(path)
    timings, others, number = list[tuple[int, int, int]](), dict[str, None](), 0
    text = read_text(log)
    try:
        runs = [Run()]
        for number, line in enumerate(_lines(text), start=1):
            _read_line(line, number, runs)
        for run in runs:
            _check_whole(run)
        for run in filter(lambda run: run.rows, runs):
            number = min(run.rows)
            if run.other:
                others[run.other] = None
                continue
            world_size = _world_size(run, given)
            redops = {row.redop for row in run.rows.values()}
            for number in sorted(run.rows):
                row = run.rows[number]
                if row.redop == "avg" and "sum" in redops:
                    continue
                if row.other:
                    raise ValueError(f"expected rows of one collective in a run, got one of {row.other}; {ADVICE}")
                _check_bandwidths(row, world_size)
                timings.append((world_size, row.size_bytes, row.ns))
    except ValueError as error:
        raise ValueError(f"{log}:{number}: {error}" if number else f"{log}: {error}") from None
    if not timings:
        found = f"those of {', '.join(others)}" if others else "none"
        raise ValueError(f"{log}: expected rows of all-reduce times (redop sum), found {found}; {ADVICE}{OF_OTHERS}")
    if all(world_size == 1 for world_size, *_ in timings):
        raise ValueError(f"{log}: expected all-reduces of 2 GPUs or more, got those of 1 GPU, which sends nothing")
    return LogContents(timings, tuple(others))


def _read_line(line: str, number: int, runs: list[Run]) -> None:
    """Add what a line holds to the last run, or begin another one."""
    if not SAYS_SOMETHING.search(line):  # as most lines of a long log, in a tenth of the time
        return
    rank = None
    if match := RANK.search(line):
        rank = int(match[1])
    elif LOOKS_LIKE_A_RANK.match(line):
        raise ValueError(_damage("a line `#  Rank  0 Group  0 Pid ...`", line))
    program, starts = PROGRAM.search(line), STARTS.search(line)
    if runs[-1].rows and (program or starts or rank == 0 or NAMES_COLUMNS.search(line)):
        runs.append(Run(program=runs[-1].program))
    run = runs[-1]
    if program:
        run.program = program[1]
    elif line.startswith(STATES_RANKS):
        run.stated = int(line.removeprefix(STATES_RANKS))
    elif starts:  # a list before this one is that of a run that failed, or of another job
        run.groups.clear()
        run.shortened = False
    elif match:
        run.groups.setdefault(int(match[1]), int(match[2] or 0))
        if rank == 0:
            run.zeros.add(" ".join(match[0].strip("# ").split()))
    elif run.groups and not run.rows and SHORTENED.match(line):
        run.shortened = True
    elif (cut := CUT_BY_NCCL.search(line)) and not ROW.search(line):
        _check_whole(run)
        run.cut = cut[1]
    else:
        if run.cut and (rest := REST_OF_A_ROW.search(line)):
            line, run.cut = f"{run.cut} {rest[1]}", ""
        elif _looks_like_a_row(line):
            _check_whole(run)
        if (row := _row(line)) is not None:
            run.rows[number] = row


def _check_whole(run: Run) -> None:
    """Raise ValueError if the beginning of a row still has no rest."""
    if run.cut:
        raise ValueError(f"expected whole rows, got some that messages of NCCL cut; {WITHOUT_MESSAGES}")


def _lines(text: str) -> Iterator[str]:
    """Yield the lines of a log; JSON and CSV become such lines."""
    try:
        if re.match(r"\s*(\{|\[\s*\{)", text):
            document = parse_json(text)
        elif re.match(r"\s*numCycle\b", text):
            rows = csv.DictReader(StringIO(text.strip()), restkey="more", skipinitialspace=True)
            if len(rows.fieldnames or ()) > MOST_COLUMNS:
                raise ValueError(f"expected at most {MOST_COLUMNS} columns, got {len(rows.fieldnames or ())}")
            document = list(rows)
        else:
            yield from text.split("\n")
            return
        found = Results(**(document if isinstance(document, dict) else {"results": document}))
    except (ValueError, csv.Error) as error:
        raise ValueError(f"expected JSON or CSV of nccl-tests or rccl-tests: {error}; {ADVICE}") from None
    for one in found.config.devices:
        yield f"#  Rank {one.rank} Group {one.group} Pid 0 device"
    for record, following in zip_longest(found.results, found.results[1:]):
        if record.in_place:
            continue
        also: InPlace | Record | None = record.also
        if following is not None and following.in_place and following.size == record.size:
            also = following
        if record.name:
            yield f"# Collective test starting: {record.name}"
        if record.ranks:
            yield f"{STATES_RANKS}{record.ranks}"
        count = record.size // TYPE_BYTES.get(record.type, 1) if record.count is None else record.count
        yield (
            f"{record.size} {count} {record.type} {record.redop} {record.root} {record.time:.6f} {record.algbw:.6f} "
            f"{record.busbw:.6f} {'N/A' if record.wrong is None else record.wrong}"
            f"{f' {also.time:.6f} {also.algbw:.6f} {also.busbw:.6f} N/A' if also else ''}"
        )


def _world_size(run: Run, given: int | None) -> int:
    """Return the number of ranks: listed, given by the user, or the n for which busbw is 2 (n - 1) / n times algbw.

    The ratio is known within the rounding of the bandwidths, so the largest ones show it best.
    """
    times_measured = Counter(row.size_bytes for row in run.rows.values())
    if len(run.zeros) > 1 and min(times_measured.values()) > 1:
        raise ValueError(
            f"expected one list of ranks, got rank 0 {len(run.zeros)} times before the first row: {len(run.zeros)} "
            "separate jobs ran at once, as without MPI; build nccl-tests with MPI=1 and measure again"
        )
    members = set(Counter(run.groups.values()).values())
    alike = not run.shortened and len(members) == 1 and sorted(run.groups) == list(range(len(run.groups)))
    if run.stated or alike:
        listed = run.stated or members.pop()
        if given and given != listed:
            raise ValueError(
                f"expected a list of {given} ranks, as given, got one of {listed}; remove `{given}:`, or if {given} "
                "took part, build nccl-tests with MPI=1 and measure again"
            )
        return listed
    least_ranks = 1 + max(run.groups, default=0) if len(members) <= 1 else 1
    ranks = given or _ranks_by_bandwidths(run)
    if ranks < least_ranks:
        raise ValueError(f"expected at least {least_ranks} ranks, as the list shows, got {ranks}; {ADVICE}")
    return ranks


def _ranks_by_bandwidths(run: Run) -> int:
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


def _row(line: str) -> LogRow | None:
    """Return the row in a line; None if the line has no row, or one of another operation than sum."""
    match = ROW.search(line.partition("#")[0])
    if match is None:
        if _looks_like_a_row(line):
            raise ValueError(_damage("a row `size count type redop root time algbw busbw ...`", line))
        return None
    if HAS_A_ROW.search(line, match.end()):
        raise ValueError(_damage("one row on a line", line))
    size_bytes, counted = int(match["size"]), int(match["count"]) * TYPE_BYTES.get(match["type"], 0)
    other = ""
    if match["root"] not in (None, "-1"):
        other = "broadcast or reduce"
    elif match["redop"] == "none":
        other = "all_gather or alltoall"
    elif counted and size_bytes > counted and size_bytes % counted == 0:
        other = "reduce_scatter"
    elif counted and size_bytes != counted:
        width = TYPE_BYTES[match["type"]]
        raise ValueError(_damage(f"a size of {width} bytes times count, for elements of {match['type']}", line))
    us, algbw, busbw = match["us"], match["algbw"], match["busbw"]
    if match["in_place"] and 0 < float(match["in_place"].split()[0]) < float(us):
        us, algbw, busbw = match["in_place"].split()
    least_us, most_us = _times_us(size_bytes, us, algbw)
    if least_us > most_us:
        raise ValueError(_damage("an algbw in GB/s that is the size divided by the time in microseconds", line))
    if float(busbw) > FASTEST_GB_PER_S:
        raise ValueError(_damage(f"a busbw of at most {FASTEST_GB_PER_S:,} GB/s", line))
    for wrong in (match["wrong"], match["wrong_in_place"]):
        if wrong is not None and COUNT.fullmatch(wrong) and float(wrong):
            raise ValueError(_damage("no wrong elements", line, "repair the links or the library and measure again"))
    if match["redop"] not in ("sum", "avg", "none"):
        return None
    taken_us = (least_us + most_us) / 2 if "e" in us else float(us)
    return LogRow(size_bytes, round(taken_us * 1000), algbw, busbw, match["redop"], other)


def _looks_like_a_row(line: str) -> bool:
    """Whether a line without a valid row contains the beginning of a row, or consists mostly of numbers."""
    if line.lstrip().startswith("#"):
        return False
    words = line.split(maxsplit=MOST_COLUMNS)[:MOST_COLUMNS]  # a long line is no row, whatever its end is
    numbers = sum(NUMBER.fullmatch(word) is not None for word in words)
    mostly_numbers = len(words) >= 8 and 2 * numbers > len(words) and "NCCL" not in line
    return mostly_numbers or bool(BEGINS_LIKE_A_ROW.match(line) or HAS_A_ROW.search(line))


def _times_us(size_bytes: int, us: str, algbw: str) -> tuple[float, float]:
    """Return the least and the largest time that rounds to both numbers; if none does, the least is larger."""
    half_us, slack = _half_of_last_digit(us), 1e-6 + _half_of_last_digit(algbw)
    low, high = float(algbw) - slack, float(algbw) + slack
    of_bandwidth = size_bytes / high / 1e3, size_bytes / low / 1e3 if low > 0 else inf
    return max(float(us) - half_us, of_bandwidth[0]), min(float(us) + half_us, of_bandwidth[1])


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
    digits, _, power = number.partition("e")
    return 0.5 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


def _damage(expected: str, line: str, advice: str = ADVICE) -> str:
    seen, advice = " ".join(line.split()), WITHOUT_MESSAGES if "NCCL" in line else advice
    return f"expected {expected}, got {seen if len(seen) <= 80 else seen[:77] + '...'!r}; {advice}"
