"""The interactive page: no address on the network, and in a headless browser the answers of `predict`."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from figures import interactive_timeline
from reference.bucketing import plan_buckets
from simulator import Fabric, Straggler, predict
from simulator.interactive_timeline.page import interactive_page
from simulator.interactive_timeline.simulate_choices import ORDERS, Choices, InteractiveIteration, Question, Start

from ..explore import examples
from ..strategies import iteration, partitions, trace_of
from .chromium import Watched
from .timeline_reader import COUNT, SHOWN, assert_shows, cuts, drag, frames, number, predicted

MS = 10**6
TRACE = trace_of([[iteration(1 * MS, (3 * MS, 2 * MS), 4 * MS, 1 * MS)]], [4 * 10**6, 10**6])


def ring(gbit_per_s: float) -> Fabric:
    return Fabric.from_alpha_beta(alpha_ns=1000, bytes_per_s=gbit_per_s * 1e9 / 8)


def test_the_committed_page_is_the_one_that_the_command_makes():
    assert interactive_timeline.page() == interactive_timeline.PATH.read_text(), "run `make figures`"


def test_the_page_names_no_address_on_the_network():
    addresses = re.findall(r"\bhttps?://[^\"'\s<]+", interactive_timeline.PATH.read_text())
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # a namespace, which no browser loads
    assert not re.findall(r"\b(?:src|href)=\"(?!data:)", interactive_timeline.PATH.read_text())


def test_a_page_is_refused_where_the_browser_would_answer_differently():
    """Each of these has no closed form in `replay.js`."""
    two_ranks = trace_of([[iteration(1, (2,), 3, 4)]] * 2, [4])
    measured = Fabric.from_table([(2, 4, 100)])
    slowed = interactive_timeline.fabric(10).model_copy(update={"slow_link": 2.0})
    for trace, fabric, words in [
        (two_ranks, ring, "expected one rank and a model without buffers, got 2 ranks"),
        (TRACE, lambda _: measured, "expected one that Fabric.from_alpha_beta made"),
        (TRACE, lambda _: slowed, "expected one that Fabric.from_alpha_beta made"),
    ]:
        shown = InteractiveIteration(
            trace, fabric, title="", choices=Choices(world_sizes=(2,)), start=Start(world_size=2)
        )
        with pytest.raises(ValueError, match=re.escape(words)):
            interactive_page(shown, heading="", guidance="", notes="")


ADDRESS = interactive_timeline.PATH.as_uri()


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
