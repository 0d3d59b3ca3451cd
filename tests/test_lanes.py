"""Lanes of tutorial 7: what a run records, and that the picture has it all."""

import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.patches import Polygon, Rectangle

from tutorials.lanes import Event, Lane, draw_lanes, linked

from . import lanes_bodies as bodies


@pytest.fixture
def ax():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


@given(batches=st.tuples(st.integers(0, 4), st.integers(0, 4)))
@settings(max_examples=8)
def test_a_run_under_join_has_a_shadow_for_each_missing_batch_and_a_match_for_each_all_reduce(two_ranks, batches):
    lanes = two_ranks.run(bodies.lane_under_join, batches)
    for lane, own in zip(lanes, batches, strict=True):
        assert len(lane.of("batch")) == own
        assert len(lane.of("shadow")) == max(batches) - own
        assert all(event.start_ns <= event.end_ns for event in lane.events)
    sizes = [[event.size_bytes for event in lane.of("all-reduce")] for lane in lanes]
    assert sizes[0] == sizes[1]
    assert sizes[0].count(bodies.GRADIENT_BYTES) == max(batches)


def test_an_all_reduce_without_a_match_and_its_iteration_have_no_end(two_ranks):
    (first, second), _ = zip(*two_ranks.run(bodies.lane_without_join, (3, 2)), strict=True)
    assert [event.end_ns is None for event in first.of("batch")] == [False, False, True]
    assert [event.end_ns is None for event in first.of("all-reduce")] == [False, False, True]
    assert all(event.end_ns is not None for event in second.events)
    assert len(linked([first, second])) == 2


EVENTS = st.builds(
    lambda kind, start, length, size: Event(kind, start, start + length, size if kind == "all-reduce" else 0),
    st.sampled_from(["batch", "shadow", "all-reduce"]),
    st.integers(0, 10**9),
    st.integers(1, 10**8),
    st.sampled_from([4, 16]),
)
LANES = st.lists(st.builds(Lane, st.lists(EVENTS, min_size=1, max_size=6)), min_size=1, max_size=3)


@given(LANES)
def test_the_picture_has_a_box_for_each_iteration_and_a_band_between_neighbours_for_each_shared_all_reduce(lanes):
    figure, ax = plt.subplots()
    draw_lanes(lanes, ax)
    boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    bands = [patch for patch in ax.patches if isinstance(patch, Polygon)]
    assert len(boxes) == sum(event.kind != "all-reduce" for lane in lanes for event in lane.events)
    assert len(bands) == (len(lanes) - 1) * min(len(lane.of("all-reduce")) for lane in lanes)
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"rank {rank}" for rank in range(len(lanes))]
    plt.close(figure)


def test_the_box_of_an_iteration_that_never_ended_is_followed_by_its_wait_up_to_the_edge(ax):
    waiting = Lane([Event("batch", 0), Event("all-reduce", 30_000_000, None, 16)])
    draw_lanes([waiting], ax, until_ms=100)
    wait, box = ax.patches
    assert (box.get_x(), box.get_x() + box.get_width()) == (0, 30)
    assert (wait.get_x(), wait.get_x() + wait.get_width()) == (30, 100)
