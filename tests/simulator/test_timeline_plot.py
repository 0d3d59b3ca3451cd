"""Plots of timelines."""

from matplotlib import pyplot
from matplotlib.figure import Figure

from simulator import Fabric, predict

from ..strategies import iteration, trace_of

TRACE = trace_of([[iteration(10**6, (3 * 10**6, 2 * 10**6), 4 * 10**6, 10**6)]], [4 * 10**6, 10**6])
SLOW, FAST = (Fabric.from_alpha_beta(alpha_ns=1000, bytes_per_s=rate) for rate in (1e9, 1e10))


def test_a_plot_is_drawn_on_the_given_axes_or_on_new_ones():
    prediction = predict(TRACE, SLOW, world_size=2)
    ax = Figure().add_subplot()
    assert prediction.plot(ax) is ax
    assert ax.get_title(loc="left")
    new = prediction.plot()
    assert new.figure in map(pyplot.figure, pyplot.get_fignums())
    pyplot.close(new.figure)
