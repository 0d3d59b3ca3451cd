"""What a collective costs."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Fabric
from simulator.fabric import Linear, Processor, Sharing

tables = st.lists(
    st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)),
    min_size=1,
    max_size=8,
    unique_by=lambda row: row[0],
)


@given(tables)
def test_measured_sizes_cost_what_was_measured(table):
    fabric = Fabric.from_table([(4, size, ns) for size, ns in table])
    for size, ns in table:
        assert fabric.all_reduce_ns(size, 4) == ns


@given(tables, st.integers(0, 10**9))
def test_between_two_measured_sizes_the_cost_is_between_theirs(table, size):
    table = sorted(table)
    fabric = Fabric.from_table([(2, s, ns) for s, ns in table])
    for (small, a), (large, b) in itertools.pairwise(table):
        if small <= size <= large:
            assert min(a, b) <= fabric.all_reduce_ns(size, 2) <= max(a, b)


def test_lines_join_the_points_and_the_last_one_goes_on():
    fabric = Fabric.from_table([(2, 200, 30), (2, 100, 10), (2, 400, 40)])
    assert [fabric.all_reduce_ns(size, 2) for size in (0, 100, 150, 300, 400, 800)] == [
        10,
        10,
        20,
        35,
        40,
        60,
    ]


@given(tables, st.integers(1, 10**10))
def test_beyond_the_largest_size_nothing_gets_cheaper(table, more):
    size, ns = max(table)
    assert Fabric.from_table([(2, s, t) for s, t in table]).all_reduce_ns(size + more, 2) >= ns


def test_where_the_last_line_falls_time_grows_with_the_bytes():
    assert Fabric.from_table([(2, 100, 10), (2, 200, 9)]).all_reduce_ns(2000, 2) == 90


def test_of_repeated_measurements_the_median_counts():
    assert Fabric.from_table([(2, 8, ns) for ns in (9, 5, 70)]).all_reduce_ns(8, 2) == 9


def test_alone_in_the_world_nothing_is_sent():
    assert Fabric.from_table([(2, 8, 5)]).all_reduce_ns(8, 1) == 0


def test_a_ring_takes_2_n_minus_1_steps_of_an_nth():
    fabric = Fabric.from_alpha_beta(alpha_ns=10, bytes_per_s=1e9)
    assert fabric.all_reduce_ns(4000, 4) == 6 * 10 + 6 * 1000
    assert fabric.all_reduce_ns(0, 8) == 140


def test_a_world_size_that_was_not_measured_is_named():
    with pytest.raises(ValueError, match=re.escape("measured for [2, 4] ranks, not for 8")):
        Fabric.from_table([(2, 8, 5), (4, 8, 5)]).all_reduce_ns(8, 8)


def test_sharing_slows_in_between_the_measured_sizes_too():
    fabric = Fabric(
        alpha_beta=Fabric.from_alpha_beta(1, 1.0).alpha_beta,
        sharing=(Sharing(size_bytes=0, factor=1.0), Sharing(size_bytes=100, factor=2.0)),
    )
    assert [fabric.sharing_factor(size, 2) for size in (0, 50, 100, 500)] == [1.0, 1.5, 2.0, 2.0]
    assert fabric.sharing_factor(100, 1) == 1.0


def test_what_is_saved_is_loaded(tmp_path):
    fabric = Fabric.from_table([(2, 8, 5)], concurrency=2, source="here").model_copy(
        update={"processor": Processor(pack=Linear(fixed_ns=1.5), compute_slowdown=1.25)}
    )
    fabric.save(tmp_path / "fabric.json")
    assert Fabric.load(tmp_path / "fabric.json") == fabric


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read: No such file"),
        ("{", "invalid JSON"),
        ("{}", "all_reduce: expected measured times, or alpha_beta"),
        ('{"all_reduce": [{"world_size": 2, "size_bytes": -1, "ns": 5}]}', "all_reduce[0].size_bytes"),
        ('{"alpha_beta": {"alpha_ns": 1, "bytes_per_s": 0}}', "alpha_beta.bytes_per_s"),
        (
            '{"alpha_beta": {"alpha_ns": 1, "bytes_per_s": 1}, "processor": {"compute_slowdown": 0.5}}',
            "processor.compute_slowdown: input should be greater than or equal to 1",
        ),
    ],
)
def test_a_broken_file_names_file_field_and_reason(tmp_path, text, says):
    file = tmp_path / "fabric.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        Fabric.load(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


NCCL_LOG = """\
# nThread 1 nGpus 2 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#
# Using devices
#  Rank  0 Group  0 Pid   1234 on       host device  0 [0x07] NVIDIA A100-SXM4-40GB
#  Rank  1 Group  0 Pid   1234 on       host device  1 [0x0a] NVIDIA A100-SXM4-40GB
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1     8.65    0.00    0.00      0     8.41    0.00    0.00      0
        1024           256     float     sum      -1     9.25    0.11    0.11      0     9.10    0.11    0.11      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.0553
"""


def test_a_log_of_nccl_tests_is_a_table_of_its_world_size(tmp_path):
    (tmp_path / "log").write_text(NCCL_LOG)
    fabric = Fabric.from_nccl_tests(tmp_path / "log")
    assert (fabric.world_sizes, fabric.concurrency) == ([2], 1)
    assert [fabric.all_reduce_ns(size, 2) for size in (8, 516, 1024)] == [8650, 8950, 9250]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (NCCL_LOG.replace("Rank", "Rang"), "expected a line `#  Rank  0 ...` for every rank"),
        (NCCL_LOG.replace("sum", "none"), "expected rows of all-reduce times"),
        (None, "cannot be read"),
    ],
)
def test_another_file_is_told_from_a_log(tmp_path, text, says):
    if text is not None:
        (tmp_path / "log").write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)):
        Fabric.from_nccl_tests(tmp_path / "log")


@pytest.mark.parametrize("row", [(0, 8, 5), (2, -8, 5), (2, 8, -5), (2, 8, 5.5)])
def test_a_row_that_makes_no_sense_is_refused(row):
    with pytest.raises(ValueError, match=r"^fabric: all_reduce\[0\]"):
        Fabric.from_table([row])
