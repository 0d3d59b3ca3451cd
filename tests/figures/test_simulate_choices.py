"""A reader's choices: layouts, and answers to questions about any iteration."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import predict
from figures.interactive_timeline.simulate_choices import Choices, InteractiveIteration, Question, Start

from ..explore import examples
from ..strategies import fluid_fabrics, partitions, steady_fabrics, traces
from .timeline_reader import SHOWN


def test_layouts_are_those_of_predict():
    document = SHOWN.document()
    for order, layouts in zip(document["scenes"], document["layouts"], strict=True):
        for cap, layout in zip(SHOWN.choices.bucket_caps_mb, layouts, strict=True):
            prediction = predict(SHOWN.trace, SHOWN.fabric(10), world_size=2, bucket_cap_mb=cap, order=order)
            assert layout == [list(bucket) for bucket in prediction.buckets]


@st.composite
def answers(draw):
    """An iteration over a fabric with slow-downs, and a question about it."""
    trace, world_size = draw(traces()), draw(st.integers(1, 4))
    fabric = draw(st.one_of(fluid_fabrics(world_size), steady_fabrics(world_size)))
    shown = InteractiveIteration(
        trace,
        lambda _: fabric,
        title="",
        choices=Choices(world_sizes=(world_size,)),
        start=Start(world_size=world_size),
    )
    plan = draw(partitions(len(trace.keys), tuple(trace.keys)))
    factor = draw(st.sampled_from([1.0, 1.5]))
    return shown, Question(tuple(map(tuple, plan)), world_size, 25, factor)


@examples(25)
@given(answers())
def test_an_answer_is_consistent_on_any_fabric(shown_and_question):
    """Fails if slow-downs, or several collectives at a time, move a gradient out of its backward pass."""
    shown, question = shown_and_question
    prediction = shown.predict(question)
    answer = shown.answer(question, prediction)
    assert sum(end - start for start, end in answer["exposed"]) == prediction.exposed_comm_ns
    assert sum(answer["parts"].values()) == prediction.iteration_ns, "the rows of the table do not add up"
    assert all(one[1] < other[0] for one, other in zip(answer["exposed"], answer["exposed"][1:], strict=False))
    launched = {bucket: moment for bucket, moment, _, _ in answer["collectives"] if bucket is not None}
    for rank in answer["ranks"]:
        ready = np.array(rank["ready_ns"])
        times = shown.model.compute_times[rank["rank"] % len(shown.model.compute_times)][0]
        order = np.argsort(times.ready_ns, kind="stable")
        assert (np.diff(ready[order]) >= 0).all()
        for bucket, members in enumerate(question.plan):
            assert ready[list(members)].max() <= launched[bucket]
        assert all(start < end <= prediction.timeline.iteration_ns for _, _, start, end in rank["spans"])
