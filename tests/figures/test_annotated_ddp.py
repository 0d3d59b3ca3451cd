"""The Annotated DDP: in a headless browser its numbers are those of `predict`, its imports those of the importer."""

import itertools
import json
import operator
import re
from functools import cache, partial, reduce
from html import unescape
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from ddplab.reference.bucketing import MIB, ONE_BUCKET, assign_buckets, bucket_caps, initial_buckets, plan_buckets
from ddplab.reference.errors import TraceError
from ddplab.reference.trace import PHASES, StepMemory, Trace
from ddplab.simulator import Straggler, import_profile, predict
from ddplab.simulator.capacity.memory import memory_use
from ddplab.simulator.predicted_iteration import Prediction
from ddplab.simulator.schedule.policy import Policy
from figures import five_ways
from figures.annotated_ddp import page as annotated
from figures.interactive_timeline import simulate_choices

from ..chromium import Watched
from ..explore import examples
from ..simulator import profiler_files
from ..simulator.changed_traces import with_iterations, with_workload
from ..simulator.profiler_files import REAL
from ..strategies import iteration, partitions, trace_of, traces
from .timeline_reader import assert_parts_add_up, cuts, drag, frames, number, settle

ADDRESS = annotated.PATH.as_uri()
PROFILES = sorted(REAL.glob("*.json.gz"))
PROFILE_NAMES = [path.name.partition(".")[0] for path in PROFILES]
SCENES = tuple(scene.title.lower() for scene in annotated.SCENES)
GBIT_PER_S, WORLD_SIZES, CAPS_MB = annotated.NETWORKS_GBIT_PER_S, annotated.WORLD_SIZES, annotated.CAPS_MB
PARTS = {part: ones for part, ones in simulate_choices.PARTS.items() if part != "slowdown_ns"}


def test_the_committed_page_is_the_one_that_the_command_makes():
    assert annotated.page() == annotated.PATH.read_text(), "run `make figures`"
    assert annotated.PATH.stat().st_size < 300_000


def test_the_page_names_no_address_on_the_network():
    addresses = re.findall(r"\bhttps?://[^\"'\s<]+", annotated.PATH.read_text())
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # a namespace, which no browser loads
    assert not re.findall(r"\b(?:src|href)=\"(?!data:|\.\./)", annotated.PATH.read_text())


def test_the_code_of_each_scene_is_that_of_the_file():
    for scene in annotated.SCENES:
        file = (annotated.ROOT / scene.path).read_text()
        shown = "\n".join(
            unescape(code) for code in re.findall("<code>(.*?)</code>", annotated.story(scene), re.DOTALL)
        )
        lines = [line.strip() for line in shown.splitlines() if line.strip()]
        assert all(line in file for line in lines)
        assert 5 <= len(lines) <= 25
        assert '"""' not in shown
        assert not re.search(r"\S +# ", shown), "a comment after code wraps to a line without indentation"


# The numbers of the browser


@pytest.fixture(scope="module")
def functions(browser):
    """Calls functions of the page's script: `functions("replay", model, plan, conditions)`."""
    watched = Watched(browser)
    watched.page.goto(ADDRESS)
    watched.page.evaluate(
        """() => {
          const script = document.querySelector("script[type=module]").textContent.replace(/^openPage.*$/m, "");
          const names = script.matchAll(/^(?:async )?(?:function|const) (\\w+)/gm).map(([, name]) => name).toArray();
          window.functions = new Function(`${script}; return { ${names.join(", ")} }`)();
          window.data = JSON.parse(document.getElementById("data").textContent);
          window.traces = Object.fromEntries(window.data.models.map((trace) => [trace.workload.model, trace]));
          window.modelOf = (trace) => {
            const model = window.functions.modelOfTrace(window.traces[trace] ?? trace, window.data.gpus);
            const isOwn = window.data.models.some(({ workload }) => workload.model === trace);
            return isOwn ? { ...model, processor: window.functions.FREE } : model;
          };
          document.body.append(Object.assign(document.createElement("input"), { type: "file", id: "given" }));
        }"""
    )
    for path in PROFILES:
        watched.page.set_input_files("#given", path)
        watched.page.evaluate(
            """async () => {
              const file = document.getElementById("given").files[0];
              const { textOf, traceOfProfile } = window.functions;
              const trace = traceOfProfile(JSON.parse(await textOf(file)), file.name);
              window.traces[trace.workload.model] = trace;
            }"""
        )

    def call(name, *arguments):
        return watched.page.evaluate("([name, some]) => window.functions[name](...some)", [name, list(arguments)])

    call.evaluate = watched.page.evaluate
    yield call
    watched.page.close()


@cache
def imported(path: Path) -> Trace:
    return import_profile([path]).trace


def stretched(trace: Trace, factor: int) -> Trace:
    """The trace with all times multiplied, so that they last as long as all-reduces."""

    def longer(one):
        moments = {name: getattr(one, name) and factor * getattr(one, name) for name in PHASES}
        return one.model_copy(update=moments | {"ready_ns": tuple(factor * ns for ns in one.ready_ns)})

    return with_iterations(trace, longer)


@st.composite
def shown_traces(draw) -> Trace:
    """ResNet-50 of the page; an imported profile; or any small trace, on a GPU that the page knows or not."""
    model = draw(st.sampled_from([*annotated.models().values(), *map(imported, PROFILES), None, None, None]))
    if model is not None:
        return model
    trace = stretched(draw(traces()), draw(st.sampled_from([1, 1000, 50_000])))
    device = draw(st.sampled_from(["a processor", "NVIDIA A100-SXM4-80GB", "Tesla V100-SXM2-32GB", "NVIDIA L40S"]))
    return with_workload(trace, device_name=device)


def plan_of(scene: str, trace: Trace, cap_mb: float | None) -> list[list[int]]:
    sizes, keys = trace.sizes_bytes, trace.keys
    last = trace.ranks[0].iterations[-1].ready_ns
    match scene:
        case "naive":
            return [[index] for index in range(len(sizes))]
        case "flat":
            return assign_buckets(sizes, [ONE_BUCKET], keys=keys, order=range(len(sizes)))
        case "overlapped":
            return initial_buckets(sizes, [0], keys=keys)
        case "bucketed":
            return initial_buckets(sizes, bucket_caps(cap_mb), keys=keys)
    order = sorted(range(len(sizes)), key=last.__getitem__)
    return plan_buckets("ready", sizes, bucket_caps(cap_mb), keys=keys, ready_order=order)


def predicted(trace: Trace, scene: str, plan, gbit_per_s: int, world_size: int, factor: float) -> Prediction:
    return predict(
        trace,
        annotated.fabric(trace, gbit_per_s),
        world_size=world_size,
        plan=plan,
        stragglers=[Straggler(rank=world_size - 1, factor=factor)] if factor > 1 else [],
        gradient_as_bucket_view=scene == "naive",  # averaged in place, so nothing is copied out
        broadcast_buffers=False,
        assume=False,
    )


@examples(100)
@given(
    trace=shown_traces(),
    scene=st.sampled_from(SCENES),
    cap=st.integers(0, len(CAPS_MB) - 1),
    gbit_per_s=st.sampled_from(GBIT_PER_S),
    world_size=st.sampled_from(WORLD_SIZES),
    factor=st.one_of(st.just(1.0), st.integers(20, 40).map(lambda steps: steps / 20), st.floats(1, 2)),
    data=st.data(),
)
def test_the_page_predicts_as_predict_does(functions, trace, scene, cap, gbit_per_s, world_size, factor, data):
    """To the nanosecond, also with moved boundaries."""
    given_plan = None
    if scene in ("bucketed", "rebuilt") and data.draw(st.booleans()):
        given_plan = data.draw(partitions(len(trace.keys), tuple(trace.keys)))
    plan = given_plan or plan_of(scene, trace, CAPS_MB[cap])
    known = any(trace is one for one in (*annotated.models().values(), *map(imported, PROFILES)))
    document = trace.workload.model if known else json.loads(trace.model_dump_json())
    plan_shown, answer, longest_ns = functions.evaluate(
        """([trace, scene, cap, gbit_per_s, world_size, factor, given]) => {
          const { computationOf, layoutOfScene, planOf, replay } = window.functions;
          const model = window.modelOf(trace);
          const conditions = { ...data.scenes.find(({ id }) => id === scene), gbit_per_s, world_size, factor };
          const shown = given ?? planOf(layoutOfScene(conditions, model, data.caps[cap].bytes));
          return [shown, replay(model, shown, conditions), computationOf(model, conditions).iteration_ns];
        }""",
        [document, scene, cap, gbit_per_s, world_size, factor, given_plan],
    )
    if scene == "bucketed" and given_plan is None:  # in the order in which boundaries move
        plan = [bucket[::-1] for bucket in plan]
    assert plan_shown == plan
    assert answer["iteration_ns"] <= longest_ns, "the axis of the guess ends before the answer"
    expected = predicted(trace, scene, plan, gbit_per_s, world_size, factor)
    assert answer["compute_ns"] == expected.compute_ns
    assert sum(answer["parts"].values()) == answer["iteration_ns"]
    if scene in ("naive", "flat"):
        assert answer["iteration_ns"] == expected.no_overlap_ns
        return
    assert answer["iteration_ns"] == expected.iteration_ns
    assert answer["parts"] == {part: sum(expected.breakdown[one] for one in ones) for part, ones in PARTS.items()}
    timeline = expected.timeline
    moments = zip(timeline.start_ns.tolist(), timeline.done_ns.tolist(), strict=True)
    assert [(start, end) for _, _, start, end in answer["collectives"]] == list(moments)
    for rank in answer["ranks"]:
        spans = [span for span in expected.spans if span.rank == rank["rank"] and span.stream == "compute"]
        assert rank["spans"] == [[span.kind, span.bucket, span.start_ns, span.end_ns] for span in spans]


@pytest.mark.parametrize("path", PROFILES, ids=PROFILE_NAMES)
def test_a_profile_is_imported_as_the_importer_does(functions, path):
    trace = imported(path)
    mine, theirs = functions.evaluate(
        "([name, trace]) => [window.modelOf(name), window.modelOf(trace)]",
        [trace.workload.model, json.loads(trace.model_dump_json())],
    )
    assert mine | {"ran": None} == theirs | {"ran": None}
    assert mine["ran"]
    assert len(mine["ranks"][0]) == len(trace.ranks[0].iterations)


@examples(12)
@given(
    ready=st.lists(st.integers(0, 10**8), min_size=1, max_size=6),
    gbit_per_s=st.sampled_from(GBIT_PER_S),
    data=st.data(),
)
def test_no_layout_beats_the_best_known_one_where_copies_are_free(functions, ready, gbit_per_s, data):
    """Tries every way to cut a few gradients in ready order."""
    count = len(ready)
    sizes = data.draw(st.lists(st.integers(1, 40 * MIB), min_size=count, max_size=count))
    trace = trace_of([[iteration(0, tuple(ready), max(ready), 0)]], sizes)
    order = sorted(range(count), key=ready.__getitem__)
    plans = [
        [order[low:high] for low, high in itertools.pairwise([0, *places, count])]
        for some in range(count)
        for places in itertools.combinations(range(1, count), some)
    ]
    best_ns, fastest_ns = functions.evaluate(
        """([trace, plans, gbit_per_s]) => {
          const { bestLayout, layoutOfScene, replay } = window.functions;
          const model = window.modelOf(trace);
          const conditions = { ...data.scenes.at(-1), gbit_per_s, world_size: 8, factor: 1 };
          const layouts = [layoutOfScene(conditions, model, data.caps[0].bytes)];
          const times = plans.map((plan) => replay(model, plan, conditions).iteration_ns);
          return [bestLayout(model, layouts, conditions).iteration_ns, Math.min(...times)];
        }""",
        [json.loads(trace.model_dump_json()), plans, gbit_per_s],
    )
    assert fastest_ns <= best_ns <= fastest_ns + count, "the search does not round the time of each all-reduce"


@examples(20)
@given(now=st.integers(0, 10**9), default=st.integers(1, 10**9), best=st.integers(1, 10**9))
def test_the_score_is_0_at_the_default_and_100_at_the_best(functions, now, default, best):
    best, default = sorted((best, default))
    score = functions("scoreOf", now, default, best)
    assert 0 <= score <= 100
    assert (score == 100) == (now <= best)
    assert score > 0 or now >= default or best == default or 100 * (default - now) < default - best


# The page


def opened_at(browser, address="", **window):
    watched = Watched(browser, **window)
    watched.page.goto(ADDRESS + address)
    watched.page.wait_for_selector(".picture svg text")
    frames(watched.page)
    return watched


@pytest.fixture
def opened(browser):
    """Opens the committed page at an address; closes it at the end, when it must have had no error."""
    seen = []

    def open_page(address="", **window):
        seen.append(opened_at(browser, address, **window))
        return seen[-1].page

    yield open_page
    for watched in seen:
        watched.page.close()
        assert watched.problems == []
        assert {address.partition("#")[0] for address in watched.requested if "data:" not in address} == {ADDRESS}


def click(page, button) -> None:
    page.get_by_role("button", name=button).click()
    frames(page)


RESNET = annotated.models()["ResNet-50"]
START = 10, 8, 1.0
"""Gbit/s, GPUs and straggler at the start."""


def assert_shows(page, prediction: Prediction) -> None:
    frames(page)
    assert number(page, "iteration_ns") == round(prediction.iteration_ns / 1e6, 1)
    shown = [number(page, part) for part in PARTS]
    assert sum(shown) == pytest.approx(number(page, "iteration_ns"), abs=1e-6), "the parts do not add up"
    exact = [sum(prediction.breakdown[one] for one in ones) / 1e6 for ones in PARTS.values()]
    assert shown == pytest.approx(exact, abs=0.11)


@examples(12)
@given(
    scene=st.sampled_from(SCENES),
    model=st.sampled_from(sorted(annotated.models())),
    gbit_per_s=st.sampled_from(GBIT_PER_S),
    gpus=st.sampled_from(WORLD_SIZES),
    straggler=st.integers(20, 40).map(lambda steps: steps / 20),
)
def test_the_shown_parts_add_up_in_every_state(still_open, scene, model, gbit_per_s, gpus, straggler):
    address = f"scene={scene}&model={model}&gbit={gbit_per_s}&gpus={gpus}&straggler={straggler}"
    still_open.evaluate("address => { location.hash = address; }", address)
    still_open.wait_for_function("scene => document.querySelector('tr.now th').textContent === scene", arg=scene)
    frames(still_open)
    assert_parts_add_up(still_open)


def test_an_address_is_read_if_the_state_before_settles_meanwhile(opened):
    """The page writes the settled state into the address, maybe between a reader's change of it and its event."""
    page = opened("#scene=naive")
    page.evaluate("() => { location.hash = 'scene=bucketed'; history.replaceState(null, '', '#scene=naive'); }")
    frames(page)
    assert page.locator("tr.now th").text_content() == "bucketed"


@pytest.fixture(scope="module")
def still_open(browser):
    """The page, opened once."""
    watched = opened_at(browser)
    yield watched.page
    watched.page.close()
    assert watched.problems == []


def with_boundaries(places) -> list[list[int]]:
    (sequence,) = plan_of("rebuilt", RESNET, float("inf"))
    return [sequence[low:high] for low, high in itertools.pairwise([0, *places, len(sequence)])]


def test_the_page_opens_with_the_state_of_the_readme(opened):
    """Network, number of GPUs and cap of `figures/five_ways.png`, in which each way has its time."""
    (ways,) = five_ways.panels()
    page = opened("#scene=naive")
    for way in ways:
        click(page, way.name)
        if page.get_by_role("button", name="See").is_visible():
            click(page, "See")
        assert number(page, "iteration_ns") == round(way.iteration_ms, 1)


def test_dragged_boundaries_are_compared_with_the_cap_of_the_same_scene(opened):
    """Fails if the first drag changes nothing, or if "Show best" also changes the order of the gradients."""
    page = opened("#scene=rebuilt")
    start, seen = number(page, "iteration_ns"), set()
    for boundary in range(len(cuts(page))):
        for by_px in (-14, 14):
            drag(page, boundary, by_px)
            assert_shows(page, predicted(RESNET, "rebuilt", with_boundaries(cuts(page)), *START))
            assert number(page, "iteration_ns", "baseline") == start
            seen.add(number(page, "iteration_ns"))
            click(page, "Reset")
    assert len(seen) > 1
    click(page, "Show best")
    assert number(page, "iteration_ns", "baseline") == start


def test_sliders_move_both_sides(opened):
    page = opened("#scene=bucketed")
    frames(page)
    settings = {"Network": 10, "GPUs": 5, "Straggler": 1.25, "Cap": 4}
    for name, place in settings.items():
        page.get_by_role("slider", name=name).fill(str(place))
    frames(page)
    chosen = GBIT_PER_S[10], WORLD_SIZES[5], 1.25
    assert_shows(page, predicted(RESNET, "bucketed", plan_of("bucketed", RESNET, CAPS_MB[4]), *chosen))
    baseline = predicted(RESNET, "overlapped", plan_of("overlapped", RESNET, None), *chosen)
    assert number(page, "iteration_ns", "baseline") == round(baseline.iteration_ns / 1e6, 1)
    now, before = number(page, "iteration_ns"), number(page, "iteration_ns", "baseline")
    assert number(page, "iteration_ns", "difference") == pytest.approx(now - before)
    assert page.locator("svg text", has_text="rank 63, slow").count() == 1


@pytest.mark.parametrize(("width", "height"), [(390, 800), (1280, 800)])
def test_one_guesses_before_one_sees(opened, width, height):
    """The slider ends at the same moment in every scene, which is no hint; question and result are beside it."""
    page = opened(width=width, height=height)
    slider, ends = page.get_by_role("slider", name="Moment in the iteration"), set()
    for scene in SCENES[1:]:
        click(page, scene.title())
        assert page.locator("tr.now td.iteration_ns").inner_text() == "?"
        assert page.locator("svg path.hidden, svg path.exposed").first.get_attribute("d") == ""
        assert page.locator(".note").inner_text().startswith("Guess first. ")
        slider.fill(str(150 * 10**6))
        frames(page)
        ends.add(slider.get_attribute("max"))
        assert page.locator(".moment").inner_text() == "Your guess: 150.0 ms."
        click(page, "See")
        note = page.locator(".note").bounding_box()
        assert note["y"] + note["height"] <= height
        assert 0 <= note["y"] - slider.bounding_box()["y"] < 60
        now = number(page, "iteration_ns")
        off = f"{100 * (150 - now) / now:+.0f}".replace("-", "\N{MINUS SIGN}")
        words = f"You guessed 150.0 ms ({off} %); the iteration takes {now:.1f} ms."
        assert page.locator(".note").inner_text() == words
    assert len(ends) == 1
    page.get_by_role("slider", name="GPUs").fill("3")
    frames(page)
    assert "You guessed" not in page.locator(".note").inner_text(), "the guess was about other GPUs"


def test_the_goal_has_a_score_and_the_best_known_time(opened):
    page = opened("#scene=rebuilt")
    page.wait_for_selector("text=Best known")
    words = page.locator(".buttons p").first.inner_text()
    default = predicted(RESNET, "rebuilt", plan_of("rebuilt", RESNET, None), *START)
    assert f"torch's default cap, {default.iteration_ns / 1e6:.1f} ms" in words
    click(page, "Show best")
    best = predicted(RESNET, "rebuilt", with_boundaries(cuts(page)), *START)
    assert_shows(page, best)
    assert f"Best known: {best.iteration_ns / 1e6:.1f} ms" in words
    assert best.iteration_ns < default.iteration_ns
    assert page.locator(".score").inner_text() == "Score 100"


def test_the_address_holds_the_state(opened):
    page = opened("#scene=rebuilt&model=ResNet-50&gbit=100&gpus=64&straggler=1.5&cap=10")
    drag(page, 1, -20)
    settle(page)
    hash_, places, now = page.evaluate("location.hash"), cuts(page), number(page, "iteration_ns")
    again = opened(hash_)
    assert cuts(again) == places
    assert number(again, "iteration_ns") == now
    settle(again)
    assert again.evaluate("location.hash") == hash_
    again.evaluate("location.hash = '#scene=naive&gbit=5'")
    frames(again)
    assert again.locator("[aria-current=step]").inner_text() == "Naive"


def test_an_address_with_wrong_values_is_named_in_one_line(opened):
    page = opened("#scene=rebuilt&gpus=7&cap=3&cuts=9-5")
    words = page.locator(".file-error").inner_text()
    assert words == "address: expected values that the page has, got others for gpus, cap, cuts"


def test_a_dropped_trace_is_predicted_to_the_nanosecond(opened, tmp_path):
    """Two ranks of two iterations on an A100, dropped as a file."""
    ms = 10**6
    one, other = (iteration(9 * ms, (60 * ms + by, 35 * ms, 20 * ms), 61 * ms, 2 * ms) for by in (0, 777_777))
    trace = trace_of([[one, other], [other, other]], [40 * 10**6, 30 * 10**6, 50 * 10**6])
    trace = with_workload(trace, model="my model", device_name="NVIDIA A100-SXM4-80GB")
    for name in ("mine.json.gz", "mine.json"):
        trace.save(tmp_path / name)
        page = opened("#scene=rebuilt&gpus=64&cap=25")
        drop(page, tmp_path / name)
        page.get_by_role("heading", name="my model on NVIDIA A100-SXM4-80GB").wait_for()
        page.get_by_role("button", name="Look at the timeline").click()
        assert_shows(page, predicted(trace, "rebuilt", plan_of("rebuilt", trace, 25), 10, 64, 1.0))


def assert_inside(box, width, height=800) -> None:
    """The box is in the part of the page that the reader sees without scrolling."""
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= height


def drop(page, path, x=20, y=20) -> None:
    """Drop a file at a place of the page."""
    content = list(path.read_bytes())
    page.evaluate(
        """([name, content, clientX, clientY]) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([new Uint8Array(content)], name));
          for (const kind of ["dragover", "drop"]) {
            const event = { dataTransfer, bubbles: true, cancelable: true, clientX, clientY };
            document.body.dispatchEvent(new DragEvent(kind, event));
          }
        }""",
        [path.name, content, x, y],
    )


@pytest.mark.parametrize(("path", "width"), list(zip(PROFILES, (390, 1280, 390), strict=True)), ids=PROFILE_NAMES)
def test_a_dropped_profile_is_answered_in_one_picture(opened, path, width):
    """The step, three networks with three numbers of GPUs, each with the fastest cap, and the memory."""
    trace, page = imported(path), opened(width=width, height=800)
    drop(page, path)
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Fits?").wait_for()
    assert_inside(dialog.bounding_box(), width)
    assert dialog.evaluate("element => element.scrollWidth <= element.clientWidth")
    step, *rows = (row.split("\t") for row in dialog.locator("tbody tr:not(:has([colspan]))").all_inner_texts())
    durations = sorted(one.end_ns - one.forward_start_ns for one in trace.ranks[0].iterations)
    assert float(step[2]) == round(durations[len(durations) // 2] / 1e6, 1)
    for row, (gbit_per_s, world_size) in zip(rows, itertools.product((10, 100, 400), (2, 8, 64)), strict=True):
        plans = (plan_of("rebuilt", trace, cap) for cap in CAPS_MB)
        every = [predicted(trace, "rebuilt", plan, gbit_per_s, world_size, 1.0) for plan in plans]
        best = min(every, key=lambda one: one.iteration_ns)
        assert row[0] == f"{world_size} GPUs"
        expected_ms = [best.iteration_ns / 1e6, best.exposed_comm_ns / 1e6]
        assert list(map(float, row[2:4])) == pytest.approx(expected_ms, abs=0.051)
    link = dialog.get_by_role("link").nth(1)
    link.click()
    frames(page)
    assert not dialog.is_visible()
    assert number(page, "iteration_ns") == float(rows[1][2])


@examples(20)
@given(data=st.data(), trace=traces(), device=st.sampled_from(["NVIDIA A100-SXM4-80GB", "NVIDIA L4", "unknown"]))
def test_the_page_counts_memory_as_the_planner_does(functions, data, trace, device):
    """Whether training with AdamW fits, for traces with and without counted activations."""
    count, size = len(trace.keys), st.integers(0, 10**11)
    zeros = {"kept_bytes": 0, "peak_bytes": 0, "ready_bytes": (0,) * count}
    sizes = {name: data.draw(size) for name in ("batch_bytes", "frozen_bytes", "peak_with_gradients_bytes")}
    held = StepMemory(batch=8, **sizes, **zeros)
    trace = with_workload(trace, device_name=device, memory=data.draw(st.sampled_from([None, held])))
    expected = memory_use(trace, Policy(), "adam")
    memory_of = "trace => window.functions.memoryUse(window.modelOf(trace), data.gpus.memory)"
    shown = functions.evaluate(memory_of, json.loads(trace.model_dump_json()))
    assert shown["answer"] == expected.answer
    assert shown["band_bytes"] == list(expected.band_bytes)
    assert shown["capacity"] == expected.capacity_bytes
    parts = ("parameters", "buffers", "buckets", "optimizer")
    assert shown["known_bytes"] == sum(expected.parts[part] for part in parts)


UNREADABLE = {
    "{": "bad.json: expected an undamaged trace or profile, got one that cannot be read: ",
    "\N{REPLACEMENT CHARACTER}PNG\r\n": "bad.json: expected a profile or a trace (.json, .json.gz), got another kind",
    "[]": "bad.json: expected a trace as `ddplab record` writes it, or a file of torch's profiler, got ",
    '{"traceEvents": []}': "bad.json: expected events of torch's profiler with a category and a duration",
    '{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1}]}': "expected training steps",
    trace_of([[iteration(1, (3, None), 4, 1)]], [4, 4]).model_dump_json(): (
        "bad.json: rank 0, iteration 0: parameter 1 got no gradient"
    ),
}
"""What the page says about the content of a file."""


DAMAGED = {
    "workload.model": [None, 5, {}],
    "workload.parameters.0.name": [None, {}],
    "workload.parameters.0.size_bytes": [None, "4", -4, 1.5, [4], 1e300],
    "workload.memory_bytes_per_s": ["fast", -1, 1e-300],
    "ranks.0.iterations": [[], None, {}],
    "ranks.0.iterations.0.ready_ns": [None, [], [2, 3, 3], ["2", "3"], [1e300, 3], [0, 3]],
    "ranks.0.iterations.0.end_ns": [None, "z", -1e12, 1e300],
    "ranks.0.iterations.0.forward_start_ns": [None, "0", 2],
}
"""Values that no trace has, by their place."""


def two_processes(events):
    return [one for one in events if not one["name"].startswith("ProfilerStep")] + [
        one | {"pid": one["pid"] + 1000} for one in events if not one["name"].startswith("ProfilerStep")
    ]


def early_kernels(events):
    return [one | {"ts": one["ts"] - 5000 * ("stream" in one["args"])} for one in events]


def with_durations_in_ns(events, *, of):
    """The other times are in microseconds, so all-reduces took seconds."""
    return [
        one | {"dur": one["dur"] * (1000 if "stream" in one["args"] and of in one["name"] else 1)} for one in events
    ]


def without_kernels(events, *, of_library):
    """Leave out the kernels of collectives and their launches, or all others, whose launches then ran nothing."""
    kinds = ("kernel",) if of_library else ("kernel", "gpu_memcpy")
    lost = [one for one in events if one["cat"] in kinds and ("nccl" in one["name"]) == of_library]
    ids = {one["args"]["correlation"] for one in lost}
    kept = [one for one in events if one not in lost]
    return [one for one in kept if not of_library or one.get("args", {}).get("correlation") not in ids]


def with_a_forward_pass_at_the_end(events):
    forward, optimizer = (
        next(one for one in events if one["name"].startswith(name))
        for name in ("DistributedDataParallel.forward", "Optimizer.step")
    )
    return [*events, forward | {"ts": optimizer["ts"], "dur": optimizer["dur"] / 2}]


def with_two_passes_in_a_step(events):
    """Two steps, whose losses their forward passes compute, become one."""
    first, second, *_ = (one for one in events if one["name"].startswith("ProfilerStep"))
    rest = [one for one in events if not one["name"].startswith("ProfilerStep")]
    return [*rest, first | {"dur": second["ts"] + second["dur"] - first["ts"]}]


def sharded(events):
    return [*events, events[0] | {"cat": "cpu_op", "name": "FSDP::all_gather (0)"}]


DAMAGED_EVENTS = {
    "expected the kernels of": [partial(without_kernels, of_library=False)],
    "expected a kernel of each all-reduce of 2 ranks, got none": [partial(without_kernels, of_library=True)],
    "expected all forward passes of a step before": [with_a_forward_pass_at_the_end],
    "expected one backward pass in each step": [with_two_passes_in_a_step],
    "expected training under DistributedDataParallel": [sharded],
    "expected the events of one rank, each once": [two_processes, lambda events: events + events],
    "expected what the GPU ran after": [early_kernels],
    "expected what a GPU stream ran one after another": [
        partial(with_durations_in_ns, of=""),
        partial(with_durations_in_ns, of="ncclDevKernel"),
    ],
    "expected events of 0 us or longer": [lambda events: [*events[:-1], events[-1] | {"dur": -1}]],
}


IMPORTER_SAYS = {"expected the kernels of": "expected what each of 48 launches ran"}
"""Where its words are others than those of the page, which does not count launches."""


@pytest.mark.parametrize("words", DAMAGED_EVENTS)
def test_the_page_refuses_the_profiles_that_the_importer_refuses(functions, tmp_path, words):
    document, _ = profiler_files.profile(profiler_files.SMALL)
    ask = "raw => { try { window.functions.traceOfProfile(raw, 'a'); return ''; } catch (e) { return e.message; } }"
    assert functions.evaluate(ask, document) == ""
    for damage in DAMAGED_EVENTS[words]:
        damaged = document | {"traceEvents": damage(document["traceEvents"])}
        with pytest.raises(TraceError, match=IMPORTER_SAYS.get(words, words)):
            import_profile([profiler_files.write(damaged, tmp_path / "rank0.json")])
        assert functions.evaluate(ask, damaged).startswith(words)


def test_a_damaged_trace_is_refused_and_no_answer_is_shown(functions):
    whole = trace_of([[iteration(1, (3, 2), 4, 1)]], [4, 4]).model_dump_json()
    ask = "trace => { try { window.modelOf(trace); return ''; } catch (error) { return error.message; } }"
    assert functions.evaluate(ask, json.loads(whole)) == ""
    for place, values in DAMAGED.items():
        *path, last = (int(part) if part.isdecimal() else part for part in place.split("."))
        for value in values:
            document = json.loads(whole)
            reduce(operator.getitem, path, document)[last] = value
            assert functions.evaluate(ask, document), (place, value)


def test_a_name_cannot_reverse_what_stands_beside_it(opened, tmp_path):
    trace = with_workload(trace_of([[iteration(1, (3, 2), 4, 1)]], [4, 4]), device_name="A100 80GB")
    document = json.loads(trace.model_dump_json())
    document["workload"] |= {"device_name": "A100 80GB\u202e", "model": "<img src=x onerror=alert(1)>\u202e"}
    (tmp_path / "forged.json").write_text(json.dumps(document))
    page = opened()
    drop(page, tmp_path / "forged.json", 300, 300)
    page.locator("dialog.forecast").wait_for()
    said = page.locator("body").inner_text()
    assert "\\u202e" in said
    assert "\u202e" not in said
    assert page.locator("img").count() == 0


def test_a_file_that_cannot_be_read_is_named_in_one_line(opened, tmp_path):
    """The message stands where the file was dropped."""
    path, page = tmp_path / "bad.json", opened()
    before, message = number(page, "iteration_ns"), page.locator(".file-error")
    places = (5, 5), (9, 9), (300, 795), (900, 400), (1275, 60), (640, 600)
    for (content, words), (x, y) in zip(UNREADABLE.items(), places, strict=True):
        path.write_text(content)
        drop(page, path, x, y)
        page.locator(".file-error", has_text=words).wait_for()
        assert "\n" not in message.inner_text()
        assert number(page, "iteration_ns") == before
        box = message.bounding_box()
        assert_inside(box, 1280)
        assert abs(box["x"] - x) <= 360
        assert abs(box["y"] - y) <= 200


@pytest.mark.parametrize("width", [390, 1280])
def test_the_network_row_is_painted_for_as_long_as_all_reduces_run(opened, width):
    """Isolates edges that hid narrow bars; the tolerance covers bars that were widened to one pixel."""
    page = opened("#scene=naive", width=width, height=800)
    axis = page.locator("path.axis").bounding_box()
    end_ms = float(page.locator("text.tick").last.text_content().removesuffix(" ms"))
    row = {"x": axis["x"], "y": round(axis["y"]) - 6, "width": axis["width"], "height": 1}
    pixels = imread(BytesIO(page.screenshot(clip=row)))[0, :, :3] * 255
    painted = (abs(pixels - (0xD1, 0x49, 0x5B)).max(axis=1) < 2).sum()
    communication = number(page, "exposed_ns") / end_ms
    assert painted / axis["width"] == pytest.approx(communication, rel=0.07)


@pytest.mark.parametrize(("width", "height"), [(390, 800), (1280, 800)])
def test_all_controls_are_reached_without_scrolling(opened, width, height):
    for address in ("", "#scene=rebuilt&straggler=1.5", "#scene=naive&gpus=7"):
        page = opened(address, width=width, height=height)
        if "rebuilt" in address:
            page.wait_for_selector("text=Best known")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        controls = page.locator(
            "header :is(select, input, button), .scene, .controls input, .scrubber :is(button, input), "
            ".buttons > *, .picture, .note, .file-error"
        )
        boxes = controls.evaluate_all("all => all.map(one => one.getBoundingClientRect().toJSON())")
        shown = [box for box in boxes if box["width"] and box["height"]]
        assert len(shown) > 10
        for box in shown:
            assert_inside(box, width)
        if width > 900:
            legend = page.locator(".legend").bounding_box()
            assert legend["y"] + legend["height"] <= height


def test_text_is_dark_on_bright_and_in_a_dark_scheme_bright_on_dark(opened):
    page = opened()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        both = "['color', 'backgroundColor'].map(name => getComputedStyle(document.body)[name])"
        bright = [sum(map(int, re.findall(r"\d+", colour)[:3])) > 384 for colour in page.evaluate(both)]
        assert bright == ([False, True] if scheme == "light" else [True, False])


def test_every_control_is_reached_with_tab(opened):
    page = opened("#scene=rebuilt")
    page.wait_for_selector("text=Best known")
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.className || document.activeElement.type"))
    assert reached.count("scene") == 5
    assert reached.count("range") == 5
    assert {"boundary", "next", "select-one", "file", "button"} <= {name.partition(" ")[0] for name in reached}


def test_a_key_moves_the_focused_boundary(opened):
    page = opened("#scene=rebuilt")
    *others, place = cuts(page)
    last = len(others)
    moves = {"ArrowUp": 1, "ArrowRight": 1, "ArrowDown": -1, "ArrowLeft": -1, "PageUp": 10, "PageDown": -10}
    for key, moved in moves.items():
        page.locator(".boundary").nth(last).focus()
        page.keyboard.press(key)
        frames(page)
        place += moved
        assert cuts(page) == [*others, place], key


def test_boundaries_are_split_and_removed(opened):
    page = opened("#scene=bucketed")
    before = cuts(page)
    click(page, "Split")
    assert set(before) < set(cuts(page))
    click(page, "Remove")
    assert cuts(page) == before


def test_a_finger_drags_a_boundary(opened):
    page = opened("#scene=rebuilt", width=390, height=800, has_touch=True, is_mobile=True)
    before = cuts(page)
    knob = page.locator(".boundary .knob").nth(1).bounding_box()
    touch = page.context.new_cdp_session(page)
    x, y = knob["x"] + 8, knob["y"] + 6
    for kind, points in [
        ("touchStart", [{"x": x, "y": y}]),
        *(("touchMove", [{"x": x, "y": y - step}]) for step in range(3, 30, 3)),
        ("touchEnd", []),
    ]:
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    frames(page)
    assert cuts(page)[1] > before[1]


def test_next_moves_the_moment_to_each_event_and_at_the_end_to_the_start(opened):
    page = opened("#scene=rebuilt")
    moment = page.get_by_role("slider", name="Moment in the iteration")
    prediction = predicted(RESNET, "rebuilt", plan_of("rebuilt", RESNET, None), *START)
    times = {*prediction.timeline.start_ns.tolist(), *prediction.timeline.done_ns.tolist(), prediction.iteration_ns}
    for expected in [*sorted(times), 0]:
        click(page, "Next")
        assert float(moment.input_value()) == pytest.approx(expected, abs=1e5)


def test_links_lead_to_files_of_the_repository(opened):
    page = opened()
    links = [link.get_attribute("href") for link in page.locator(".about nav a").all()]
    assert len(links) == 3
    assert all((annotated.FIGURES / link).is_file() for link in links)
