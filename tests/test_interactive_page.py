"""The interactive timeline in a headless browser: the committed page, and the widget with a kernel."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from figures import interactive_timeline
from reference.bucketing import plan_buckets
from simulator import Straggler, predict
from simulator.interactive_timeline.browser_code import script, style
from simulator.interactive_timeline.questions import ORDERS, Question
from simulator.interactive_timeline.widget import InteractiveTimeline

from .chromium import Watched, chromium, needs_chromium
from .explore import examples
from .strategies import partitions

pytestmark = needs_chromium

SHOWN = interactive_timeline.iteration()
COUNT = len(SHOWN.trace.sizes_bytes)
ADDRESS = interactive_timeline.PATH.as_uri()


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def opened(browser):
    """The committed page, opened from the disk."""
    watched = Watched(browser, viewport={"width": 1000, "height": 1200})
    watched.page.goto(ADDRESS)
    watched.page.wait_for_selector(".boundary")
    yield watched
    watched.context.close()


@pytest.fixture(scope="module")
def replay(browser):
    """The function of the committed page that answers a question."""
    watched = Watched(browser)
    watched.page.goto(ADDRESS)
    watched.page.evaluate(
        """async () => {
          const text = document.querySelector("script[type=module]").textContent;
          const module = await import(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
          const data = JSON.parse(document.getElementById("data").textContent);
          window.answerTo = (question) => module.replay(data, question);
        }"""
    )
    yield lambda question: watched.page.evaluate("(question) => window.answerTo(question)", question)
    watched.context.close()


# Numbers: the page's answers are the simulator's


@st.composite
def cut_orders(draw):
    """[[160, 159], [158, ..., 3], [2, 1, 0]]: gradients in ready, reverse or forward order, cut at any places."""
    order = draw(st.sampled_from(ORDERS))
    one_bucket = plan_buckets(order, SHOWN.trace.sizes_bytes, [2**62], ready_order=SHOWN.model.ready_order)[0]
    cuts = sorted(draw(st.sets(st.integers(1, COUNT - 1), max_size=draw(st.sampled_from([3, 20, COUNT - 1])))))
    return [one_bucket[low:high] for low, high in zip([0, *cuts], [*cuts, COUNT], strict=True)]


@st.composite
def questions(draw):
    """Question(plan=((160, ...), ...), world_size=16, gbit_per_s=25, factor=1.05)"""
    plan = draw(st.one_of(cut_orders(), partitions(COUNT)))
    return Question(
        plan=tuple(map(tuple, plan)),
        world_size=draw(st.sampled_from(SHOWN.choices.world_sizes)),
        gbit_per_s=draw(st.sampled_from(SHOWN.choices.gbit_per_s)),
        factor=draw(st.one_of(st.just(1.0), st.integers(20, 40).map(lambda steps: steps / 20), st.floats(1, 2))),
    )


@examples(150)
@given(question=questions())
def test_the_page_answers_as_predict_does_to_the_nanosecond(replay, question):
    late = [Straggler(rank=question.world_size - 1, factor=question.factor)] if question.factor > 1 else []
    fabric = interactive_timeline.fabric(question.gbit_per_s)
    prediction = predict(
        SHOWN.trace, fabric, world_size=question.world_size, plan=question.plan, stragglers=late, engine="events"
    )
    answer = replay(question._asdict())
    assert answer["iteration_ns"] == prediction.iteration_ns
    assert answer["exposed_ns"] == prediction.exposed_comm_ns
    assert answer == json.loads(json.dumps(SHOWN.answer(question, prediction)))
