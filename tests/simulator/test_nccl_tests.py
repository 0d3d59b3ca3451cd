"""Logs of nccl-tests: rows that are read, lines that are skipped, and damage that is named."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Fabric
from simulator.fabric.nccl_tests import read_log

from ..nccl_log import nccl_log

NCCL_LOG = nccl_log(2, {8: 8.65, 1024: 9.25})


def test_a_log_of_nccl_tests_is_a_table_of_its_world_size(tmp_path):
    (tmp_path / "log").write_text(NCCL_LOG)
    fabric = Fabric.from_nccl_tests(tmp_path / "log")
    assert (fabric.world_sizes, fabric.concurrency) == ([2], 1)
    assert [fabric.all_reduce_ns(size, 2) for size in (8, 516, 1024)] == [8650, 8950, 9250]


@pytest.mark.parametrize("name", ["all_reduce.log", "all_reduce.TXT"])
def test_a_log_is_loaded_by_its_ending(tmp_path, name):
    (tmp_path / name).write_text(NCCL_LOG)
    assert Fabric.load(tmp_path / name) == Fabric.from_nccl_tests(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("".join(NCCL_LOG.splitlines(keepends=True)[5:]), "expected a line `#  Rank  0 ...` for every rank"),
        (NCCL_LOG.replace("sum", "none"), "expected rows of all-reduce times"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_log_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        Fabric.from_nccl_tests(tmp_path / "log")


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
    ],
)
def test_a_damaged_line_of_a_log_is_named_by_its_number(tmp_path, old, new, message):
    assert old in NCCL_LOG
    (tmp_path / "log").write_text(NCCL_LOG.replace(old, new, 1))
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


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sum      -1", "sum       0", "expected the root -1 of an all-reduce"),
        ("0.11    0.11      0", "0.11    0.11      3", "expected no wrong elements"),
        ("0.11    0.11      0", "0.11    0.11  1.04858e+06", "expected no wrong elements"),
        ("0.11    0.11      0", "0.11    0.22      0", "expected a busbw of 1 times algbw"),
        ("sum      -1", "sum host:1:1 [0] NCCL INFO ring", "expected a row `size"),
        ("      0\n", "      0 8 2 float sum\n", "expected one row on a line"),
    ],
)
def test_rows_of_another_collective_or_with_errors_are_refused(tmp_path, old, new, message):
    assert old in NCCL_LOG
    (tmp_path / "log").write_text(NCCL_LOG.replace(old, new))
    with pytest.raises(ValueError, match=rf"log:\d+: {message}"):
        read_log(tmp_path / "log")


def test_a_log_of_another_number_of_ranks_than_it_lists_is_refused(tmp_path):
    lines = [line for line in nccl_log(8, {2**20: 100.5}).splitlines() if "Rank  7" not in line]
    (tmp_path / "log").write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"expected a busbw of 1.714 times algbw, as of an all-reduce on 7 ranks"):
        read_log(tmp_path / "log")


def test_runs_of_several_world_sizes_in_one_log_are_refused(tmp_path):
    (tmp_path / "log").write_text(NCCL_LOG + nccl_log(4, {8: 9.65}))
    with pytest.raises(
        ValueError, match=r"log: expected runs of one world size, got runs of 2 and 4 ranks; use a separate log"
    ):
        Fabric.from_nccl_tests(tmp_path / "log")
    (tmp_path / "log").write_text(NCCL_LOG + NCCL_LOG)
    assert read_log(tmp_path / "log") == [(2, 8, 8650), (2, 1024, 9250)] * 2


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
