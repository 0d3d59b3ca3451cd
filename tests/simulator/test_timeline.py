"""Timelines: the spans of a rank follow each other without a gap, and waiting has its cause."""

from simulator import predict
from simulator.workload.compute_times import Straggler

from ..strategies import trace_of
from .span_lines import ALIKE, fabric


def test_a_straggler_makes_the_others_wait_for_it():
    trace = trace_of([[ALIKE]], [4, 4])
    prediction = predict(trace, fabric(8), world_size=2, plan=[[0, 1]], stragglers=[Straggler(rank=1, factor=2)])
    assert prediction.iteration_ns == 2 * 30 + 8 + 2 * 5
    assert prediction.breakdown["stragglers"] == 0  # on the slowest rank
    waits = {span.rank: span.duration_ns for span in prediction.spans if span.kind == "wait"}
    assert waits == {0: 36, 1: 4}
