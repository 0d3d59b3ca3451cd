"""The interactive timeline in the kernel: questions in, answers out, errors as one line, and the committed page."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from figures import interactive_timeline
from simulator import Fabric, Straggler, predict
from simulator.interactive_timeline.browser_code import FOLDER, SCRIPTS, script
from simulator.interactive_timeline.page import interactive_page
from simulator.interactive_timeline.reader_choices import Choices, InteractiveIteration, Question, Start
from simulator.interactive_timeline.widget import InteractiveTimeline

from .explore import examples
from .strategies import fluid_fabrics, iteration, partitions, steady_fabrics, trace_of, traces

MS = 10**6
TRACE = trace_of([[iteration(1 * MS, (3 * MS, 2 * MS), 4 * MS, 1 * MS)]], [4 * 10**6, 10**6])


def ring(gbit_per_s: float) -> Fabric:
    return Fabric.from_alpha_beta(alpha_ns=1000, bytes_per_s=gbit_per_s * 1e9 / 8)


def asked(plan=((1,), (0,)), world_size=2, gbit_per_s=10.0, factor=1.0) -> dict:
    return {"plan": plan, "world_size": world_size, "gbit_per_s": gbit_per_s, "factor": factor}


class Kernel:
    """An InteractiveTimeline whose replies are collected."""

    def __init__(self, fabric=ring, trace=TRACE, **start) -> None:
        self.replies: list[dict] = []
        self.widget = InteractiveTimeline(trace, fabric, world_size=2, gbit_per_s=10.0, **start)
        self.widget.send = lambda content, buffers=None: self.replies.append(content)

    def reply(self, question, purpose="now") -> dict:
        self.widget._handle_custom_msg({"id": "1", "purpose": purpose, "question": question}, [])
        return json.loads(json.dumps(self.replies.pop()))


def test_the_kernel_answers_with_the_numbers_of_predict():
    answer = Kernel().reply(asked(factor=1.5))["answer"]
    expected = predict(TRACE, ring(10), world_size=2, plan=[[1], [0]], stragglers=[Straggler(rank=1, factor=1.5)])
    assert answer["iteration_ns"] == expected.iteration_ns
    assert answer["exposed_ns"] == expected.exposed_comm_ns
    assert answer["compute_ns"] == expected.compute_ns
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 1]
    assert answer["ranks"][1]["ready_ns"] == [4_500_000, 3_000_000]


def test_the_notebook_reads_the_plan_and_the_prediction_that_are_shown():
    kernel = Kernel(bucket_cap_mb=25)
    assert kernel.widget.plan == ((1, 0),)
    kernel.reply(asked())
    assert kernel.widget.plan == ((1,), (0,)) == kernel.widget.prediction.buckets
    kernel.reply(asked(plan=((0, 1),)), purpose="start")
    assert kernel.widget.plan == ((1,), (0,)), "the layout to compare with replaced the one that is shown"


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (asked(plan=((1,),)), "ValueError: plan: parameters [0] are in no bucket"),
        (asked(world_size=0), "ValueError: world_size: input should be greater than or equal to 1, got 0"),
        ({"plan": 3}, "ValueError: question: expected plan, world_size, gbit_per_s, factor"),
    ],
)
def test_an_invalid_question_is_answered_with_one_line(question, words):
    kernel = Kernel()
    reply = kernel.reply(question)
    assert reply["error"].startswith(words)
    assert "\n" not in reply["error"]
    assert reply["id"] == "1"
    assert "answer" in kernel.reply(asked())


def test_an_error_of_the_users_fabric_is_answered_with_one_line():
    def unplugged(gbit_per_s):
        if gbit_per_s < 10:
            raise OSError("no such network\nand no other")
        return ring(gbit_per_s)

    assert Kernel(unplugged).reply(asked(gbit_per_s=1.0))["error"] == "OSError: no such network"


def test_a_trace_without_a_prediction_is_refused_at_once():
    unused = trace_of([[iteration(1 * MS, (3 * MS, None), 4 * MS, 1 * MS)]], [4, 4])
    with pytest.raises(ValueError, match="got no gradient"):
        InteractiveTimeline(unused)
    with pytest.raises(ValueError, match="order: expected one of ready, reverse, forward, got 'size'"):
        InteractiveTimeline(TRACE, order="size")


def test_start_values_are_added_to_the_choices():
    data = InteractiveTimeline(TRACE, world_size=3, gbit_per_s=7, bucket_cap_mb=0.5).data
    assert 3 in data["world_sizes"]
    assert data["gbit_per_s"][data["start"]["gbit_per_s"]] == 7
    assert data["caps"][data["start"]["cap"]] == "0.5 MiB"
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(InteractiveTimeline(TRACE).data)) | {
        name: json.loads(json.dumps(data[name]))
        for name in ("caps", "gbit_per_s", "world_sizes", "layouts", "start", "answer")
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
        "try: from simulator.interactive_timeline.widget import InteractiveTimeline\n"
        "except ImportError as error: sys.exit(str(error))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr == "InteractiveTimeline needs anywidget; run `pip install 'ddplab[tutorials]'`\n"


def test_layouts_are_those_of_predict():
    shown = interactive_timeline.iteration()
    document = shown.document()
    for order, layouts in document["layouts"].items():
        for cap, layout in zip(shown.choices.bucket_caps_mb, layouts, strict=True):
            prediction = predict(shown.trace, shown.fabric(10), world_size=2, bucket_cap_mb=cap, order=order)
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


@examples(60)
@given(answers())
def test_an_answer_is_consistent_on_any_fabric(shown_and_question):
    """Fails if slow-downs, or several collectives at a time, move a gradient out of its backward pass."""
    shown, question = shown_and_question
    prediction = shown.predict(question)
    answer = shown.answer(question, prediction)
    assert sum(end - start for start, end in answer["exposed"]) == prediction.exposed_comm_ns
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


def test_the_committed_page_is_the_one_that_the_command_makes():
    assert interactive_timeline.page() == interactive_timeline.PATH.read_text(), "run `make figures`"


def test_the_page_names_no_address_on_the_network():
    addresses = re.findall(r"\bhttps?://[^\"'\s<]+", interactive_timeline.PATH.read_text())
    assert set(addresses) == {"http://www.w3.org/2000/svg"}  # a namespace, which no browser loads
    assert not re.findall(r"\b(?:src|href)=\"(?!data:)", interactive_timeline.PATH.read_text())


def test_every_file_beside_the_module_is_used():
    used = {*SCRIPTS, "replay.js", "timeline.css", "page.html"}
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".js", ".css", ".html")} == used
    assert script().count("export default") == 1


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
