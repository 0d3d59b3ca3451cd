"""Logs of nccl-tests: rows that are read, lines that are skipped, and damage that is named."""

import json
import re
from itertools import chain, cycle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric
from ddplab.simulator.fabric.nccl_tests import read_log

from ..nccl_log import as_csv, as_json, nccl_log, rccl_records

NCCL_LOG = nccl_log(2, {8: 8.65, 1024: 9.25})
ISAMBARD = {ranks: Path(__file__).parents[2] / f"validation/data/isambard_nccl_{ranks}gpus.log" for ranks in (4, 40)}
"""Published logs without the lines of the ranks (alan-turing-institute/anemoi_on_isambard-ai@8dbe4409, MIT)."""


def times(least: int, most: int):
    """{1024: 8.65}: microseconds by powers of two in bytes."""
    sizes = st.integers(least, most).map(lambda power: 2**power)
    return st.dictionaries(sizes, st.floats(1, 50_000), min_size=1, max_size=4)


def without_ranks(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if "Rank" not in line)


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
    assert read_log(path).rows == [(2, 8, 8650), (2, 1024, 9250)]
    assert "    9.25    0.11" in NCCL_LOG
    path.write_text("\n".join(prefix + line for line in NCCL_LOG.replace("    9.25    0.11", " 9.2.5 ").splitlines()))
    with pytest.raises(ValueError, match=r":11: expected a row `size"):
        read_log(path)


MESSAGE = "node-1:497888:497888 [0] NCCL INFO 1024 Bytes -> Algo 0 proto 0 time 75.021333"


@given(st.sampled_from(PREFIXES[:4]), st.integers(1, 3))
def test_a_row_that_messages_cut_is_joined_or_the_cure_is_named(tmp_path_factory, prefix, messages):
    path = tmp_path_factory.getbasetemp() / "cut.log"
    cut = NCCL_LOG.replace("sum      -1", "sum    " + "\n".join(messages * [prefix + MESSAGE]) + f"\n{prefix}  -1")
    path.write_text(cut)
    assert read_log(path).rows == [(2, 8, 8650), (2, 1024, 9250)]
    path.write_text("\n".join(f"{line} {MESSAGE}" for line in NCCL_LOG.splitlines()))
    assert read_log(path).rows == [(2, 8, 8650), (2, 1024, 9250)]
    for lost in ("    9.25    0.11", "\n" + prefix + "  -1     8.65"):
        path.write_text(cut.replace(lost, " "))
        with pytest.raises(
            ValueError, match=r"cut\.log:\d+: .*; set NCCL_DEBUG=WARN, or NCCL_DEBUG_FILE to a file, and"
        ):
            read_log(path)


@given(times(3, 20), st.floats(0.3, 4.0), st.sampled_from(["sum", "avg"]))
def test_of_both_times_of_a_row_the_smaller_one_counts(tmp_path_factory, us, factor, redop):
    path = tmp_path_factory.getbasetemp() / "both.log"
    path.write_text(nccl_log(4, us, in_place=factor).replace("  sum ", f"  {redop} "))
    found = {size: ns / 1e3 for _, size, ns in read_log(path).rows}
    assert found == pytest.approx({size: taken * min(1.0, factor) for size, taken in us.items()}, rel=0.01, abs=0.06)


def test_averages_count_where_a_run_has_no_sums(tmp_path):
    row = next(line for line in NCCL_LOG.splitlines() if " 1024 " in line)
    (tmp_path / "log").write_text(
        NCCL_LOG.replace(row, f"{row}\n{row.replace('sum', 'avg').replace('9.25', '9.85')}")
    )
    assert read_log(tmp_path / "log").rows == [(2, 8, 8650), (2, 1024, 9250)]


RUNS = st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([2**20, 2**26]), min_size=1, max_size=4)


@given(RUNS, st.booleans(), st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_a_log_may_have_several_runs_with_or_without_their_first_lines(tmp_path_factory, runs, listed, first, end):
    """`listed`: each run lists its ranks. `first`: the line `# nThread ...`, else only the names of the columns."""
    path = tmp_path_factory.getbasetemp() / "runs.log"
    log = "".join(nccl_log(ranks, {size: 123.4}) for ranks, size in runs.items())
    lines = (log if listed else without_ranks(log)).splitlines()
    path.write_bytes(end.join(line for line in lines if first or "nThread" not in line).encode())
    if set(runs) == {1}:
        with pytest.raises(ValueError, match="expected all-reduces of 2 GPUs or more, got those of 1 GPU"):
            read_log(path)
        return
    assert read_log(path).rows == [(ranks, size, 123_400) for ranks, size in runs.items()]


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
    assert read_log(tmp_path / "log").rows == [(2, 8, 41_990), (2, 8_589_934_592, 180_614_000)]


@pytest.mark.parametrize("ranks", ISAMBARD)
def test_the_ratio_of_the_bandwidths_shows_the_ranks_of_published_logs(ranks):
    assert Fabric.load(ISAMBARD[ranks]).world_sizes == [ranks]
    assert Fabric.load(f"{ranks}:{ISAMBARD[ranks]}").all_reduce == Fabric.load(ISAMBARD[ranks]).all_reduce


@given(st.integers(2, 600), times(10, 32))
def test_the_ratio_of_the_bandwidths_shows_the_ranks_or_their_number_is_asked_for(tmp_path_factory, ranks, us):
    us = {size_bytes: max(one, size_bytes / 1e6) for size_bytes, one in us.items()}  # at most 1,000 GB/s
    path = tmp_path_factory.getbasetemp() / "listless.log"
    path.write_text(without_ranks(nccl_log(ranks, us)))
    try:
        assert {row[0] for row in read_log(path).rows} == {ranks}
    except ValueError as error:
        least, most = map(float, re.search(r"got (\S+) to (\S+) times; give n before", str(error)).groups())
        assert least - 1e-3 <= 2 * (ranks - 1) / ranks <= most + 1e-3
    assert {row[0] for row in read_log(f"{ranks}:{path}").rows} == {ranks}


TWO_RUNS_WITHOUT_LISTS = re.sub("#.*", "", nccl_log(2, {2**26: 900.0}) + nccl_log(4, {2**26: 900.0}))


@given(st.integers(2, 12), times(12, 28), st.data())
def test_a_damaged_log_has_the_same_rows_or_is_named(tmp_path_factory, ranks, us, data):
    """One or two characters that are no digit, no blank and no `#` replace up to two characters of one line.

    Other damage may leave a valid log of other measurements, such as one without a row.
    """
    path = tmp_path_factory.getbasetemp() / "damaged.log"
    log = nccl_log(ranks, us)
    path.write_text(log)
    rows = read_log(path).rows
    assert [row[:2] for row in rows] == [(ranks, size) for size in us]
    lines = log.split("\n")
    number = data.draw(st.integers(0, len(lines) - 1))
    at = data.draw(st.integers(0, len(lines[number])))
    damage = data.draw(st.text("x.-:,e\0\xe9", min_size=1, max_size=2))
    replaced = data.draw(st.integers(0, 2))
    lines[number] = lines[number][:at] + damage + lines[number][at + replaced :]
    path.write_text("\n".join(lines))
    try:
        assert read_log(path).rows == rows
    except ValueError as error:
        message = str(error)
        assert message.startswith((f"{path}:{number + 1}: expected ", f"{path}:{number + 2}: expected rank "))
        assert "\n" not in message


# Logs as people have them

US = {2**20: 28.0, 2**24: 148.0, 2**27: 1041.0}
EIGHT = nccl_log(8, US)
ROWS = [(8, size, round(1000 * us)) for size, us in US.items()]
DEVICES = [line for line in EIGHT.splitlines() if "Rank" in line]
NOISE = ["Rank 3 of 8 starts", "2 8 nodes ready", "# 8 2 float sum", "host:1:2 [0] NCCL INFO Channel 00/02 : 0 1 2 3"]
OTHER = EIGHT.replace("     sum ", "    none ")


def split(ranks: int, groups: int) -> str:
    """A log of NCCL_TESTS_SPLIT: the bandwidths are those of one group."""
    lines = nccl_log(ranks // groups, US).splitlines()
    listed = [f"#  Rank {n:>2} Group {n % groups:>2} Pid 1 on host device {n % 8} [0x07] A100" for n in range(ranks)]
    at = next(number for number, line in enumerate(lines) if "Rank" in line)
    return "\n".join([*lines[:at], *listed, *(line for line in lines[at:] if "Rank" not in line)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hash signs lost.log", EIGHT.replace("#", " ")),
        ("a list cut by dots.log", "\n".join(line for line in EIGHT.splitlines() if line not in DEVICES[2:]).replace(
            DEVICES[1], DEVICES[1] + "\n...")),
        ("a list of first and last.log", "\n".join(line for line in EIGHT.splitlines() if line not in DEVICES[1:7])),
        ("messages between.log", "\n".join(chain(*zip(EIGHT.splitlines(), cycle(NOISE))))),
        ("groups.log", split(16, 2)),
        ("then another collective.log", EIGHT + OTHER),
        ("then a named one.log", EIGHT + "# Collective test starting: sendrecv_perf\n" + EIGHT),
        ("a first try that failed.log", "\n".join(DEVICES).replace("1234", "99") + "\nabort\n" + EIGHT),
        ("nccl-tests.json", as_json(US, 8)),
        ("rccl-tests.json", json.dumps(rccl_records(US, 8) + rccl_records(US, 8, "AllGather"))),
        ("rccl-tests.csv", as_csv(rccl_records(US, 8))),
    ],
)  # fmt: skip
def test_logs_as_people_have_them_give_the_same_table(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert [(row.world_size, row.size_bytes, row.ns) for row in Fabric.load(tmp_path / name).all_reduce] == ROWS


def test_lines_that_the_launcher_printed_twice_are_repeated_measurements(tmp_path):
    for text in ("".join(2 * line for line in NCCL_LOG.splitlines(keepends=True)), NCCL_LOG + NCCL_LOG):
        (tmp_path / "log").write_text(text)
        assert Fabric.from_nccl_tests(tmp_path / "log").all_reduce_ns(8, 2) == 8650


def test_other_collectives_of_a_log_are_named(tmp_path):
    (tmp_path / "log").write_text(EIGHT + OTHER)
    assert "without its rows of all_gather or alltoall" in Fabric.from_nccl_tests(tmp_path / "log").source


TWICE = "\n".join(
    2 * f"{line}\n" if not line.startswith("#") else f"{line}\n{line.replace('1234', '99')}"
    for line in EIGHT.splitlines()
)
LISTLESS = {ranks: without_ranks(nccl_log(ranks, {2**26: 900.0})) for ranks in (2, 8)}


def changed(old: str, new: str) -> str:
    assert old in NCCL_LOG
    return NCCL_LOG.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        # damaged lines
        (
            changed("9.25", "9.2.5"),
            "",
            "log:11: expected a row `size count type redop root time algbw busbw ...`, got",
        ),
        (changed("1024           256 ", "1024           257 "), "", "log:11: expected a size of 4 bytes times count"),
        (
            changed("    9.25    0.11", "    9.25   11.07"),
            "",
            "log:11: expected an algbw in GB/s that is the size div",
        ),
        (changed("Rank  1", "Rank  x"), "", "log:5: expected a line `#  Rank  0 Group  0 Pid ...`, got '# Rank x"),
        (changed("9.25", 400 * "9"), "", "log:11: expected a row `size"),
        (changed("Rank  1", "Rank  2"), "", "log:10: expected at least 3 ranks, as the list shows, got 2"),
        (
            changed("sum      -1", "sum       0"),
            "",
            "log:10: expected rows of one collective in a run, got one of",
        ),
        (
            changed("9.25    0.11    0.11", "0.0  49999.5  49999.5"),
            "",
            "log:11: expected a busbw of at most 20,000",
        ),
        (
            changed("0.11    0.11      0", "0.11    0.11  1.04858e+06"),
            "",
            "0.11 0.11 0'; repair the links or the library",
        ),
        (changed("0.11    0.11      0", "0.11    0.22      0"), "", "log:11: expected a busbw of 1 times algbw"),
        (changed("      0\n", "      0 8 2 float sum\n"), "", "expected one row on a line"),
        # numbers of ranks that are wrong or cannot be told
        (NCCL_LOG, "4:", "log:10: expected a list of 4 ranks, as given, got one of 2; remove `4:`"),
        (LISTLESS[2], "4:", "log:8: expected a busbw of 1.5 times algbw, as of an"),
        (without_ranks(nccl_log(64, {2**20: 60.0})), "", "ranks, got 1.968 to 1.969 times; give n before the name"),
        (without_ranks(nccl_log(8, {64: 60.0})), "", "got 0 to 2 times; give n before"),
        (LISTLESS[8].replace(" 130.49 ", " 200.00 "), "", "got 2.682 to 2 times"),
        (TWO_RUNS_WITHOUT_LISTS, "", "log:10: expected a busbw of 1.5 times algbw, as of an all-reduce on 4 ranks"),
        # something else
        (TWICE, "", "got rank 0 2 times before the first row: 2 separate jobs ran at once, as without MPI"),
        (OTHER, "", "expected rows of all-reduce times (redop sum), found those of all_gather or alltoall"),
        ("# Collective test starting: alltoall_perf\n" + EIGHT, "", "found those of alltoall;"),
        (
            re.sub(r" (\d+)  ( +)(\d+) ( +float)", lambda m: f" {m[1]} {int(m[3]) // 8} {m[4]}", EIGHT),
            "",
            "reduce_scatter",
        ),
        ('{"results": [{"size": 8}]}', "", "nccl-tests or rccl-tests: results[0].type: field required"),
        ('{"results": [', "", "expected JSON or CSV of nccl-tests or rccl-tests: "),
    ],
)
def test_a_log_that_cannot_be_read_is_told_in_one_line(tmp_path, text, ranks, message):
    """Those of a line are named by its number."""
    (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        read_log(f"{ranks}{tmp_path / 'log'}")
    assert "\n" not in str(caught.value)


def test_a_time_with_an_exponent_is_as_precise_as_its_bandwidth_allows(tmp_path):
    lines = nccl_log(2, {2**30: 9_587_131, 2**31: 19_174_262, 2**32: 38_348_524}).splitlines()
    (tmp_path / "log").write_text(
        "\n".join(lines).replace("19174262", "1.9e+07").replace("38348524", "3.8e+07").replace("18599034", "1.9e+07")
    )
    times = {size: ns for _, size, ns in read_log(tmp_path / "log").rows}
    assert times[2**30] == 9_587_131_000
    assert times[2**31] == pytest.approx(19_174_262_000, rel=0.02)
    assert times[2**32] == pytest.approx(38_348_524_000, rel=0.02)


def test_repeats_that_disagree_widen_the_table(tmp_path):
    log = nccl_log(16, US)
    for factor in (2.5, 40):
        log += nccl_log(16, {size: factor * us for size, us in US.items()})
    (tmp_path / "log").write_text(log)
    fabric = Fabric.from_nccl_tests(tmp_path / "log")
    assert fabric.all_reduce_ns(2**24, 16) == 370_000
    assert fabric.relative_errors(np.array([2**24]), 16) == pytest.approx(15.0)
    (sentence,) = fabric.assumed(np.array([2**24]), 16)
    assert sentence.startswith("repeated all-reduces on 16 ranks differ by up to 16 times from their median")


def test_a_second_run_with_some_of_the_sizes_widens_the_table_too(tmp_path):
    (tmp_path / "log").write_text(nccl_log(16, US) + nccl_log(16, {2**24: 2.35 * US[2**24]}))
    fabric = Fabric.from_nccl_tests(tmp_path / "log")
    assert fabric.relative_errors(np.array([2**22]), 16) == pytest.approx(1.35, rel=0.01)
    assert "differ by up to 2.35 times" in fabric.assumed(np.array([2**24]), 16)[0]


def test_the_only_message_size_is_for_its_bytes_if_it_is_large(tmp_path):
    for size, latency in ((2**25, False), (64, True)):
        (tmp_path / "log").write_text(nccl_log(16, {size: 225.0}))
        (piece,) = Fabric.from_nccl_tests(tmp_path / "log").segments(16)
        assert bool(piece.alpha_ns) == latency
