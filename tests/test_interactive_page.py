"""The interactive timeline in a headless browser: the committed page, and the widget with a kernel."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from figures import interactive_timeline, traces_and_fabrics
from reference.bucketing import plan_buckets
from simulator import Straggler, predict
from simulator.interactive_timeline.browser_code import script, style
from simulator.interactive_timeline.reader_choices import ORDERS, Question
from simulator.interactive_timeline.widget import InteractiveTimeline

from .chromium import PATH, Watched, chromium
from .explore import examples
from .strategies import iteration, partitions, trace_of

if PATH is None:
    pytest.skip("no chromium; run `apt-get install chromium`", allow_module_level=True)

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


# The page in the hands of a reader


def number(page, name, column="now") -> float:
    """A number of the table, in milliseconds."""
    words = page.locator(f"tr.{name} td.{column}").inner_text()
    return float(words.replace("\N{MINUS SIGN}", "-").removesuffix(" ms"))


def frames(page, count=3) -> None:
    """Wait until the browser has drawn some frames."""
    page.evaluate(
        "count => new Promise(done => { const next = n => n ? requestAnimationFrame(() => next(n - 1)) : done();"
        " next(count); })",
        count,
    )


def cuts(page) -> list[int]:
    return [int(one.get_attribute("aria-valuenow")) for one in page.locator(".boundary").all()]


def predicted(places, *, order="ready", world_size=16, gbit_per_s=25, factor=1.0):
    """The prediction for boundaries at these places."""
    sequence = plan_buckets(order, SHOWN.trace.sizes_bytes, [2**62], ready_order=SHOWN.model.ready_order)[0]
    plan = [sequence[low:high] for low, high in zip([0, *places], [*places, COUNT], strict=True)]
    return SHOWN.predict(Question(tuple(map(tuple, plan)), world_size, gbit_per_s, factor))


def assert_shows(page, prediction) -> None:
    frames(page)
    assert number(page, "iteration_ns") == round(prediction.iteration_ns / 1e6, 1)
    assert number(page, "exposed_ns") == round(prediction.exposed_comm_ns / 1e6, 1)


def drag(page, boundary, by_px) -> None:
    knob = page.locator(".boundary .knob").nth(boundary).bounding_box()
    x, y = knob["x"] + knob["width"] / 2, knob["y"] + knob["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x, y + by_px, steps=8)
    page.mouse.up()
    frames(page)


def test_the_page_opens_without_a_network_and_without_an_error(opened):
    frames(opened.page)
    assert opened.problems == []
    assert {address for address in opened.requested if not address.startswith("data:")} == {ADDRESS}
    assert_shows(opened.page, predicted(cuts(opened.page)))


def test_a_dragged_boundary_changes_the_layout_and_the_result(opened):
    page = opened.page
    before, start = cuts(page), number(page, "iteration_ns")
    drag(page, len(before) - 1, -24)
    after = cuts(page)
    assert after[-1] > before[-1]
    assert after[:-1] == before[:-1]
    assert_shows(page, predicted(after))
    assert number(page, "iteration_ns", "start") == start
    assert number(page, "iteration_ns", "difference") == pytest.approx(number(page, "iteration_ns") - start, abs=0.11)
    assert number(page, "iteration_ns") < start, "a small last bucket leaves less communication exposed"
    page.wait_for_function("document.querySelector('.result').textContent.includes('faster than with the start')")
    assert opened.problems == []


def test_a_boundary_stops_at_its_neighbours(opened):
    page = opened.page
    drag(page, 1, 500)
    first, second, *_ = cuts(page)
    assert second == first + 1
    page.keyboard.press("ArrowDown")
    frames(page)
    assert cuts(page)[1] == second
    assert_shows(page, predicted(cuts(page)))


def test_a_finger_drags_a_boundary(browser):
    watched = Watched(browser, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = watched.page
    page.goto(ADDRESS)
    before = cuts(page)
    page.locator(".picture").scroll_into_view_if_needed()
    knob = page.locator(".boundary .knob").nth(1).bounding_box()
    touch = watched.context.new_cdp_session(page)
    x, y = knob["x"] + 8, knob["y"] + 6
    for kind, points in [
        ("touchStart", [{"x": x, "y": y}]),
        *(("touchMove", [{"x": x, "y": y - step}]) for step in range(3, 30, 3)),
        ("touchEnd", []),
    ]:
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    frames(page)
    assert cuts(page)[1] > before[1]
    assert_shows(page, predicted(cuts(page)))
    watched.context.close()


@pytest.mark.parametrize(
    ("key", "moves"),
    [("ArrowUp", 1), ("ArrowRight", 1), ("ArrowDown", -1), ("ArrowLeft", -1), ("PageUp", 10), ("PageDown", -10)],
)
def test_a_key_moves_the_focused_boundary(opened, key, moves):
    page = opened.page
    before = cuts(page)
    page.locator(".boundary").nth(2).focus()
    page.keyboard.press(key)
    frames(page)
    assert cuts(page) == [*before[:2], before[2] + moves, *before[3:]]
    assert_shows(page, predicted(cuts(page)))


def test_every_control_and_every_boundary_is_reached_with_tab(opened):
    page = opened.page
    reached = []
    for _ in range(10):  # five controls, three boundaries, play and scrubber; four buttons follow
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.className || document.activeElement.type"))
    boundaries = reached.count("boundary") + reached.count("boundary chosen")
    assert boundaries == len(cuts(page))
    assert reached.count("range") == 5
    assert {"select-one", "play"} <= set(reached)


def test_jupyterlab_leaves_the_keys_to_every_element_that_takes_the_focus(opened):
    """Fails if JupyterLab's commands on arrow keys, which ignore only marked elements, stop a slider."""
    focusable = opened.page.locator(".ddplab-timeline :is(input, select, button, [tabindex])")
    assert focusable.count() == 14
    for element in focusable.all():
        assert element.get_attribute("data-lm-suppress-shortcuts") == "true"


def test_the_focus_is_visible(opened):
    page = opened.page
    page.locator("select").focus()
    for _ in range(4):
        page.keyboard.press("Tab")
    knob = page.locator(".boundary").first.locator(".knob")
    assert page.evaluate("document.activeElement.classList.contains('boundary')")
    assert knob.evaluate("element => getComputedStyle(element).outlineStyle") == "solid"


def test_assistive_technology_is_given_roles_names_and_values(opened):
    page = opened.page
    first = page.get_by_role("slider", name="Boundary between bucket 0 and bucket 1")
    assert re.fullmatch(
        r"after \d+ of 161 gradients; bucket 0 has [\d.]+ MB, bucket 1 has [\d.]+ MB",
        first.get_attribute("aria-valuetext"),
    )
    assert int(first.get_attribute("aria-valuemin")) == 1
    assert int(first.get_attribute("aria-valuemax")) == cuts(page)[1] - 1
    for name in ("Bucket cap", "Network", "World size", "Straggler", "Moment in the iteration"):
        assert page.get_by_role("slider", name=name).count() == 1
    assert page.get_by_role("combobox", name="Order").count() == 1
    assert page.locator(".result[aria-live=polite]").count() == 1


def test_the_sliders_and_the_order_change_layout_and_result(opened):
    page = opened.page
    page.get_by_role("slider", name="Bucket cap").fill("2")
    frames(page)
    with_cap = cuts(page)
    assert len(with_cap) > 5
    assert_shows(page, predicted(with_cap))
    page.get_by_role("combobox", name="Order").select_option("forward")
    page.get_by_role("slider", name="Network").fill("11")
    page.get_by_role("slider", name="World size").fill("4")
    page.get_by_role("slider", name="Straggler").fill("1.25")
    frames(page)
    choices = {"order": "forward", "gbit_per_s": 200, "world_size": 32, "factor": 1.25}
    assert_shows(page, predicted(cuts(page), **choices))
    start = predicted([len(bucket) for bucket in ()], **choices)  # one bucket, only for its computation
    assert number(page, "compute_ns", "start") == round(start.compute_ns / 1e6, 1)
    assert page.locator("svg text", has_text="rank 31, slow").count() == 1


def test_boundaries_are_added_and_removed(opened):
    page = opened.page
    before = cuts(page)
    page.get_by_role("button", name="Split the largest bucket").click()
    frames(page)
    assert len(cuts(page)) == len(before) + 1
    assert set(before) < set(cuts(page))
    page.get_by_role("button", name="Remove the chosen boundary").click()
    frames(page)
    assert cuts(page) == before
    page.locator(".boundary").nth(0).focus()
    page.keyboard.press("Delete")
    frames(page)
    assert cuts(page) == before[1:]
    assert_shows(page, predicted(before[1:]))
    page.get_by_role("button", name="Start again").click()
    frames(page)
    assert cuts(page) == before


def test_one_compares_with_another_layout(opened):
    page = opened.page
    drag(page, 0, -20)
    now = number(page, "iteration_ns")
    page.get_by_role("button", name="Compare with this layout").click()
    frames(page)
    assert number(page, "iteration_ns", "start") == now
    assert page.locator("tr.iteration_ns td.difference").inner_text() == "0"


def test_the_scrubber_shows_the_state_at_a_moment(opened):
    page = opened.page
    scrubber = page.get_by_role("slider", name="Moment in the iteration")
    prediction = predicted(cuts(page))
    for moment_ms in (0, 36, 50, 100, 110):
        scrubber.fill(str(moment_ms * 1_000_000))
        frames(page)
        words = page.locator(".moment").inner_text()
        answer = SHOWN.answer(SHOWN.first_question, prediction)
        moment = moment_ms * 10**6
        sizes = SHOWN.trace.sizes_bytes
        ready = sum(size for size, at in zip(sizes, answer["ranks"][0]["ready_ns"], strict=True) if at <= moment)
        sent = [bucket for bucket, _, start, end in answer["collectives"] if start <= moment < end]
        exposed = sum(max(0, min(moment, end) - start) for start, end in answer["exposed"])
        assert words.startswith(f"At {moment_ms}.0 ms: {ready / 1e6:.1f} of 102.2 MB are ready; on the network: ")
        assert f"on the network: {f'bucket {sent[0]}' if sent else 'nothing'};" in words
        assert words.endswith(f"exposed so far: {exposed / 1e6:.1f} ms.")
    assert scrubber.get_attribute("aria-valuetext") == words


def test_play_moves_the_moment_and_stops(opened):
    page = opened.page
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("document.querySelector('.scrubber input').value > 1e6")
    page.get_by_role("button", name="Stop").click()
    assert page.get_by_role("button", name="Play").count() == 1


def test_play_jumps_from_event_to_event_for_readers_who_want_no_motion(browser):
    watched = Watched(browser, reduced_motion="reduce")
    page = watched.page
    page.goto(ADDRESS)
    page.wait_for_selector(".boundary")
    answer = SHOWN.answer(SHOWN.first_question, predicted(cuts(page)))
    events = {0, *(moment for _, _, *moments in answer["collectives"] for moment in moments), answer["iteration_ns"]}
    page.evaluate(
        """() => {
          window.seen = [];
          const moment = document.querySelector(".moment");
          new MutationObserver(() => window.seen.push(moment.textContent)).observe(moment, { childList: true });
        }"""
    )
    page.get_by_role("button", name="Play").click()
    page.wait_for_function("window.seen.length === 3")
    seen = [words.partition(":")[0] for words in page.evaluate("window.seen")]
    assert set(seen) <= {f"At {moment / 1e6:.1f} ms" for moment in events}
    watched.context.close()


@pytest.mark.parametrize("width", [320, 390, 700, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_width(browser, width, scheme):
    watched = Watched(browser, viewport={"width": width, "height": 900}, color_scheme=scheme)
    watched.page.goto(ADDRESS)
    watched.page.wait_for_selector(".boundary")
    frames(watched.page)
    assert watched.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    text, ground = watched.page.evaluate(
        "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name])"
    )
    bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) > 384 for colour in (text, ground)]
    assert bright == ([False, True] if scheme == "light" else [True, False])
    assert watched.problems == []
    watched.context.close()


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
    watched = Watched(browser, viewport={"width": 1000, "height": 1000})
    page = watched.page

    def display(widget: InteractiveTimeline, *, answered: bool = True):
        replies = []
        widget.send = lambda content, buffers=None: replies.append(content)

        def ask(message):
            widget._handle_custom_msg(message, [])
            return json.loads(json.dumps(replies.pop()))

        page.goto("about:blank")
        page.set_content(f"<!DOCTYPE html><style>{style()}</style><div id=timeline></div>")
        if answered:
            page.expose_function("askKernel", ask)
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
    watched.context.close()
    assert watched.problems == []


def small_widget(fabric=interactive_timeline.fabric):
    return InteractiveTimeline(SHOWN.trace, fabric, title="ResNet-50")


def test_the_kernel_answers_while_one_drags(displayed):
    widget = small_widget()
    page = displayed(widget)
    page.wait_for_selector(".boundary")
    drag(page, 2, -24)
    expected = predicted(cuts(page))
    page.wait_for_function(
        "words => document.querySelector('tr.iteration_ns td.now').textContent === words",
        arg=f"{expected.iteration_ns / 1e6:.1f} ms",
    )
    assert widget.prediction == expected
    assert [list(bucket) for bucket in widget.plan] == [list(bucket) for bucket in expected.buckets]


def test_one_question_is_in_flight_and_the_newest_is_next(displayed):
    widget = small_widget()
    page = displayed(widget, answered=False)

    def sent():
        return page.evaluate("window.sent")

    def answer(message):
        replies = []
        widget.send = lambda content, buffers=None: replies.append(content)
        widget._handle_custom_msg(message, [])
        page.evaluate("reply => window.answer(reply)", json.loads(json.dumps(replies[0])))

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
    answer(sent()[1])
    frames(page)
    assert len(sent()) == 2
    page.get_by_role("slider", name="Network").fill("2")
    page.wait_for_function("window.sent.length === 3")
    answer(sent()[2])
    page.wait_for_function("window.sent.length === 4")
    assert [message["purpose"] for message in sent()] == ["now", "now", "now", "start"]


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
        "words => document.querySelector('tr.exposed_ns td.now').textContent === words",
        arg=f"{widget.prediction.exposed_comm_ns / 1e6:.1f} ms",
    )
    assert len(widget.plan) == 6


def test_an_error_of_the_kernel_is_one_line_and_the_next_answer_removes_it(displayed):
    def unplugged(gbit_per_s):
        if gbit_per_s > 300:
            raise OSError("no such network")
        return interactive_timeline.fabric(gbit_per_s)

    page = displayed(small_widget(unplugged))
    page.wait_for_selector(".boundary")
    page.get_by_role("slider", name="Network").fill("12")
    page.wait_for_selector("text=OSError: no such network")
    page.get_by_role("slider", name="Network").fill("5")
    page.wait_for_function("document.querySelector('.error').textContent === ''")


def test_a_kernel_that_does_not_answer_is_named(displayed):
    page = displayed(small_widget(), answered=False)
    page.get_by_role("slider", name="Bucket cap").fill("1")
    page.wait_for_function("document.querySelector('.status').textContent === 'Waiting for the kernel…'")


def test_a_removed_view_hears_nothing_more(displayed):
    page = displayed(small_widget())
    page.wait_for_selector(".boundary")
    redraws = page.evaluate("() => { window.cleanUp(); return window.redraws; }")
    page.evaluate("window.answer({ id: '1', error: 'late' })")
    frames(page)
    assert page.evaluate("window.redraws") == redraws
