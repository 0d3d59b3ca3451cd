"""Predictions in a notebook: tables, plots, and comparisons of two predictions."""

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from matplotlib import pyplot
from matplotlib.figure import Figure

from simulator import Fabric, Straggler, predict

from .explore import examples
from .strategies import any_predictions, iteration, trace_of

TRACE = trace_of([[iteration(10**6, (3 * 10**6, 2 * 10**6), 4 * 10**6, 10**6)]], [4 * 10**6, 10**6])
SLOW, FAST = (Fabric.from_alpha_beta(alpha_ns=1000, bytes_per_s=rate) for rate in (1e9, 1e10))


class Rows(HTMLParser):
    """Collects the cells of every table row, and checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag, _attributes):
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1] == "td":
            self.rows[-1].append(data.strip())


def test_the_table_shows_iteration_parts_and_buckets():
    prediction = predict(TRACE, SLOW, world_size=2)
    rows = dict(Rows(prediction._repr_html_()).rows)
    assert rows["iteration, median"] == f"{prediction.iteration_ns / 1e6:.2f} ms"
    assert rows["computation alone"] == "5.00 ms"
    assert rows["exposed communication"] == f"{prediction.exposed_comm_ns / 1e6:.2f} ms"
    assert (
        rows["breakdown, slowest rank"]
        == "forward 1.00, backward 3.00, optimizer 1.00, exposed communication 4.00 ms"
    )
    assert rows["buckets"] == "1, on the critical path: 0"
    assert "<p>the fabric has no processor costs" in prediction._repr_html_()


@examples(20)
@given(any_predictions())
def test_every_prediction_has_a_table(asked):
    assert len(Rows(asked.predict()._repr_html_()).rows) >= 5


def test_a_plot_is_drawn_on_the_given_axes_or_on_new_ones():
    prediction = predict(TRACE, SLOW, world_size=2)
    ax = Figure().add_subplot()
    assert prediction.plot(ax) is ax
    assert ax.get_title(loc="left")
    new = prediction.plot()
    assert new.figure in map(pyplot.figure, pyplot.get_fignums())
    pyplot.close(new.figure)


@examples(30)
@given(any_predictions(), any_predictions())
def test_the_parts_of_a_comparison_add_up_to_its_difference(asked, other):
    """Of single iterations exactly: of cycles each part is rounded, and the timeline is that of one cycle."""
    single = {"sync_every": 1}
    one, two = (replace(some, policy=some.policy.model_copy(update=single)).predict() for some in (asked, other))
    comparison = one.compare(two)
    assert comparison.difference_ns == two.iteration_ns - one.iteration_ns == -two.compare(one).difference_ns
    assert sum(comparison.parts_ns.values()) == comparison.difference_ns
    assert comparison.ratio == pytest.approx(two.iteration_ns / max(1, one.iteration_ns))
    assert comparison.intervals_overlap == two.compare(one).intervals_overlap
    (low, high), (other_low, other_high) = one.interval_ns, two.interval_ns
    assert comparison.intervals_overlap == (max(low, other_low) <= min(high, other_high))
    assert len(Rows(comparison._repr_html_()).rows) == sum(ns != 0 for ns in comparison.parts_ns.values())


def test_a_comparison_reads_as_a_sentence():
    slow, fast = (predict(TRACE, fabric, world_size=2) for fabric in (SLOW, FAST))
    sentence, parts = repr(slow.compare(fast)).split("; by part, ms: ")
    assert sentence == (
        "5.00 ms instead of 9.00 ms: 4.00 ms shorter, 0.555 times as long; the 90 % intervals do not overlap"
    )
    assert parts == "exposed communication -4.00"
    assert repr(slow.compare(slow)).endswith("by part, ms: no difference")


def test_parts_of_cycles_of_different_lengths_are_those_of_one_iteration():
    trace = trace_of([[iteration(10**6, (3 * 10**6,), 4 * 10**6, 10**6)] * 4], [4 * 10**6])
    single, cycle = (predict(trace, FAST, world_size=2, sync_every=k) for k in (1, 4))
    assert abs(sum(single.compare(cycle).parts_ns.values()) - single.compare(cycle).difference_ns) <= len(
        cycle.breakdown
    )


def test_a_straggler_is_named_in_a_comparison():
    late = predict(TRACE, FAST, world_size=2, stragglers=[Straggler(rank=1, factor=2)])
    assert "backward" in repr(predict(TRACE, FAST, world_size=2).compare(late))
