"""Plots of timelines: axes, lanes, and a colour for every kind of span."""

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ddplab.simulator import Fabric, Straggler, predict
from ddplab.simulator.engines.timeline import SpanKind
from ddplab.simulator.plot_colours import EXPOSED
from ddplab.simulator.results.timeline_plot import COLOURS, draw_timeline

from ..strategies import iteration, trace_of

TRACE = trace_of([[iteration(10**6, (3 * 10**6, 2 * 10**6), 4 * 10**6, 10**6)]], [4 * 10**6, 10**6])
SLOW = Fabric.from_alpha_beta(alpha_ns=1000, bytes_per_s=1e9)


def test_a_plot_is_drawn_on_the_given_axes_or_on_new_ones():
    prediction = predict(TRACE, SLOW, world_size=2)
    ax = Figure().add_subplot()
    assert prediction.plot(ax) is ax
    assert ax.get_title(loc="left")
    new = prediction.plot()
    assert new.figure in map(pyplot.figure, pyplot.get_fignums())
    pyplot.close(new.figure)


def test_every_kind_of_span_has_a_colour():
    assert set(COLOURS) == {name for literal in get_args(SpanKind) for name in get_args(literal)}


def test_each_rank_has_a_lane_for_computing_and_one_for_the_network():
    prediction = predict(TRACE, SLOW, world_size=8, stragglers=[Straggler(rank=5, factor=2)])
    ax = draw_timeline(prediction, Figure().add_subplot())
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "rank 0 computes", "rank 0 network", "rank 5 computes", "rank 5 network",
    ]  # fmt: skip
    assert ax.get_xlim() == (0, prediction.timeline.iteration_ns / 1e6)
    with pytest.raises(ValueError, match=r"^ranks: expected some of the simulated ranks \[0, 5\], got \[3\]; "):
        draw_timeline(prediction, Figure().add_subplot(), ranks=[0, 3])


@given(st.integers(1, 10**6), st.integers(10**8, 10**10))
def test_communication_is_red_where_its_rank_waits_and_pink_elsewhere(latency_ns, bytes_per_s):
    fabric = Fabric.from_alpha_beta(alpha_ns=latency_ns, bytes_per_s=bytes_per_s)
    prediction = predict(TRACE, fabric, world_size=2, bucket_cap_mb=1)
    ax = draw_timeline(prediction, Figure().add_subplot(), ranks=[0])
    red = [bars for bars in ax.collections if list(map(to_hex, bars.get_facecolor())) == [EXPOSED]]
    drawn_ms = sum(path.get_extents().width for bars in red for path in bars.get_paths())
    assert drawn_ms == pytest.approx(prediction.exposed_comm_ns / 1e6)
