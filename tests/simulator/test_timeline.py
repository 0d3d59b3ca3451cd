"""Timelines: the spans of a rank follow each other without a gap, and waiting has its cause."""

from itertools import pairwise

from hypothesis import given

from ddplab.simulator.engines.closed_form import simulate

from ..explore import examples
from ..strategies import engine_inputs, fluid_fabrics


@examples(15)
@given(engine_inputs(fluid_fabrics))
def test_a_rank_computes_or_waits_without_a_gap_and_shows_collectives_from_launch_to_end(engine_input):
    """As "straggler" until the last rank has launched it, as "queued" until it starts."""
    timeline = simulate(engine_input, "events")
    every, ends_ns = list(timeline.spans()), timeline.end_ns[:, -1].tolist()
    launched_by_all = set(timeline.launched_ns.max(axis=0, initial=0).tolist())
    for row, (rank, end_ns) in enumerate(zip(engine_input.ranks, ends_ns, strict=True)):
        edges = [(span.start_ns, span.end_ns) for span in every if (span.rank, span.stream) == (rank, "compute")]
        assert all(one[1] == other[0] for one, other in pairwise([(0, 0), *edges, (end_ns, end_ns)]))
        spans = [span for span in every if (span.rank, span.stream) == (rank, "comm")]
        shown_ns = sum(span.duration_ns for span in spans)
        assert shown_ns == timeline.done_ns.sum() - timeline.launched_ns[row].sum()
        assert {span.end_ns for span in spans if span.kind == "straggler"} <= launched_by_all
        assert {span.start_ns for span in spans if span.kind == "queued"} <= launched_by_all
        running = [span for span in spans if span.kind not in ("straggler", "queued")]
        assert {span.start_ns for span in running} <= set(timeline.start_ns.tolist())
