"""Plots of timelines: axes, lanes, and a colour for every kind of span."""

from typing import get_args

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

from simulator import Fabric, Straggler, predict
from simulator.engines.timeline import Kind
from simulator.plot_colours import EXPOSED
from simulator.results.timeline_plot import COLOURS, draw_timeline

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
    assert set(COLOURS) == {name for literal in get_args(Kind) for name in get_args(literal)}


def test_communication_is_red_only_while_its_rank_waits():
    """Fails if hidden communication is drawn in the colour of exposed communication."""
    prediction = predict(TRACE, SLOW, world_size=2)
    ax = draw_timeline(prediction, Figure().add_subplot(), ranks=[0])
    colour = to_rgba(EXPOSED)
    red = [bars for bars in ax.collections if bars.get_facecolor().tolist() == [list(colour)]]
    widths = [path.get_extents().width for bars in red for path in bars.get_paths()]
    running_ns = prediction.timeline.done_ns - prediction.timeline.start_ns
    assert 0 < prediction.exposed_comm_ns < running_ns.sum()
    assert sum(widths) == pytest.approx(prediction.exposed_comm_ns / 1e6)


def test_each_rank_has_a_lane_for_computing_and_one_for_the_network():
    prediction = predict(TRACE, SLOW, world_size=8, stragglers=[Straggler(rank=5, factor=2)])
    ax = draw_timeline(prediction, Figure().add_subplot())
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "rank 0 computes", "rank 0 network", "rank 5 computes", "rank 5 network",
    ]  # fmt: skip
    assert ax.get_xlim() == (0, prediction.timeline.iteration_ns / 1e6)
    with pytest.raises(ValueError, match=r"^ranks: expected some of the simulated ranks \[0, 5\], got \[3\]; "):
        draw_timeline(prediction, Figure().add_subplot(), ranks=[0, 3])
