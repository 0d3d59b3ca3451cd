"""Topology files, and which levels a world size uses."""

import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric
from ddplab.simulator.fabric import Level, Topology
from ddplab.simulator.fabric.topology import load_topology

from ..topology_files import save_topology

CLUSTER = """\
source: data sheet
levels:
  nic:    {of: nvlink, members: 16, latency_us: 6.0, gb_per_s: 50}
  nvlink: {members: 8, latency_us: 2.5, gb_per_s: 300}
  spine:  {of: nic, latency_us: 9, gb_per_s: 400}
in_network: [nic]
"""


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


def test_a_file_is_read_from_the_inside_out(cluster):
    assert load_topology(cluster) == Topology(
        source="data sheet",
        levels=(
            Level(name="nvlink", members=8, latency_ns=2500, bytes_per_s=300e9),
            Level(name="nic", members=16, latency_ns=6000, bytes_per_s=50e9, reduces=True),
            Level(name="spine", latency_ns=9000, bytes_per_s=400e9),
        ),
    )


def test_a_fabric_is_loaded_from_a_topology_file(cluster):
    fabric = Fabric.load(cluster)
    assert fabric == Fabric.from_topology(cluster) == Fabric.from_topology(load_topology(cluster))
    assert (fabric.source, fabric.concurrency, fabric.library) == ("data sheet", 1, "nccl")
    assert fabric.world_sizes == []


@st.composite
def topologies(draw):
    """Topology(levels=(Level(name="a", members=8, ...), Level(name="b", ...)))"""
    names = draw(st.lists(st.text("abc: #'yn1-", min_size=1, max_size=4), min_size=1, max_size=4, unique=True))
    inner = [draw(st.integers(1, 64)) for _ in names[1:]]
    levels = [
        Level(
            name=name,
            members=members,
            latency_ns=draw(st.integers(0, 10**9)),
            bytes_per_s=float(draw(st.integers(1, 10**13))),
            bytes_per_s_by_members=draw(st.dictionaries(st.integers(2, 9), st.integers(1, 10**13).map(float))),
            reduces=draw(st.booleans()),
        )
        for name, members in zip(names, [*inner, draw(st.none() | st.integers(1, 64))], strict=True)
    ]
    return Topology(levels=tuple(levels), source=draw(st.text(max_size=9)))


@given(st.integers(2, 9), st.dictionaries(st.integers(2, 9), st.integers(1, 10**6)))
def test_direct_links_have_the_rate_of_the_members_in_use(ranks, rates):
    """Only ranks that take part send, on the links among them."""
    by_members = {members: 1e6 * rate for members, rate in rates.items()}
    level = Level(name="mesh", latency_ns=0, bytes_per_s=1e9, bytes_per_s_by_members=by_members)
    fabric = Fabric.from_topology(Topology(levels=(level,)), algorithm="ring")
    seconds = 2 * (ranks - 1) / ranks * 10**9 / by_members.get(ranks, 1e9)
    assert fabric.all_reduce_ns(10**9, ranks) == pytest.approx(seconds * 1e9)


@given(topologies())
def test_what_is_saved_is_loaded(tmp_path_factory, topology):
    path = tmp_path_factory.getbasetemp() / "topology.yaml"
    save_topology(topology, path)
    assert load_topology(path) == topology


@given(topologies())
def test_a_fabric_of_links_is_loaded_as_it_was_saved(tmp_path_factory, topology):
    """JSON turns integer keys into text, so the rates by number of members could not be read back."""
    path = tmp_path_factory.getbasetemp() / "fabric.json"
    fabric = Fabric.from_topology(topology)
    fabric.save(path)
    assert Fabric.load(path) == fabric


@pytest.mark.parametrize(
    ("world_size", "members"),
    [(1, [1, 1, 1]), (5, [5, 1, 1]), (8, [8, 1, 1]), (24, [8, 3, 1]), (128, [8, 16, 1]), (1280, [8, 16, 10])],
)
def test_ranks_fill_the_innermost_groups_first(cluster, world_size, members):
    assert [level.members for level in load_topology(cluster).in_use(world_size)] == members


@given(topologies(), st.integers(1, 200))
def test_the_members_in_use_are_the_ranks(topology, world_size):
    try:
        levels = topology.in_use(world_size)
    except ValueError as error:
        assert str(error).startswith("world_size: ")  # noqa: PT017  # either outcome is right
    else:
        assert prod(level.members for level in levels) == world_size
        assert all(
            used.members <= (level.members or world_size) for used, level in zip(levels, topology.levels, strict=True)
        )


@pytest.mark.parametrize(
    ("world_size", "message"),
    [
        (12, "expected a multiple of 8 above 8 ranks, the size of a group of level nvlink"),
        (200, "expected a multiple of 128 above 128 ranks, the size of a group of level nic"),
    ],
)
def test_a_partly_filled_group_is_refused(cluster, world_size, message):
    with pytest.raises(ValueError, match=rf"^world_size: {message} \(spine x any number of nic x 16 of nvlink x 8\)"):
        load_topology(cluster).in_use(world_size)


def test_more_ranks_than_there_is_room_for_are_refused():
    two = Level(name="pair", members=2, latency_ns=0, bytes_per_s=1.0)
    with pytest.raises(ValueError, match=re.escape("expected at most 2 ranks (pair x 2), got 4")):
        Fabric.from_topology(Topology(levels=(two,))).all_reduce_ns(8, 4)


LINK = "{latency_us: 1, gb_per_s: 1}"


def on(level: str) -> str:
    return f"{{of: {level}, latency_us: 1, gb_per_s: 1}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("levels: [", "not YAML: line 2: did not find expected node content"),
        ("levels: {a: {gb_per_s: 1}}", "not a topology: levels.a.latency_us: field required"),
        (f"levels: {{a: {LINK}, a: {LINK}}}", "not YAML: line 1: a occurs twice"),
        (f"levels: {{a: {LINK}, b: {LINK}}}", "levels.b.of: expected one level at most with each `of`, got both"),
        (f"levels: {{a: {LINK}, b: {on('x')}}}", "levels.b.of: expected the name of a level (a, b), got x"),
        (f"levels: {{z: {LINK}, a: {on('b')}, b: {on('a')}}}", "levels.a.of: expected a chain that ends at a level"),
        (f"levels: {{a: {LINK}, b: {on('a')}}}", "levels.a.members: expected a count, got none"),
        ("levels: {a: {latency_us: 1, gb_per_s: {2: 1}}}", "levels.a.gb_per_s: expected rates by the number of"),
        (f"levels: {{a: {LINK}}}\nin_network: [b]", "in_network: expected names of levels (a), got b"),
    ],
)
def test_a_broken_file_names_file_field_and_reason(tmp_path, text, message):
    path = tmp_path / "links.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Fabric.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
