"""Logs of nccl-tests: rows that are read, lines that are skipped, and damage that is named."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Fabric
from simulator.fabric.nccl_tests import read_log

from ..nccl_log import nccl_log

NCCL_LOG = nccl_log(2, {8: 8.65, 1024: 9.25})
ISAMBARD = {ranks: Path(__file__).parents[2] / f"validation/data/isambard_nccl_{ranks}gpus.log" for ranks in (4, 40)}
"""Published logs without the lines of the ranks (alan-turing-institute/anemoi_on_isambard-ai@8dbe4409, MIT)."""


def without_ranks(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if "Rank" not in line)


def test_a_log_of_nccl_tests_is_a_table_of_its_world_size(tmp_path):
    (tmp_path / "log").write_text(NCCL_LOG)
    fabric = Fabric.from_nccl_tests(tmp_path / "log")
    assert (fabric.world_sizes, fabric.concurrency) == ([2], 1)
    assert [fabric.all_reduce_ns(size, 2) for size in (8, 516, 1024)] == [8650, 8950, 9250]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "9.25",
            "9.2.5",
            "log:11: expected a row `size count type redop root time algbw busbw ...`, got '1024 256 float",
        ),
        ("1024           256 ", "1024           257 ", "log:11: expected a size of 4 bytes times count"),
        ("    9.25    0.11", "    9.25   11.07", "log:11: expected an algbw in GB/s that is the size divided by the"),
        ("Rank  1", "Rank  x", "log:5: expected a line `#  Rank  0 Group  0 Pid ...`, got '# Rank x Group 0 Pid"),
        ("9.25", 400 * "9", "log:11: expected a row `size"),
        ("Rank  1", "Rank  2", "log:5: expected rank 1 next, got '# Rank 2"),
        ("Rank  0", "Rank  1", "log:4: expected rank 0 next, got '# Rank 1"),
        ("sum      -1", "sum       0", "log:10: expected the root -1 of an all-reduce"),
        ("0.11    0.11      0", "0.11    0.11  1.04858e+06", "log:11: expected no wrong elements"),
        ("0.11    0.11      0", "0.11    0.22      0", "log:11: expected a busbw of 1 times algbw"),
        ("      0\n", "      0 8 2 float sum\n", "expected one row on a line"),
        ("sum", "none", "expected rows of all-reduce times"),
    ],
)
def test_a_damaged_line_of_a_log_is_named_by_its_number(tmp_path, old, new, message):
    assert old in NCCL_LOG
    (tmp_path / "log").write_text(NCCL_LOG.replace(old, new, -1 if old == "sum" else 1))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Fabric.from_nccl_tests(tmp_path / "log")
    assert "\n" not in str(caught.value)


def test_other_lines_of_a_log_are_skipped(tmp_path):
    noise = ["Rank 3 of 8 starts", "2 8 nodes ready", "# 8 2 float sum"]
    noise += ["host:1:2 [0] NCCL INFO Channel 00/02 : 0 1 2 3 4 5 6 7"]
    lines = [line for pair in zip(NCCL_LOG.splitlines(), noise * 9, strict=False) for line in pair]
    (tmp_path / "log").write_text("\n".join(lines))
    assert read_log(tmp_path / "log") == [(2, 8, 8650), (2, 1024, 9250)]


PREFIXES = (
    "[1,0]<stdout>: ",
    "[1,0]<stdout>:",
    "0: ",
    "12: ",
    "[pod/worker-0/main] ",
    "(head, rank=0, pid=3808) [1,0]<stdout>:",
    "2026-11-24T23:20:48.123456789Z ",
    "1764026448 ",
    "Nov 24 23:20:48 host all_reduce_perf[17]: ",
    "host:123:456 [0] NCCL INFO Connected all rings ",
    "\x1b[32m",
)


@given(st.sampled_from(PREFIXES), st.data())
def test_a_row_may_follow_a_prefix_or_messages(tmp_path_factory, prefix, data):
    path = tmp_path_factory.getbasetemp() / "prefixed.log"
    path.write_text("\n".join(prefix * data.draw(st.booleans()) + line for line in NCCL_LOG.splitlines()))
    assert read_log(path) == [(2, 8, 8650), (2, 1024, 9250)]
    assert "    9.25    0.11" in NCCL_LOG
    path.write_text("\n".join(prefix + line for line in NCCL_LOG.replace("    9.25    0.11", " 9.2.5 ").splitlines()))
    with pytest.raises(ValueError, match=r":11: expected a row `size"):
        read_log(path)


RUNS = st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([2**20, 2**26]), min_size=1, max_size=4)


@given(RUNS, st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_a_log_may_have_several_runs_with_or_without_their_first_lines(tmp_path_factory, runs, listed, first, end):
    """`listed`: each run lists its ranks. `first`: the line `# nThread ...`, else only the names of the columns."""
    path = tmp_path_factory.getbasetemp() / "runs.log"
    log = "".join(nccl_log(ranks, {size: 123.4}) for ranks, size in runs.items())
    lines = (log if listed else without_ranks(log)).splitlines()
    path.write_bytes(end.join(line for line in lines if first or "nThread" not in line).encode())
    assert read_log(path) == [(ranks, size, 123_400) for ranks, size in runs.items()]


def test_a_run_that_failed_after_its_list_of_ranks_changes_nothing(tmp_path):
    failed = "\n".join(line for line in nccl_log(8, {8: 9.0}).splitlines() if line.startswith("#"))
    (tmp_path / "log").write_text(failed + "\nError: unhandled cuda error\n" + NCCL_LOG)
    assert read_log(tmp_path / "log") == [(2, 8, 8650), (2, 1024, 9250)]


def test_lines_that_the_launcher_printed_twice_are_repeated_measurements(tmp_path):
    (tmp_path / "log").write_text("".join(2 * line for line in NCCL_LOG.splitlines(keepends=True)))
    assert Fabric.from_nccl_tests(tmp_path / "log").all_reduce_ns(8, 2) == 8650
    (tmp_path / "log").write_text(NCCL_LOG + NCCL_LOG)
    assert Fabric.from_nccl_tests(tmp_path / "log").all_reduce_ns(8, 2) == 8650


OLD_RCCL = """\
# nThread: 1 nGpus: 1 minBytes: 8 maxBytes: 134217728 step: 2(factor) warmupIters: 5 iters: 20 validation: 1
#
rccl-tests: Version develop:33cc4df
# Using devices
#   Rank  0 Pid 106347 on  nid000013 device  0 [0000:c9:00.0] Device 738c
#   Rank  1 Pid  97185 on  nid000014 device  0 [0000:c9:00.0] Device 738c
RCCL version : 2.27.7-develop:29e1567
#
#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
           8             2     float     sum    41.99    0.00    0.00  0e+00    42.18    0.00    0.00  0e+00
  8589934592    2147483648     float     sum   180755   47.52   47.52  0e+00   180614   47.56   47.56  0e+00
"""


def test_logs_of_old_versions_and_of_rccl_have_no_column_for_the_root(tmp_path):
    (tmp_path / "log").write_text(OLD_RCCL)
    assert read_log(tmp_path / "log") == [(2, 8, 41_990), (2, 8_589_934_592, 180_755_000)]


@pytest.mark.parametrize("ranks", ISAMBARD)
def test_the_ratio_of_the_bandwidths_shows_the_ranks_of_published_logs(ranks):
    assert Fabric.load(ISAMBARD[ranks]).world_sizes == [ranks]
    assert Fabric.load(f"{ranks}:{ISAMBARD[ranks]}").all_reduce == Fabric.load(ISAMBARD[ranks]).all_reduce


@given(
    st.integers(1, 600),
    st.dictionaries(st.integers(10, 32).map(lambda power: 2**power), st.floats(1, 50_000), min_size=1, max_size=4),
)
def test_the_ratio_of_the_bandwidths_shows_the_number_of_ranks_or_the_number_is_asked_for(
    tmp_path_factory, ranks, us
):
    path = tmp_path_factory.getbasetemp() / "listless.log"
    path.write_text(without_ranks(nccl_log(ranks, us)))
    try:
        assert {row[0] for row in read_log(path)} == {ranks}
    except ValueError as error:
        least, most = map(float, re.search(r"got (\S+) to (\S+) times; give n before", str(error)).groups())
        assert least - 1e-3 <= 2 * (ranks - 1) / ranks <= most + 1e-3
    assert {row[0] for row in read_log(f"{ranks}:{path}")} == {ranks}


@pytest.mark.parametrize(
    ("log", "given", "message"),
    [
        (NCCL_LOG, 4, "log:10: expected a list of 4 ranks, as given, got one of 2; remove `4:`"),
        (without_ranks(nccl_log(2, {2**26: 900.0})), 4, "log:8: expected a busbw of 1.5 times algbw, as of an"),
        (
            without_ranks(nccl_log(64, {2**20: 60.0})),
            None,
            "log:8: expected lines `#  Rank  0 ...` or a busbw of 2 (n - 1) / n times algbw for a single number n of "
            "ranks, got 1.968 to 1.969 times; give n before the name of an all_reduce_perf log, as in 40:file.log",
        ),
        (without_ranks(nccl_log(8, {64: 60.0})), None, "got 0 to 2 times; give n before"),
        (without_ranks(nccl_log(8, {2**26: 900.0})).replace(" 130.49 ", " 200.00 "), None, "got 2.682 to 2 times"),
        (
            re.sub("#.*", "", nccl_log(2, {2**26: 900.0}) + nccl_log(4, {2**26: 900.0})),
            None,
            "log:10: expected a busbw of 1.5 times algbw, as of an all-reduce on 4 ranks, got 74.57 and 74.57; check",
        ),
    ],
)
def test_a_number_of_ranks_that_is_wrong_or_cannot_be_told_is_one_line(tmp_path, log, given, message):
    (tmp_path / "log").write_text(log)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_log(f"{given}:{tmp_path / 'log'}" if given else tmp_path / "log")
    assert "\n" not in str(caught.value)


@given(
    st.integers(1, 12),
    st.dictionaries(st.integers(12, 28).map(lambda power: 2**power), st.floats(1, 50_000), min_size=1, max_size=4),
    st.data(),
)
def test_a_damaged_log_has_the_same_rows_or_is_named(tmp_path_factory, ranks, us, data):
    """One or two characters that are no digit, no blank and no `#` replace up to two characters of one line.

    Other damage may leave a valid log of other measurements, such as one without a row.
    """
    path = tmp_path_factory.getbasetemp() / "damaged.log"
    log = nccl_log(ranks, us)
    path.write_text(log)
    rows = read_log(path)
    assert [row[:2] for row in rows] == [(ranks, size) for size in us]
    lines = log.split("\n")
    number = data.draw(st.integers(0, len(lines) - 1))
    at = data.draw(st.integers(0, len(lines[number])))
    damage = data.draw(st.text("x.-:,e\0\xe9", min_size=1, max_size=2))
    replaced = data.draw(st.integers(0, 2))
    lines[number] = lines[number][:at] + damage + lines[number][at + replaced :]
    path.write_text("\n".join(lines))
    try:
        assert read_log(path) == rows
    except ValueError as error:
        message = str(error)
        assert message.startswith((f"{path}:{number + 1}: expected ", f"{path}:{number + 2}: expected rank "))
        assert "\n" not in message
