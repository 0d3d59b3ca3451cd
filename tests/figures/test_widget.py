"""The widget: questions in, answers out, errors as one line; its drawing in a headless browser."""

import json
import subprocess
import sys

import pytest

from ddplab.simulator import Fabric, Straggler, predict
from figures import traces_and_fabrics
from figures.interactive_timeline.browser_code import script, style
from figures.interactive_timeline.widget import InteractiveTimeline

from ..chromium import Watched
from ..strategies import iteration, trace_of
from .timeline_reader import SHOWN, assert_parts_add_up, cuts, drag, frames, number, predicted, v100_ring

MS = 10**6
TRACE = trace_of([[iteration(1 * MS, (3 * MS, 2 * MS), 4 * MS, 1 * MS)]], [4 * 10**6, 10**6])


def ring(gbit_per_s: float) -> Fabric:
    return Fabric.from_alpha_beta(alpha_ns=1000, bytes_per_s=gbit_per_s * 1e9 / 8)


def asked(plan=((1,), (0,)), world_size=2, gbit_per_s=10.0, factor=1.0, **more) -> dict:
    question = {"plan": plan, "world_size": world_size, "gbit_per_s": gbit_per_s, "factor": factor, **more}
    return {"question": question}


def two_ranks(**start) -> InteractiveTimeline:
    return InteractiveTimeline(TRACE, ring, world_size=2, gbit_per_s=10.0, **start)


def reply(widget: InteractiveTimeline, message: dict) -> dict:
    """What the kernel answers."""
    replies: list[dict] = []
    widget.send = lambda content, buffers=None: replies.append(content)
    widget._handle_custom_msg({"id": "1", **message}, [])
    return json.loads(json.dumps(replies.pop()))


def test_the_kernel_answers_with_the_numbers_of_predict():
    answer = reply(two_ranks(), asked(factor=1.5))["answer"]
    expected = predict(TRACE, ring(10), world_size=2, plan=[[1], [0]], stragglers=[Straggler(rank=1, factor=1.5)])
    assert answer["iteration_ns"] == expected.iteration_ns
    assert answer["exposed_ns"] == expected.exposed_comm_ns
    assert answer["parts"]["computation_ns"] == 7_500_000  # of the straggler, which is the slowest rank
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    assert answer["ranks"][1]["ready_ns"] == [4_500_000, 3_000_000]


def test_the_notebook_reads_the_plan_and_the_prediction_that_are_shown():
    widget = two_ranks(bucket_cap_mb=25)
    assert widget.plan == ((1, 0),)
    reply(widget, asked())
    assert widget.plan == ((1,), (0,)) == widget.prediction.buckets
    started = reply(widget, asked(start=((0, 1),)))["start"]
    assert widget.plan == ((1,), (0,)), "the layout to compare with replaced the one that is shown"
    assert started == reply(widget, asked(plan=((0, 1),)))["answer"]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (asked(plan=((1,),)), "ValueError: plan: parameters [0] are in no bucket"),
        (asked(world_size=0), "ValueError: world_size: input should be greater than or equal to 1, got 0"),
        ({"question": {"plan": 3}}, "ValueError: question: expected plan, world_size, gbit_per_s, factor"),
    ],
)
def test_an_invalid_question_is_answered_with_one_line(question, words):
    widget = two_ranks()
    answer = reply(widget, question)
    assert answer["error"].startswith(words)
    assert "\n" not in answer["error"]
    assert answer["id"] == "1"
    assert "answer" in reply(widget, asked())


def test_a_trace_without_a_prediction_is_refused_at_once():
    unused = trace_of([[iteration(1 * MS, (3 * MS, None), 4 * MS, 1 * MS)]], [4, 4])
    with pytest.raises(ValueError, match="got no gradient"):
        InteractiveTimeline(unused)
    with pytest.raises(ValueError, match="order: expected one of ready, reverse, forward, got 'size'"):
        InteractiveTimeline(TRACE, order="size")


def test_start_values_are_added_to_the_choices():
    data = InteractiveTimeline(TRACE, world_size=3, gbit_per_s=7, bucket_cap_mb=0.5).data
    assert "3" in data["gpus"]
    assert data["gbit"][data["start"]["gbit"]] == "7 Gbit/s"
    assert data["cap"][data["start"]["cap"]] == "0.5 MiB"
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(InteractiveTimeline(TRACE).data)) | {
        name: json.loads(json.dumps(data[name])) for name in ("cap", "gbit", "gpus", "layouts", "start", "answer")
    }


def test_a_notebook_without_a_kernel_has_the_first_answer():
    widget = InteractiveTimeline(TRACE, ring, world_size=2, gbit_per_s=10)
    assert widget.data["answer"]["iteration_ns"] == widget.prediction.iteration_ns
    assert repr(widget) == (
        "InteractiveTimeline of by hand: one bucket, iteration 8.0 ms, exposed communication 3.0 ms"
    )


def test_without_anywidget_one_line_says_what_to_install():
    code = (
        "import sys; sys.modules['anywidget'] = None\n"
        "try: from figures.interactive_timeline.widget import InteractiveTimeline\n"
        "except ImportError as error: sys.exit(str(error))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr == "InteractiveTimeline needs anywidget; run `pip install 'ddplab[tutorials]'`\n"


# The widget with a kernel

FAKE_MODEL = """
(function (data) {
  const listeners = [];
  window.sent = [];
  window.answer = (reply) => listeners.forEach((listener) => listener(reply));
  return {
    get: () => data,
    on: (event, listener) => event === "msg:custom" && listeners.push(listener),
    off: () => listeners.splice(0),
    send: (message) => {
      window.sent.push(message);
      if (window.askKernel) window.askKernel(message).then(window.answer);
    },
  };
})
"""


@pytest.fixture
def displayed(browser):
    """Displays a widget as anywidget does; its questions go to the kernel, or wait in `window.sent`."""
    watched = Watched(browser, width=1000, height=1000)
    page = watched.page

    def display(widget: InteractiveTimeline, *, answered: bool = True):
        page.goto("about:blank")
        page.set_content(f"<!DOCTYPE html><style>{style()}</style><div id=timeline></div>")
        if answered:
            page.expose_function("askKernel", lambda message: reply(widget, message))
        page.evaluate(
            f"""async ([code, data]) => {{
              const url = URL.createObjectURL(new Blob([code], {{ type: "text/javascript" }}));
              const module = await import(url);
              const el = document.getElementById("timeline");
              window.redraws = 0;
              el.addEventListener("redraw", () => window.redraws++);
              window.cleanUp = module.default.render({{ model: {FAKE_MODEL.strip()}(data), el }});
            }}""",
            [script(), json.loads(json.dumps(widget.data))],
        )
        return page

    yield display
    watched.page.close()
    assert watched.problems == []


def small_widget(fabric=v100_ring):
    return InteractiveTimeline(SHOWN.trace, fabric, title="ResNet-50")


def test_the_kernel_answers_while_one_drags(displayed):
    widget = small_widget()
    page = displayed(widget)
    page.wait_for_selector(".boundary")
    drag(page, 2, -24)
    expected = predicted(cuts(page))
    page.wait_for_function(
        "words => document.querySelector('tr.now td.iteration_ns').textContent === words",
        arg=f"{expected.iteration_ns / 1e6:.1f}",
    )
    assert widget.prediction == expected
    assert [list(bucket) for bucket in widget.plan] == [list(bucket) for bucket in expected.buckets]


def test_one_question_is_in_flight_and_the_newest_is_next(displayed):
    widget = small_widget()
    page = displayed(widget, answered=False)

    def sent():
        return page.evaluate("window.sent")

    def answer(message):
        page.evaluate("reply => window.answer(reply)", reply(widget, message))

    page.wait_for_selector(".boundary")
    frames(page)
    assert sent() == [], "a question whose answer came with the data"
    before, redraws = cuts(page), page.evaluate("window.redraws")
    page.locator(".boundary").nth(1).focus()
    for _ in range(5):
        page.keyboard.press("ArrowUp")
        frames(page)
    assert cuts(page)[1] == before[1] + 5, "the boundary waited for the kernel"
    assert page.evaluate("window.redraws") >= redraws + 5
    assert len(sent()) == 1
    answer(sent()[0])
    page.wait_for_function("window.sent.length === 2")
    assert len(sent()[1]["question"]["plan"][1]) == before[1] - before[0] + 5, "an older question was asked"
    start = sent()[1]["question"]["start"]
    answer(sent()[1])
    frames(page)
    assert len(sent()) == 2
    page.get_by_role("button", name="Compare").click()
    page.wait_for_function("window.sent.length === 3")
    assert sent()[2]["question"]["start"] == sent()[1]["question"]["plan"] != start


def test_buffers_slow_downs_and_simultaneous_collectives_are_drawn(displayed):
    """Fails if the widget counts on what only the page has: gradients in every collective, one at a time."""
    ms = 10**6
    ready = tuple((40 - number) * ms for number in range(30))
    trace = trace_of([[iteration(10 * ms, ready, 41 * ms, 2 * ms)]] * 2, [2**20] * 30, buffer_bytes=[4000, 8])
    fabric = traces_and_fabrics.gloo()
    widget = InteractiveTimeline(trace, lambda _: fabric, world_size=2, bucket_cap_mb=5)
    assert fabric.concurrency == 2
    assert any(bucket is None for bucket, *_ in widget.data["answer"]["collectives"])
    page = displayed(widget)
    page.wait_for_selector(".boundary")
    drag(page, 1, 12)
    page.wait_for_function(
        "words => document.querySelector('tr.now td.exposed_ns').textContent === words",
        arg=f"{widget.prediction.exposed_comm_ns / 1e6:.1f}",
    )
    assert len(widget.plan) == 6
    assert_parts_add_up(page)
    assert number(page, "slowdown_ns") > 0


def test_an_error_of_the_kernel_is_one_line_and_the_next_answer_removes_it(displayed):
    def unplugged(gbit_per_s):
        if gbit_per_s > 300:
            raise OSError("no such network")
        return v100_ring(gbit_per_s)

    page = displayed(small_widget(unplugged))
    page.wait_for_selector(".boundary")
    page.get_by_role("slider", name="Network").fill("12")
    page.wait_for_selector("text=OSError: no such network")
    page.get_by_role("slider", name="Network").fill("5")
    page.wait_for_function("document.querySelector('.error').textContent === ''")


def test_a_kernel_that_does_not_answer_is_named(displayed):
    page = displayed(small_widget(), answered=False)
    page.get_by_role("slider", name="Cap").fill("1")
    page.wait_for_function("document.querySelector('.status').textContent === 'Waiting for the kernel…'")


def test_a_removed_view_hears_nothing_more(displayed):
    page = displayed(small_widget())
    page.wait_for_selector(".boundary")
    redraws = page.evaluate("() => { window.cleanUp(); return window.redraws; }")
    page.evaluate("window.answer({ id: '1', error: 'late' })")
    frames(page)
    assert page.evaluate("window.redraws") == redraws
