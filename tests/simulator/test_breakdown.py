"""The breakdown of an iteration into its parts, and its critical path."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given

from ddplab.simulator.engines.closed_form import simulate
from ddplab.simulator.results.breakdown import PARTS
from ddplab.simulator.schedule.schedule import Wait

from ..explore import examples
from ..strategies import any_predictions, steady_fabrics


@examples(25)
@given(any_predictions())
def test_the_breakdown_adds_up_to_the_iteration_of_the_slowest_rank(asked):
    """Computing at full speed, what collectives add to it, waiting while a collective runs, and all other waiting."""
    prediction = asked.predict()
    timeline, parts = prediction.timeline, prediction.breakdown
    engine_input = timeline.engine_input
    row = timeline.end_ns[:, -1].argmax()
    assert sum(parts.values()) == timeline.iteration_ns
    assert min(parts.values()) >= 0
    assert sum(parts[name] for name in PARTS) == engine_input.duration_ns[row].sum()
    assert parts["exposed_comm"] == _waits_while_communicating(timeline, row)
    assert prediction.exposed_comm_ns == round(parts["exposed_comm"] / asked.policy.sync_every)
    if len(engine_input.ranks) == 1:
        assert parts["stragglers"] == 0
    if engine_input.slow_down == 1:
        assert parts["slowdown"] == 0


def _waits_while_communicating(timeline, row) -> int:
    """Counted nanosecond by nanosecond."""
    communicates, waits = np.zeros((2, timeline.iteration_ns), bool)
    for start_ns, done_ns in zip(timeline.start_ns, timeline.done_ns, strict=True):
        communicates[start_ns:done_ns] = True
    instructions, ends = timeline.engine_input.schedule.instructions, timeline.end_ns[row]
    for instruction, start_ns, end_ns in zip(instructions, [0, *ends[:-1]], ends, strict=True):
        if isinstance(instruction, Wait):
            waits[start_ns:end_ns] = True
    return np.count_nonzero(communicates & waits)


@examples(20)
@given(any_predictions())
def test_the_critical_path_is_a_chain_of_spans_from_the_start_to_the_end(asked):
    prediction = asked.predict()
    path = prediction.critical_path
    assert [span.start_ns for span in path[:1]] == [0] * bool(path)
    assert all(before.end_ns == after.start_ns for before, after in itertools.pairwise(path))
    assert prediction.timeline.iteration_ns == (path[-1].end_ns if path else 0)
    assert set(path) <= set(prediction.spans)
    assert not {span.kind for span in path} & {"wait", "queued", "straggler"}
    assert set(prediction.critical_buckets) <= set(range(len(prediction.buckets)))


@examples(20)
@given(any_predictions(fabrics=steady_fabrics))
def test_off_the_critical_path_collectives_that_take_turns_may_be_free_without_gain(asked):
    """With several slots a collective off the path may delay one on it, so the law needs one slot."""
    one_at_a_time = asked.fabric.model_copy(update={"concurrency": 1})
    prediction = replace(asked, fabric=one_at_a_time).predict()
    timeline = prediction.timeline
    on_path = {(span.kind, span.bucket, span.start_ns) for span in prediction.critical_path}
    collectives = zip(timeline.engine_input.schedule.collectives, timeline.start_ns.tolist(), strict=True)
    kept = [(one.kind, one.bucket, start) in on_path for one, start in collectives]
    assert (
        simulate(replace(timeline.engine_input, cost_ns=timeline.engine_input.cost_ns * kept), "events").iteration_ns
        == timeline.iteration_ns
    )
