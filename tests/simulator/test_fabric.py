"""Fabrics: made from rings and tables, scaled, merged, saved and loaded."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric
from ddplab.simulator.fabric import CONCURRENCY, Linear, Processor, Sharing, Timing
from ddplab.simulator.workload.roofline import find_device

from ..strategies import tables


def test_the_scale_of_a_fabric_applies_to_every_collective():
    fabric = Fabric(
        all_reduce=(Timing(world_size=2, size_bytes=8, ns=100),),
        broadcast=(Timing(world_size=2, size_bytes=8, ns=50),),
        scale=2.0,
    )
    assert (fabric.all_reduce_ns(8, 2), fabric.broadcast_ns(8, 2)) == (200, 100)


def test_what_is_saved_is_loaded(tmp_path):
    measured = Fabric.from_table([(2, 8, 5)], concurrency=2, source="here")
    measured = measured.with_processor(pack=Linear(fixed_ns=1.5), slow_down=1.25)
    assert measured.all_reduce_ns(8, 2) == 5, "a cached cost is no part of the file"
    for fabric in (measured, Fabric.from_topology(LINKS.topology, library="gloo", algorithm="tree")):
        fabric.save(tmp_path / "fabric.json")
        assert Fabric.load(tmp_path / "fabric.json") == fabric


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (Fabric.load, "{", "invalid JSON"),
        (Fabric.load, "{}", "all_reduce: expected measured times or a topology"),
        (
            lambda path: find_device(str(path)),
            '{"name": "d", "flops_per_s": -1, "bytes_per_s": 1}',
            "flops_per_s: input should be greater than",
        ),
    ],
)
def test_a_broken_file_names_file_field_and_reason(tmp_path, read, text, message):
    """Of links or of a data sheet; `test_readers` damages files of any kind."""
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(ValueError, match=f"^{tmp_path}/file.json: .*{message}"):
        read(tmp_path / "file.json")


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
        ([TWO, FOUR, TWO], "expected world sizes that no other fabric measured, got 2, which fabrics[0] (log of 2)"),
        (
            [TWO, FOUR.model_copy(update={"scale": 2.0})],
            "fabrics[1] (log of 4): scale: expected 1.0 as in fabrics[0] (log of 2), got 2.0",
        ),
        ([TWO, FOUR.model_copy(update={"slow_link": 2.0})], "slow_link: expected 1.0 as in"),
        (
            [TWO, FOUR.model_copy(update={"library": "gloo"})],
            "fabrics[1] (log of 4): library: expected nccl as in fabrics[0] (log of 2), got gloo; leave one "
            "out, or correct it",
        ),
        (
            [TWO, LINKS, FOUR.model_copy(update={"concurrency": 2})],
            "concurrency: expected 1 as in fabrics[0] (log of",
        ),
        ([Fabric.from_alpha_beta(1, 1e9, concurrency=3), TWO], "concurrency: expected 3 as in fabrics[0], got 1"),
        ([LINKS, TWO, LINKS], "fabrics[2]: topology: expected none, because fabrics[0] describes links already"),
    ],
)
def test_fabrics_that_do_not_fit_together_are_named(fabrics, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        Fabric.merged(*fabrics)
    assert "\n" not in str(caught.value)


@given(
    st.permutations(range(3)), st.sampled_from(list(CONCURRENCY)), st.none() | st.integers(1, 4), st.integers(0, 2)
)
def test_links_take_library_and_concurrency_of_the_tables_in_any_order(order, library, stated, costly):
    """A YAML file of links states neither, so measurements of any library merge with it, with all that they have."""
    changes = {"library": library} | ({} if stated is None else {"concurrency": stated})
    fabrics = [LINKS, *(one.model_copy(update=changes) for one in (TWO, FOUR))]
    sharing = (Sharing(size_bytes=0, factor=1.5),)
    fabrics[costly] = fabrics[costly].with_processor(launch_ns=7).model_copy(update={"sharing": sharing})
    merged = Fabric.merged(*(fabrics[index] for index in order))
    assert (merged.library, merged.concurrency) == (library, CONCURRENCY[library] if stated is None else stated)
    assert (merged.processor.launch_ns, merged.sharing, merged.topology) == (7, sharing, LINKS.topology)
    assert merged.world_sizes == [2, 4]
    assert merged.origin(3) == "described"


@given(st.sampled_from(list(CONCURRENCY)), st.sampled_from(list(CONCURRENCY)), st.none() | st.integers(1, 4))
def test_concurrency_follows_the_library_unless_it_was_set_even_through_a_file(tmp_path, library, changed, given):
    def expected(library: str) -> int:
        return CONCURRENCY[library] if given is None else given

    fabric = Fabric.from_topology(LINKS.topology, library=library, concurrency=given)
    fabric.save(tmp_path / "fabric.json")
    for one in (fabric, Fabric.load(tmp_path / "fabric.json"), fabric.model_copy(update={"scale": 2.0})):
        assert one.concurrency == expected(library)
        assert one.model_copy(update={"library": changed}).concurrency == expected(changed)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "in_network"])
def test_tables_alone_have_no_choice_of_algorithm(algorithm):
    with pytest.raises(ValueError, match=f"algorithm: expected a topology for {algorithm}, got measured tables"):
        Fabric(all_reduce=TWO.all_reduce, algorithm=algorithm)
    if algorithm != "in_network":
        both = Fabric(all_reduce=TWO.all_reduce, topology=LINKS.topology, algorithm=algorithm)
        assert (both.origin(2), both.origin(4)) == ("measured", "described")


@given(st.integers(2, 64), st.integers(1, 10**6), st.floats(1e6, 1e12), st.floats(1, 4), st.floats(0.1, 10))
def test_a_ring_is_one_segment_of_its_latency_and_bandwidth(world_size, alpha, rate, slow, scale):
    fabric = Fabric.from_alpha_beta(alpha, rate).model_copy(update={"slow_link": slow, "scale": scale})
    (segment,) = fabric.segments(world_size)
    steps = 2 * (world_size - 1)
    assert segment.alpha_ns == pytest.approx(scale * steps * alpha, rel=1e-3)
    assert segment.ns_per_byte == pytest.approx(scale * slow * steps / world_size * 1e9 / rate, rel=1e-3)
