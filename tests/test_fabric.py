"""Costs of collectives: measured tables, logs of nccl-tests, extrapolation, merged fabrics."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Fabric
from simulator.fabric import (
    CONCURRENCY,
    Contention,
    Level,
    Linear,
    Processor,
    Segment,
    Sharing,
    Timing,
    Topology,
    slowdowns_of,
)
from simulator.fabric.extrapolation import (
    LATENCY_LAWS,
    extrapolated_table,
    growth_of,
    latency_law,
    table_between,
    table_beyond,
)
from simulator.fabric.link_sharing import relative_weights
from simulator.fabric.measured_tables import Table, relative_squared_error, segments
from simulator.fabric.nccl_tests import read_log

from .nccl_log import nccl_log

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


@pytest.mark.parametrize("last_ns", [9, 10])
def test_where_the_last_line_does_not_rise_time_grows_with_the_bytes(last_ns):
    assert Fabric.from_table([(2, 100, 10), (2, 200, last_ns)]).all_reduce_ns(2000, 2) == 10 * last_ns


def test_of_repeated_measurements_the_median_counts():
    assert Fabric.from_table([(2, 8, ns) for ns in (9, 5, 70)]).all_reduce_ns(8, 2) == 9


def test_alone_in_the_world_nothing_is_sent():
    assert Fabric.from_table([(2, 8, 5)]).all_reduce_ns(8, 1) == 0


def test_a_ring_takes_2_n_minus_1_steps_of_an_nth():
    fabric = Fabric.from_alpha_beta(alpha_ns=10, bytes_per_s=1e9)
    assert fabric.all_reduce_ns(4000, 4) == 6 * 10 + 6 * 1000
    assert fabric.all_reduce_ns(0, 8) == 140


def test_a_world_size_that_was_not_measured_is_named():
    with pytest.raises(ValueError, match=re.escape("of [2, 4], for which all-reduces were measured, got 8")):
        Fabric.from_table([(2, 8, 5), (4, 8, 5)]).all_reduce_ns(8, 8)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused(world_size):
    with pytest.raises(ValueError, match=f"^world_size: expected at least 1, got {world_size}$"):
        Fabric.from_alpha_beta(1, 1.0).all_reduce_ns(8, world_size)


def test_weights_between_the_measured_sizes_follow_a_power_of_the_size():
    rows = tuple(Sharing(size_bytes=size, factor=2.0, weight=weight) for size, weight in [(100, 1.0), (10_000, 10.0)])
    fabric = Fabric.from_alpha_beta(1, 1.0).model_copy(update={"sharing": rows})
    weights = [fabric.link_share(size, 4).weight for size in (1, 100, 400, 10_000, 10**6)]
    assert weights == pytest.approx([1.0, 1.0, 2.0, 10.0, 10.0])


@given(
    st.lists(st.integers(4, 10**8), max_size=6, unique=True).map(sorted),
    st.floats(0, 1),
    st.floats(1.25, 3),
)
def test_weights_are_found_from_the_slow_down_beside_a_larger_message(sizes, power, slow_down):
    """Every message takes a share of the link in proportion to its size to some power."""
    alone_ns = {size: 10.0 * size for size in sizes}
    two_ns = {size: slow_down * alone_ns[size] for size in sizes}
    beside_ns = {
        size: (1 + (slow_down - 1) * (larger / size) ** power) * alone_ns[size]
        for size, larger in itertools.pairwise(sizes)
    }
    expected = [(size / sizes[0]) ** power for size in sizes]
    assert relative_weights(alone_ns, two_ns, beside_ns) == pytest.approx(expected)


def test_sharing_slows_in_between_the_measured_sizes_too():
    rows = (Sharing(size_bytes=0, factor=1.0), Sharing(size_bytes=100, factor=2.0))
    fabric = Fabric.from_alpha_beta(1, 1.0).model_copy(update={"sharing": rows})
    assert [fabric.sharing_factor(size, 2, 4) for size in (0, 50, 100, 500)] == [1.0, 1.5, 2.0, 2.0]
    assert fabric.sharing_factor(100, 1, 4) == 1.0


CONTENTION = [
    Contention(size_bytes=0, running=2, compute=1.0, collective=2.0),
    Contention(size_bytes=100, running=2, compute=2.0, collective=4.0),
    Contention(size_bytes=50, running=4, compute=3.0),
]


def test_contention_is_read_between_sizes_and_at_the_next_smaller_number_in_flight():
    found = slowdowns_of(CONTENTION, [0, 50, 500], most=5)
    assert found.compute == ((1.0, 1.0, 1.0, 3.0, 3.0), (1.5, 1.5, 1.5, 3.0, 3.0), (2.0, 2.0, 2.0, 3.0, 3.0))
    assert [row[:4] for row in found.collective] == [(2, 2, 2, 1), (3, 3, 3, 1), (4, 4, 4, 1)]


@given(st.permutations(CONTENTION), st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(1, 6))
def test_contention_stays_within_what_was_measured_whatever_the_order_of_the_rows(rows, sizes, most):
    found = slowdowns_of(rows, sizes, most)
    assert found == slowdowns_of(CONTENTION, sizes, most)
    assert all(1 <= factor <= 3 for row in found.compute for factor in row)
    assert all(1 <= factor <= 4 for row in found.collective for factor in row)
    assert slowdowns_of([], sizes, most) is slowdowns_of([Contention(size_bytes=7)], sizes, most) is None


def test_collectives_on_described_links_share_the_bytes_a_second_and_not_the_latency():
    fabric = Fabric.from_alpha_beta(1000, 1e9)
    alone = 2 * 1000 + 8000
    assert fabric.all_reduce_ns(8000, 2) == alone
    assert fabric.sharing_factor(8000, 3, 2) == (2 * 1000 + 3 * 8000) / alone
    assert fabric.sharing_factor(0, 3, 2) == 1.0


def test_measured_collectives_do_not_slow_each_other_unless_that_was_measured():
    assert Fabric.from_table([(2, 8, 5)]).sharing_factor(8, 2, 2) == 1.0


@given(tables, st.lists(st.integers(0, 10**10), min_size=1, max_size=5))
def test_many_sizes_cost_what_each_costs(table, sizes):
    fabric = Fabric.from_table([(4, size, ns) for size, ns in table])
    many = fabric.all_reduce_costs_ns(np.array(sizes), 4)
    assert many.dtype == np.int64
    assert many.tolist() == [fabric.all_reduce_ns(size, 4) for size in sizes]


@given(tables, st.integers(0, 10**9), st.floats(1, 10))
def test_a_slow_link_slows_the_bytes_and_not_the_latency(table, size, slow):
    even = Fabric.from_table([(4, size, ns) for size, ns in table])
    uneven = even.model_copy(update={"slow_link": slow})
    assert uneven.all_reduce_ns(0, 4) == even.all_reduce_ns(0, 4)
    assert uneven.all_reduce_ns(size, 4) >= even.all_reduce_ns(size, 4)
    assert uneven.all_reduce_ns(size, 1) == 0


def test_a_link_twice_as_slow_doubles_what_the_bytes_cost():
    fabric = Fabric.from_alpha_beta(10, 1e9).model_copy(update={"slow_link": 2.0})
    assert fabric.all_reduce_ns(4000, 4) == 6 * 10 + 2 * 6 * 1000


def test_a_scaled_fabric_scales_every_collective_and_again_what_is_scaled():
    fabric = Fabric(
        all_reduce=(Timing(world_size=2, size_bytes=8, ns=100),),
        broadcast=(Timing(world_size=2, size_bytes=8, ns=50),),
    )
    twice = fabric.scaled(4.0).scaled(0.5)
    assert (twice.all_reduce_ns(8, 2), twice.broadcast_ns(8, 2)) == (200, 100)
    with pytest.raises(ValueError, match="factor: expected a positive number"):
        fabric.scaled(0)


def test_a_copy_does_not_keep_the_costs_of_what_it_was_copied_from():
    fabric = Fabric.from_table([(2, 8, 5)])
    assert fabric.all_reduce_ns(8, 2) == 5
    other = fabric.model_copy(update={"all_reduce": (Timing(world_size=2, size_bytes=8, ns=7),)})
    assert other.all_reduce_ns(8, 2) == 7


@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_a_broadcast_is_measured_or_described_or_bounded_by_an_all_reduce(library):
    measured = Fabric(
        all_reduce=tuple(Timing(world_size=n, size_bytes=8, ns=9) for n in (2, 4)),
        broadcast=(Timing(world_size=2, size_bytes=8, ns=5),),
        topology=Topology(levels=(Level(name="link", latency_ns=3, bytes_per_s=1e9),)),
        library=library,
    )
    assert [measured.broadcast_ns(8, n) for n in (1, 2, 4)] == [0, 5, 9]
    assert measured.broadcast_ns(0, 8) == (7 if library == "nccl" else 3) * 3


def test_the_error_grows_with_the_distance_from_the_measured_world_sizes():
    rows = tuple(Timing(world_size=n, size_bytes=8, ns=ns, spread=0.02) for n, ns in ((2, 5), (4, 5), (8, 12)))
    fabric = Fabric(all_reduce=rows, extrapolate=True)
    doublings = [fabric.relative_error(n) for n in (1, 8, 16, 32, 64)]
    missed = 1 - Fabric(all_reduce=rows[:2], extrapolate=True).all_reduce_ns(8, 8) / 12
    assert doublings == pytest.approx([0.0, 0.02, missed + 0.02, missed + 0.07, missed + 0.12])
    for fewer in (rows[1:2], rows[:2]):  # one smaller world size does not show how costs grow
        two = Fabric(all_reduce=fewer, extrapolate=True)
        assert [two.relative_error(n) for n in (8, 16, 32)] == pytest.approx([0.16, 0.21, 0.26])
    assert fabric.relative_error(6) == pytest.approx(0.16)
    assert Fabric.from_alpha_beta(1, 1e9).relative_error(8) == 0.14


def test_what_is_saved_is_loaded(tmp_path):
    fabric = Fabric.from_table([(2, 8, 5)], concurrency=2, source="here").model_copy(
        update={"processor": Processor(pack=Linear(fixed_ns=1.5), contention=(Contention(compute=1.25),))}
    )
    fabric.all_reduce_ns(8, 2)
    fabric.save(tmp_path / "fabric.json")
    assert Fabric.load(tmp_path / "fabric.json") == fabric


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "invalid JSON"),
        ("{}", "all_reduce: expected measured times or a topology"),
        ('{"all_reduce": [{"world_size": 2, "size_bytes": -1, "ns": 5}]}', "all_reduce[0].size_bytes"),
        (
            '{"topology": {"levels": [{"name": "x", "latency_ns": 1, "bytes_per_s": 0}]}}',
            "topology.levels[0].bytes_per_s",
        ),
        (
            '{"all_reduce": [{"world_size": 2, "size_bytes": 1, "ns": 5}],'
            ' "processor": {"contention": [{"compute": 0.5}]}}',
            "processor.contention[0].compute: input should be greater than or equal to 1",
        ),
    ],
)
def test_a_broken_file_names_file_field_and_reason(tmp_path, text, message):
    file = tmp_path / "fabric.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Fabric.load(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize("row", [(0, 8, 5), (2, -8, 5), (2, 8, -5), (2, 8, 5.5)])
def test_a_row_that_makes_no_sense_is_refused(row):
    with pytest.raises(ValueError, match=r"^fabric: all_reduce\[0\]"):
        Fabric.from_table([row])


def table_of(protocols, sizes) -> Table:
    """The table of a library that uses protocol `i` (latency, slope) for the i-th list of sizes."""
    rows = [(size, a + b * size) for (a, b), part in zip(protocols, sizes, strict=True) for size in part]
    return Table(np.array([size for size, _ in rows]), np.array([ns for _, ns in rows]))


@st.composite
def switching(draw):
    """Protocols, each with half the slope and ten times the latency of the one before; three sizes or more each."""
    count = draw(st.integers(1, 3))
    latency, slope = draw(st.integers(100, 10_000)), draw(st.floats(0.01, 10))
    protocols = [(latency * 10.0**step, slope / 2**step) for step in range(count)]
    lengths = draw(st.lists(st.integers(3, 5), min_size=count, max_size=count))
    exponents = iter(range(sum(lengths)))
    sizes = [[int(latency / slope) * 2 ** next(exponents) + 1 for _ in range(length)] for length in lengths]
    return protocols, sizes


@given(switching())
def test_the_protocols_behind_a_table_are_found(protocols_and_sizes):
    """The noise is set far below what rounding to a float leaves, so every switch counts."""
    protocols, sizes = protocols_and_sizes
    found = segments(table_of(protocols, sizes), noise=1e-6)
    assert [piece.from_bytes for piece in found] == [part[0] for part in sizes]
    for piece, (latency, slope) in zip(found, protocols, strict=True):
        assert (piece.alpha_ns, piece.ns_per_byte) == pytest.approx((latency, slope), rel=1e-5)


def errors(found, table: Table) -> float:
    ends = [piece.from_bytes for piece in found[1:]] + [np.inf]
    parts = [
        (p, (table.sizes_bytes >= p.from_bytes) & (table.sizes_bytes < end))
        for p, end in zip(found, ends, strict=True)
    ]
    return sum(relative_squared_error(p, table.sizes_bytes[part], table.ns[part]) for p, part in parts)


@given(tables)
def test_segments_miss_no_more_than_any_single_line(rows):
    table = Table(*(np.array(column) for column in zip(*sorted(rows), strict=True)))
    found = segments(table)
    (single,) = segments(table, noise=1e9)
    assert errors(found, table) <= relative_squared_error(single, table.sizes_bytes, table.ns) * (1 + 1e-9)
    assert all(piece.alpha_ns >= 0 and piece.ns_per_byte >= 0 for piece in found)


def test_noise_is_no_protocol():
    sizes = [2**exponent for exponent in range(10, 26)]
    noisy = [(5000 + size / 10) * (1.02 if exponent % 2 else 0.98) for exponent, size in enumerate(sizes)]
    assert len(segments(Table(np.array(sizes), np.array(noisy)))) == 1


SIZES = np.array([4**exponent for exponent in range(2, 15)])


def of_law(law: str, world_size: int) -> Table:
    """What a fabric costs that follows a law exactly."""
    latency = 5000 * LATENCY_LAWS[law](world_size)
    return Table(SIZES, np.rint(latency + SIZES * 2 * (world_size - 1) / world_size / 10))


LIBRARY_OF = {"tree": "nccl", "ring": "gloo"}
"""A library whose latency grows by the law if a single world size was measured."""


@given(st.sampled_from(list(LATENCY_LAWS)), st.integers(2, 64), st.integers(2, 512))
def test_a_fabric_that_follows_a_law_is_extrapolated(law, measured, world_size):
    table = {measured: of_law(law, measured)}
    extrapolated = table_beyond(table, measured, world_size, growth_of(table, LIBRARY_OF[law], None))
    np.testing.assert_allclose(extrapolated.ns, of_law(law, world_size).ns, rtol=1e-3)


@given(
    st.sampled_from(list(LATENCY_LAWS)),
    st.sampled_from(["nccl", "gloo"]),
    st.sets(st.sampled_from([2, 3, 4, 8, 16]), min_size=2),
)
def test_the_law_of_the_latency_is_read_from_the_data(law, library, world_sizes):
    """Tables that follow the law show its growth, so their weight changes nothing."""
    measured = {n: of_law(law, n) for n in sorted(world_sizes)}
    assert latency_law(measured, "neither") == law
    extrapolated = extrapolated_table(measured, 64, growth_of(measured, library, None))
    np.testing.assert_allclose(extrapolated.ns, of_law(law, 64).ns, rtol=2e-3)


NODES = Topology(
    levels=(
        Level(name="nvlink", members=8, latency_ns=3000, bytes_per_s=300e9),
        Level(name="network", latency_ns=14_000, bytes_per_s=100e9),
    )
)


@given(st.sampled_from([16, 32, 64]), st.integers(0, 10**9), st.floats(0.3, 3))
def test_described_links_add_the_latency_of_their_hops_and_slow_bytes_by_the_ratio_of_their_rates(ranks, size, fast):
    """The table of one node reaches `fast` times the described rate; trees over the nodes have log2(nodes) levels."""
    alpha_ns, ns_per_byte = 20_000, 2 * 7 / 8 / 300 / fast
    sizes = [2**exponent for exponent in range(10, 31, 2)]
    table = Fabric.from_table([(8, each, round(alpha_ns + ns_per_byte * each)) for each in sizes])
    fabric = table.model_copy(update={"extrapolate": True, "topology": NODES})
    hops_ns = 2 * 14_000 * (ranks // 8).bit_length() - 2 * 14_000
    slower = 3 * (1 - 1 / ranks) / (1 - 1 / 8)
    size = max(size, sizes[0])
    assert fabric.all_reduce_ns(size, ranks) == pytest.approx(
        alpha_ns + hops_ns + ns_per_byte * slower * size, rel=0.02
    )


@given(st.floats(0.5, 2))
def test_nccls_tables_count_as_much_as_the_law_and_gloos_not_at_all(shown):
    """From 2 to 4 ranks the bytes grew `shown` times as much as on a ring: 1.5 times."""
    small = of_law("ring", 4).ns / (1 + shown * 0.5)
    measured = {2: Table(SIZES, small), 4: Table(SIZES, of_law("ring", 4).ns)}
    large = [
        extrapolated_table(measured, 8, growth_of(measured, library, None)).ns[-1] / measured[4].ns[-1]
        for library in ("nccl", "gloo")
    ]
    relative = 1 - 1 / (1 + shown * 0.5)
    assert large == [pytest.approx(1 + (0.5 + 0.5 * relative * 3) / 6, rel=1e-2), pytest.approx(7 / 6, rel=1e-2)]


def test_with_one_world_size_measured_the_library_says_how_latency_grows():
    table = Fabric.from_table([(2, 0, 1000), (2, 10, 1000)])
    grows = {lib: table.model_copy(update={"library": lib, "extrapolate": True}) for lib in ("nccl", "gloo")}
    assert {lib: fabric.all_reduce_ns(8, 16) for lib, fabric in grows.items()} == {"nccl": 4000, "gloo": 15_000}
    assert grows["nccl"].algorithm_for(8, 16) == "extrapolated"
    assert grows["nccl"].algorithm_for(8, 2) == "measured"


@given(tables, tables, st.integers(3, 7), st.integers(0, 10**9))
def test_between_two_measured_world_sizes_the_cost_is_between_theirs(two, eight, world_size, size):
    measured = Fabric.from_table([(n, *row) for n, rows in ((2, two), (8, eight)) for row in rows])
    fabric = measured.model_copy(update={"extrapolate": True})
    ends = [max(1, fabric.all_reduce_ns(row[0], n)) for row in two + eight for n in (2, 8)]
    at = min(max(size, min(two + eight)[0]), max(two + eight)[0])
    assert min(ends) <= max(1, fabric.all_reduce_ns(at, world_size)) <= max(ends)


def test_between_two_world_sizes_time_follows_a_power_of_the_ranks():
    two, eight = (Table(np.array([8]), np.array([ns])) for ns in (100.0, 400.0))
    assert table_between({2: two, 8: eight}, 2, 8, 4).ns.tolist() == [200]


def test_a_world_of_one_rank_is_not_extrapolated():
    one_rank = Fabric.from_table([(1, 8, 5)]).model_copy(update={"extrapolate": True})
    with pytest.raises(ValueError, match=re.escape("of [1], for which all-reduces were measured, got 4")):
        one_rank.all_reduce_ns(8, 4)


@given(st.integers(2, 64), st.integers(0, 10**7))
def test_an_all_gather_receives_every_other_ranks_bytes_however_all_reduces_are_done(world_size, size_bytes):
    """Switches that add up are no help with it: nothing is added up."""
    links = Topology(levels=(Level(name="nic", latency_ns=10, bytes_per_s=1e9, reduces=True),))
    fabric = Fabric.from_topology(links, algorithm="in_network")
    gathered = fabric.all_gather_costs_ns(np.array([size_bytes]), world_size)[0]
    assert gathered >= (world_size - 1) * size_bytes - 1
    table = Fabric.from_table([(world_size, 0, 100), (world_size, 10**9, 10**9 + 100)])
    assert table.all_gather_costs_ns(np.array([size_bytes]), world_size)[0] == (world_size * size_bytes + 100) // 2


def test_a_broadcast_grows_to_another_world_size_as_the_all_reduce_does():
    rows = [(2, 0, 100), (2, 1000, 1100), (4, 0, 200), (4, 1000, 1700)]
    all_reduces = tuple(Timing(world_size=n, size_bytes=size, ns=ns) for n, size, ns in rows)
    broadcasts = tuple(row.model_copy(update={"ns": row.ns // 2}) for row in all_reduces)
    fabric = Fabric(all_reduce=all_reduces, broadcast=broadcasts, extrapolate=True)
    for size in (0, 500, 1000, 5000):
        assert fabric.broadcast_ns(size, 8) == pytest.approx(fabric.all_reduce_ns(size, 8) / 2, rel=0.01)


@given(st.dictionaries(st.integers(2, 64), tables, min_size=1, max_size=4), st.integers(0, 10**9))
def test_a_merged_fabric_costs_at_each_world_size_what_the_one_that_measured_it_costs(measured, size):
    fabrics = [Fabric.from_table([(n, *row) for row in rows]) for n, rows in measured.items()]
    merged = Fabric.merged(*fabrics)
    assert merged.world_sizes == sorted(measured)
    for world_size, alone in zip(measured, fabrics, strict=True):
        assert merged.all_reduce_ns(size, world_size) == alone.all_reduce_ns(size, world_size)
        assert merged.broadcast_ns(size, world_size) == alone.broadcast_ns(size, world_size)


def test_a_merged_fabric_has_the_tables_of_all_the_only_links_and_the_rest_of_the_first():
    first, second = (
        Fabric(
            all_reduce=(Timing(world_size=n, size_bytes=8, ns=n),),
            broadcast=(Timing(world_size=n, size_bytes=8, ns=n),),
            sharing=(Sharing(size_bytes=0, factor=1 + n / 10),),
            processor=Processor(launch_ns=n),
            source=f"{n} ranks",
        )
        for n in (2, 4)
    )
    links = Fabric.from_alpha_beta(1, 1e9)
    merged = Fabric.merged(first.model_copy(update={"extrapolate": True}), second, links)
    assert (merged.all_reduce, merged.broadcast) == (
        first.all_reduce + second.all_reduce,
        first.broadcast + second.broadcast,
    )
    assert (merged.processor, merged.sharing, merged.extrapolate) == (first.processor, first.sharing, True)
    assert (merged.topology, merged.algorithm) == (links.topology, "library")
    assert merged.source == "2 ranks; 4 ranks"


TWO, FOUR = (Fabric.from_table([(n, 8, 5)], source=f"log of {n}") for n in (2, 4))
LINKS = Fabric.from_alpha_beta(1, 1e9)


@pytest.mark.parametrize(
    ("fabrics", "message"),
    [
        ([], "fabrics: expected at least one to merge, got none"),
        ([TWO, [FOUR]], "fabrics[1]: expected a Fabric, got [Fabric"),
        (
            [TWO, FOUR, Fabric.from_table([(2, 9, 6)])],
            "expected world sizes that no other fabric measured, got 2, which fabrics[0] (log of 2) measured too",
        ),
        (
            [TWO, FOUR.scaled(2)],
            "fabrics[1] (log of 4): scale: expected 1.0 as in fabrics[0] (log of 2), got 2.0",
        ),
        ([TWO, FOUR.model_copy(update={"slow_link": 2.0})], "slow_link: expected 1.0 as in"),
        ([TWO, FOUR.model_copy(update={"library": "gloo"})], "concurrency: expected 1 as in"),
        ([LINKS, TWO, LINKS], "fabrics[2]: topology: expected none, because fabrics[0] describes links already"),
    ],
)
def test_fabrics_that_do_not_fit_together_are_named(fabrics, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Fabric.merged(*fabrics)
    assert "\n" not in str(caught.value)


@given(st.sampled_from(list(CONCURRENCY)), st.sampled_from(list(CONCURRENCY)), st.none() | st.integers(1, 4))
def test_concurrency_follows_the_library_unless_it_was_set_even_through_a_file(tmp_path, library, changed, given):
    def expected(library: str) -> int:
        return CONCURRENCY[library] if given is None else given

    fabric = Fabric.from_topology(LINKS.topology, library=library, concurrency=given)
    fabric.save(tmp_path / "fabric.json")
    for one in (fabric, Fabric.load(tmp_path / "fabric.json"), fabric.scaled(2)):
        assert one.concurrency == expected(library)
        assert one.model_copy(update={"library": changed}).concurrency == expected(changed)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling", "hierarchical", "in_network"])
def test_tables_alone_have_no_choice_of_algorithm(algorithm):
    with pytest.raises(
        ValueError, match=f"algorithm: expected a topology for {algorithm}, got measured tables alone"
    ):
        Fabric(all_reduce=TWO.all_reduce, algorithm=algorithm)
    if algorithm != "in_network":
        both = Fabric(all_reduce=TWO.all_reduce, topology=LINKS.topology, algorithm=algorithm)
        assert (both.algorithm_for(8, 2), both.algorithm_for(8, 4)) == ("measured", algorithm)


@given(st.integers(2, 64), st.integers(1, 10**6), st.floats(1e6, 1e12), st.floats(1, 4), st.floats(0.1, 10))
def test_a_ring_is_one_segment_of_its_latency_and_bandwidth(world_size, alpha, rate, slow, scale):
    fabric = Fabric.from_alpha_beta(alpha, rate).model_copy(update={"slow_link": slow, "scale": scale})
    (segment,) = fabric.segments(world_size)
    steps = 2 * (world_size - 1)
    assert segment.alpha_ns == pytest.approx(scale * steps * alpha, rel=1e-3)
    assert segment.ns_per_byte == pytest.approx(scale * slow * steps / world_size * 1e9 / rate, rel=1e-3)


def test_segments_of_a_table_are_those_of_its_protocols():
    protocols = [(1000, 1.0), (9000, 0.1)]
    table = table_of(protocols, [(64, 256, 1024), (1 << 16, 1 << 18, 1 << 20)])
    fabric = Fabric.from_table(list(zip([2] * 6, table.sizes_bytes.tolist(), map(round, table.ns), strict=True)))
    found = fabric.segments(2)
    assert [segment.from_bytes for segment in found] == [64, 1 << 16]
    for segment, (alpha, slope) in zip(found, protocols, strict=True):
        assert segment[1:] == pytest.approx((alpha, slope), rel=0.01)
    assert fabric.segments(1) == (Segment(0, 0.0, 0.0),)
    with pytest.raises(ValueError, match=re.escape("of [2], for which all-reduces were measured, got 4")):
        fabric.segments(4)


def test_where_costs_come_from():
    fabric = Fabric(all_reduce=TWO.all_reduce, topology=LINKS.topology)
    assert [fabric.origin(n) for n in (1, 2, 4)] == ["none", "measured", "described"]
    assert fabric.model_copy(update={"extrapolate": True}).origin(4) == "extrapolated"


@given(st.integers(0, 30_000), st.floats(1.0, 700.0), st.sampled_from([8, 16, 64]))
def test_what_an_idle_link_lets_pass_at_once_is_no_latency_that_grows_with_the_ranks(burst, ns_per_byte, world_size):
    """After a pause, a token-bucket filter lets a burst pass for free, so times of small messages bend upwards."""
    sizes = [16_000, 32_000, 64_000, 128_000, 256_000]

    def timings(ranks: int) -> list[Timing]:
        factor = 2 * (ranks - 1) / ranks * ns_per_byte
        return [
            Timing(world_size=ranks, size_bytes=size, ns=round(factor * max(size - burst, 1_000))) for size in sizes
        ]

    fabric = Fabric(all_reduce=(*timings(2), *timings(4)), library="gloo", extrapolate=True)
    costs = [fabric.all_reduce_ns(size, world_size) for size in sizes[1:]]
    ideal = [2 * (world_size - 1) / world_size * ns_per_byte * (size - burst) for size in sizes[1:]]
    assert costs == sorted(costs)
    assert costs[1:] == pytest.approx(ideal[1:], rel=0.25)
