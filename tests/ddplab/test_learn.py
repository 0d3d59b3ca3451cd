"""The ladder: each solution passes its rung and fails the next, and wrong answers are named."""

import ast
import inspect
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from ddplab import demo
from ddplab.conformance import check_runner
from ddplab.conformance.local_training import FindingError
from ddplab.learn import judge, load_ipython_extension, solutions
from ddplab.learn.checks import ALL
from ddplab.learn.gains import Gain, gain, picture_of
from ddplab.learn.judge import Judge, Judgement
from ddplab.learn.learner_file import LearnerClass, learner_class
from ddplab.learn.rungs import (
    RUNGS,
    SKELETON,
    Progress,
    load_progress,
    next_hint,
    progress_file,
    update_progress,
    write_skeleton,
)
from ddplab.reference import minimal
from ddplab.reference.errors import RankLostError
from ddplab.reference.launch import RankPool
from ddplab.reference.trace import Trace
from ddplab.simulator import predict
from ddplab.simulator.engines.timeline import Span
from figures import five_ways

from ..explore import SCALE

ROOT = Path(__file__).parent.parent.parent
FILES = {"solutions": Path(solutions.__file__), "minimal": Path(minimal.__file__)}
NUMBERS = range(1, len(RUNGS) + 1)
TITLES = [rung.title for rung in RUNGS]
WRONG = yaml.safe_load(Path(__file__).with_name("wrong_answers.yaml").read_text())
QUICK = 2
"""Wrong answers of each rung that `make test` judges; `.ci/run` judges all."""
BASES = {1: minimal.NaiveDataParallel, 2: minimal.FlatDataParallel}
"""Solutions that are not in `solutions.py`."""
HELPERS = {9: "split", 15: "Shadow"}
"""What a solution has beside its class."""
EQUIVALENT = yaml.safe_load(Path(__file__).with_name("equivalent_answers.yaml").read_text())
"""Changes of solutions that pass, by rung, and why."""
MOST = 4
"""Changes of each solution that a test judges; all of them if DDPLAB_EXAMPLES_SCALE is more than 1."""
IMPORTS = """
from contextlib import contextmanager
import torch, torch.distributed as dist
from torch import nn
from ddplab.learn.solutions import *
"""
AVERAGES = """
import torch.distributed as dist

class MyDDP(Skeleton):
    def __init__(self, module):
        super().__init__(module)
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), 0)

    def average_gradients(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= DIVISOR
"""


@pytest.fixture(scope="module")
def judging(server):
    with RankPool(judge.WORLD_SIZE, timeout_s=60.0, only_data=True) as ranks:
        yield Judge(ranks)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The working directory of a learner."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shared(judging, monkeypatch):
    """The command judges on the ranks of this file, and does not end them."""
    monkeypatch.setattr(Judge, "__exit__", lambda *_: None)
    monkeypatch.setattr(judge, "RankPool", lambda *_, **__: judging.ranks)


def edited(file: str, name: str, edits=()) -> LearnerClass:
    """A class of a file of ours, in which each text was replaced by another one."""
    source = re.sub(r"from \.(\.reference\.)?", "from ddplab.reference.", FILES[file].read_text())
    for edit in edits:
        assert source.count(edit["old"]) == 1, edit
        source = source.replace(edit["old"], edit["new"])
    return LearnerClass(f"answer:{name}", "answer.py", source)


def solution(number: int) -> LearnerClass:
    return edited("solutions", solutions.SOLUTIONS[number - 1].__name__)


def answer(divisor: object) -> str:
    """A file that passes rung 1 if the divisor is right."""
    skeleton = SKELETON.replace("class MyDDP", "class Skeleton")
    return skeleton + AVERAGES.replace("DIVISOR", str(divisor))


# Solutions and wrong answers


def wrong_answers():
    """Each one by the name of its mistake; those after the first ones of a rung are slow."""
    of_rung = Counter()
    for one in WRONG:
        of_rung[one["rung"]] += 1
        yield pytest.param(one, id=one["mistake"], marks=[pytest.mark.slow] * (of_rung[one["rung"]] > QUICK))


@pytest.mark.parametrize("number", NUMBERS, ids=TITLES)
def test_a_solution_passes_its_rung_and_fails_the_next(judging, number):
    own = judging.verdict(solution(number), number)
    assert own.passed, str(own)
    if number < len(RUNGS):
        assert not judging.verdict(solution(number), number + 1).passed


@pytest.mark.parametrize("number", NUMBERS, ids=TITLES)
def test_a_passed_rung_shows_lines_of_our_code(number):
    rung = RUNGS[number - 1]
    file, first, last = re.fullmatch(r"(\S+), lines (\d+)-(\d+)", rung.lines).groups()
    shown = "\n".join((ROOT / file).read_text().splitlines()[int(first) - 1 : int(last)])
    assert re.search(rf"(class|def) {rung.code.rsplit('.')[-1].rsplit(':')[-1]}\b", shown)


@pytest.mark.slow
def test_the_last_solution_passes_all_rungs_before(judging):
    for earlier in NUMBERS[:-1]:
        verdict = judging.verdict(solution(NUMBERS[-1]), earlier)
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("wrong", list(wrong_answers()))
def test_a_wrong_answer_is_named(judging, wrong, capfd):
    if "code" in wrong:
        subject = LearnerClass("my_ddp:MyDDP", "my_ddp.py", IMPORTS + wrong["code"])
    else:
        subject = edited(wrong["file"], wrong["class"], wrong.get("edits", ()))
    verdict = judging.verdict(subject, wrong["rung"])
    assert not verdict.passed
    assert wrong["says"] in str(verdict)
    found, said = capfd.readouterr(), str(verdict).replace(TITLES[wrong["rung"] - 1], "")
    assert not [one for one in wrong.get("never", ()) if one in said]
    assert not re.search("Warning|Fatal", found.err)  # Gloo's end of a rank has many lines
    assert len(str(verdict).splitlines()) <= 3  # a verdict is not buried


def own_code(number: int) -> tuple[str, ast.Module, list[Any]]:
    """The class of a rung's solution, its file, and what of the file is new in this rung."""
    name = BASES.get(number, solutions.SOLUTIONS[number - 1]).__name__
    tree = ast.parse(edited("minimal" if number in BASES else "solutions", name).source)
    return name, tree, [one for one in tree.body if getattr(one, "name", "") in (name, HELPERS.get(number))]


def changes(node: ast.AST, where: str) -> Iterator[str]:
    """Drop each statement, and swap each two that follow each other; says what is changed while it is.

    Docstrings, imports and definitions stay.
    """
    for block in (getattr(node, field, []) for field in ("body", "orelse", "finalbody")):
        for index, one in enumerate(block):
            yield from changes(one, f"{where}.{one.name}" if isinstance(one, ast.FunctionDef) else where)
            pair = [None if stays(each) else shown(each) for each in block[index : index + 2]]
            if pair[0]:
                block[index] = ast.Pass()
                yield f"{where}: drop `{pair[0]}`"
                block[index] = one
            if len(pair) == 2 and all(pair):
                block[index : index + 2] = block[index : index + 2][::-1]
                yield f"{where}: swap `{pair[0]}` and `{pair[1]}`"
                block[index : index + 2] = block[index : index + 2][::-1]


def stays(statement: ast.stmt) -> bool:
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)


def shown(statement: ast.stmt) -> str:
    line = ast.unparse(statement).splitlines()[0]
    return line if len(line) <= 72 else f"{line[:68]} ..."


def changed_solutions(number: int) -> dict[str, LearnerClass]:
    """The solution of a rung with each change of its own code, by what is changed."""
    name, tree, own = own_code(number)
    return {
        change: LearnerClass(f"answer:{name}", "answer.py", ast.unparse(tree))
        for one in own
        for change in changes(one, one.name)
    }


@pytest.mark.slow
@pytest.mark.timeout(900)  # 250 s for all changes of a rung, beside other jobs
@pytest.mark.parametrize("number", NUMBERS, ids=TITLES)
def test_a_changed_solution_is_refused_or_listed(judging, number):
    """On its rung, or on one before, which a learner's class must pass too."""
    all_changes, listed = changed_solutions(number), EQUIVALENT.get(number, {})
    judged = list(all_changes)[:: 1 if SCALE > 1 else -(-len(all_changes) // MOST)]
    passed = []
    for change in judged:
        earlier = () if change in listed else range(1, number)
        if all(judging.verdict(all_changes[change], one).passed for one in (number, *earlier)):
            passed.append(change)
    assert passed == [change for change in judged if change in listed]


def test_of_the_changes_that_matter_95_percent_are_refused():
    """Those listed exist, and do not matter unless they are holes."""
    matter = holes = 0
    for number in NUMBERS:
        listed = EQUIVALENT.get(number, {})
        changed = [change for one in own_code(number)[-1] for change in changes(one, one.name)]
        assert len(set(changed)) == len(changed)
        assert listed.keys() <= set(changed)
        found = [why for why in listed.values() if why.startswith("hole: ")]
        holes, matter = holes + len(found), matter + len(changed) - len(listed) + len(found)
    assert holes <= 0.05 * matter


def test_ranks_that_do_not_match_are_named_whatever_the_message_says(judging, monkeypatch):
    def check(_bench):
        raise FindingError("in other words") from RankLostError(0, "in other words")

    monkeypatch.setitem(ALL, RUNGS[0].checks[0], check)
    assert judging.verdict(solution(1), 1).likely.startswith("the ranks launch different collectives")


# The learner's file


def test_an_error_in_the_file_or_its_name_is_named_with_its_line(judging):
    for name, source, says in (
        ("my_ddp", "import torch\nclass MyDDP(:\n", "my_ddp.py, line 2: SyntaxError"),
        ("my_ddp", "import torch\n\n1 / 0\n", "my_ddp.py, line 3: ZeroDivisionError"),
        ("my_ddp", "import torch\n", "expected a class or a function named MyDDP in my_ddp, got nothing"),
        ("my_ddp", "class MyDDP:\n    def __init__(self, module):\n        module.nothing()\n", "my_ddp.py, line 3"),
        ("json", answer(3), "rename the file"),
    ):
        verdict = judging.verdict(LearnerClass(f"{name}:MyDDP", f"{name}.py", source), 1)
        assert says in verdict.message
        assert verdict.message.count(", line ") == says.count(", line ")


@pytest.mark.slow
def test_no_line_of_the_file_runs_where_it_is_judged(judging, monkeypatch):
    monkeypatch.setattr(check_runner, "TIMEOUT_S", 5.0)
    before = Judge.verdict
    for code, says in (
        ("import ddplab.learn.judge as j\nj.Judge.verdict = lambda _, __, rung: j.Judgement(rung)\n", "TypeError"),
        ("import sys\nsys.exit(0)\n", "my_ddp.py, line 5: SystemExit: 0"),
        ("import os\nos._exit(0)\n", "exited without reporting an error"),
        ("while True:\n    pass\n", "got no answer in "),
    ):
        source = f"class MyDDP:\n    pass\n\n{code}"
        verdict = judging.verdict(LearnerClass("my_ddp:MyDDP", "my_ddp.py", source), 1)
        assert says in verdict.message
        assert "collectives" not in verdict.likely  # nothing was launched
        assert "my_ddp" not in sys.modules
    assert Judge.verdict is before


def test_ranks_that_stay_alive_run_the_newest_source(judging):
    for divisor, passes in ((3, True), (2, False), (3, True)):
        verdict = judging.verdict(LearnerClass("my_ddp:MyDDP", "my_ddp.py", answer(divisor)), 1)
        assert verdict.passed == passes


@pytest.mark.parametrize("name", ["my-ddp.py", "my_ddp.txt"])
def test_a_name_that_is_no_module_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for refuses in (learner_class, write_skeleton):
        with pytest.raises(ValueError, match=r"expected a Python file whose name is a name in Python"):
            refuses(Path(name))
    assert not Path(name).exists()


# Climbing


def take_as_gain(monkeypatch, found):
    """Let the judge take what a function returns for the gain of a rung, which takes seconds."""

    def run_or_found(ranks, function, *arguments):
        return found() if function is gain else check_runner.run_alone(ranks, function, *arguments)

    monkeypatch.setattr(judge, "run_alone", run_or_found)


def test_climbing_keeps_progress_and_times_and_stops_at_the_next_rung(judging, home, monkeypatch):
    path, said = home / "my_ddp.py", []

    def gain_while_a_hint_is_shown():
        next_hint(path)
        return Gain("300.0 ms", plain_ms=300.0)

    take_as_gain(monkeypatch, gain_while_a_hint_is_shown)
    path.write_text(answer("dist.get_world_size()"))
    verdict = judge.climb(judging, learner_class(path), said.append)
    assert (verdict.rung, verdict.passed, verdict.check) == (2, False, "one all-reduce for each dtype")
    assert load_progress(path) == Progress(passed=1, introduced=2, hints={1: 1}, iteration_ms={1: 300.0})
    assert judge.strip(path) == "■□□□□□□□□□□□□□□□□ 1 of 17 rungs"
    assert "Rung 1 of 17: average gradients" in said[0]
    assert "300.0 ms" in said[2]
    for introduces in (False, True):  # the task comes again only if it is asked for
        said.clear()
        judge.climb(judging, learner_class(path), said.append, introduces=introduces)
        assert any("Rung 2 of 17" in one for one in said) == introduces


def test_the_judge_is_not_silent_for_long(judging, home, monkeypatch):
    said = []
    (home / "my_ddp.py").write_text(SKELETON)
    monkeypatch.setattr(judge, "SILENT_S", 0.0)
    judge.judge_rung(judging, learner_class(home / "my_ddp.py"), 1, said.append)
    assert said[0].startswith("still judging rung 1;")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_an_introduction_fits_into_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for number in NUMBERS:
        assert max(map(len, judge.introduction(number).splitlines())) <= min(columns, 100)


def test_a_new_idea_that_breaks_an_old_rung_is_no_progress(judging, home):
    path, said = home / "my_ddp.py", []
    edits = [{"old": "keys=dtypes, order=order", "new": "order=order"}]
    path.write_text(edited("solutions", "Bucketed", edits).source)
    update_progress(path, passed=5)
    verdict = judge.climb(judging, learner_class(path, "Bucketed"), said.append)
    assert (verdict.rung, verdict.passed) == (2, False)
    assert "An earlier rung is broken" in said[-1]
    assert load_progress(path).passed == 5


def test_hints_come_one_after_the_other_and_the_last_one_stays(home):
    path = home / "my_ddp.py"
    shown = [next_hint(path) for _ in range(4)]
    assert [one.partition(": ")[2] for one in shown] == [*RUNGS[0].hints, RUNGS[0].hints[-1]]


def test_a_hint_without_a_file_leaves_nothing_behind(here, home):
    done = here("learn", "--hint")
    said = "ddplab: --hint: expected your file, my_ddp.py, got none; `ddplab learn my_ddp.py` writes it\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert not list(home.iterdir())


def test_every_save_is_seen_also_while_the_file_is_away(home):
    path = home / "my_ddp.py"
    path.write_text("1")
    versions = judge.saves(path, poll_s=0.001)
    assert next(versions) == 0
    path.write_text("22")
    assert next(versions) == 1
    other = home / "other"
    other.write_text("333")
    os.replace(other, path)
    assert next(versions) == 2


def test_the_gain_is_measured_in_virtual_time():
    won = gain(solution(2), 2, 283.8)
    assert won.plain_ms is not None
    assert won.plain_ms < 283.8
    assert won.sentence.startswith("an emulated iteration of ResNet-50 on 8 V100s over 10 Gbit/s: 283.8 -> ")
    computes, network = won.picture.splitlines()
    assert len(network.rstrip()) > len(computes)  # the only all-reduce begins after the backward pass


@pytest.mark.slow
@pytest.mark.timeout(400)  # 45 s alone; three times as long beside the other jobs of CI
def test_no_rung_makes_an_iteration_longer_and_every_page_shows_the_same_times():
    before = None
    rows = re.findall(r"^\| (\d+) .*\| (.*) \|$", (ROOT / "docs" / "learn.md").read_text(), flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(NUMBERS)
    took_ns = {}
    for number, shown in rows:
        won = gain(solution(int(number)), int(number), before)
        assert before is None or won.plain_ms <= before, won.sentence
        before, took_ns[int(number)] = won.plain_ms, round(won.plain_ms * 1e6)
        assert set(re.findall(r"\d+\.\d", shown)) <= {*re.findall(r"\d+\.\d", won.sentence), f"{before:.1f}"}, number
    naive, flat, _, _, rebuilt = five_ways.panels()[0]  # which the page opens with
    assert (naive.iteration_ns, flat.iteration_ns, rebuilt.iteration_ns) == (took_ns[1], took_ns[2], took_ns[8])
    trace, ranks = Trace.load(demo.TRACE), demo.RANKS
    for policy, number in ((demo.POLICIES[2], 6), (demo.SHOWN_IN_PERFETTO, 7), (demo.POLICIES[-1], 2)):
        predicted = predict(trace, demo.FABRIC, world_size=ranks, policy=policy, assume=False)
        assert predicted.iteration_ns == took_ns[number]
    cheat_sheet, readme = (ROOT / "docs" / "cheat_sheet.md").read_text(), (ROOT / "README.md").read_text()
    assert all(f"{took_ns[number] / 1e6:.1f}" in cheat_sheet for number in (2, 6, 7))
    assert (
        f"{demo.EXAMPLE}, averaged in five ways: {naive.iteration_ms:.0f} ms to {rebuilt.iteration_ms:.0f} ms"
        in readme
    )


def test_a_picture_shows_when_rank_0_computes_and_when_the_network_is_busy():
    spans = [
        Span(0, "compute", "backward", None, 0, 30),
        Span(0, "compute", "wait", 0, 30, 40),
        Span(0, "compute", "step", None, 40, 50),
        Span(0, "comm", "all_reduce", 1, 20, 40),
        Span(0, "comm", "queued", 1, 12, 20),
        Span(0, "comm", "all_reduce", 0, 10, 20),
        Span(0, "comm", "bitmap", None, 50, 60),
        Span(1, "compute", "backward", None, 0, 60),
    ]
    picture = picture_of(SimpleNamespace(spans=lambda: spans, iteration_ns=60))
    computes, network = "█" * 30 + " " * 10 + "█" * 10, " " * 10 + "█" * 10 + "▒" * 20 + " " * 10 + "█" * 10
    assert picture == f"  computes  {computes}\n  network   {network}"


# The command, grades and the notebook


def test_the_command_names_the_next_rung_and_the_mistake(here, home, shared):
    path = home / "my_ddp.py"
    done = here("learn", path, "--json", home / "out.json")
    assert (done.returncode, done.stderr, path.read_text()) == (1, "", SKELETON)
    assert "run this again" in done.stdout
    assert "the ranks do not start equal" in done.stdout
    assert "minimal.py" not in done.stdout  # it has the solution
    path.write_text(SKELETON + "# mine\n")
    again = here("learn", path)
    assert (again.returncode, "run this again" in again.stdout) == (1, False)
    assert path.read_text() == SKELETON + "# mine\n"
    assert json.loads((home / "out.json").read_text())["check"] == "construction"
    assert "hint 1 of 3" in here("learn", path, "--hint").stdout
    assert "Never write" in here("learn", "--tutor").stdout


def test_a_grade_has_a_point_for_each_rung_and_junit(here, home, shared, monkeypatch):
    wrong = {2: ("one all-reduce", "12 of them", "likely")}
    monkeypatch.setattr(Judge, "verdict", lambda _self, _subject, rung: Judgement(rung, *wrong.get(rung, ())))
    (home / "my_ddp.py").write_text(answer(3))
    done = here("learn", "--grade", "--junit", "grade.xml", "--json", "grade.json")
    assert done.returncode == 0
    document = json.loads((home / "grade.json").read_text())
    assert (document["points"], document["possible"], len(document["rungs"])) == (16, 17, 17)
    (suite,) = ElementTree.parse(home / "grade.xml").getroot()
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("17", "1")
    (failure,) = suite.iter("failure")
    assert failure.attrib["message"] == "one all-reduce: 12 of them"
    assert not progress_file(home / "my_ddp.py").exists()


@pytest.fixture
def magics(home, shared, monkeypatch):
    """The magics of a notebook, by name."""
    take_as_gain(monkeypatch, lambda: Gain("300.0 ms", plain_ms=300.0))
    found = {}
    ipython = SimpleNamespace(
        run_cell=lambda _cell: SimpleNamespace(success=True),
        register_magic_function=lambda function, magic_kind: found.update({function.__name__: function}),
    )
    load_ipython_extension(ipython)
    return found


def test_a_cell_of_a_notebook_is_judged_and_nothing_but_the_progress_is_written(home, magics, capsys):
    magics["rung"]("", answer(3))
    assert "■□□□□□□□□□□□□□□□□ 1 of 17 rungs" in capsys.readouterr().out
    magics["rung_hint"]("")
    assert "rung 2, flat, hint 1 of 3" in capsys.readouterr().out
    assert [one.name for one in home.iterdir()] == ["my_ddp.progress.json"]
    for line in ("18", "one"):
        magics["rung"](line, answer(3))
        assert f"%%rung {line}: expected the number of a rung, from 1 to 17" in capsys.readouterr().out


def test_a_cell_goes_on_from_those_of_lower_rungs_and_an_error_names_its_line(magics, capsys):
    magics["rung"]("2", "class MyDDP(MyDDP):\n    ...  # your code\n")
    assert capsys.readouterr().out == "not attempted\n"
    magics["rung"]("1", answer(3))
    magics["rung"]("2", "\n\nclass MyDDP(MyDDP):\n    def forward(self, *inputs):\n        return 1 / 0\n")
    assert "1 of 17 rungs" in (told := capsys.readouterr().out)
    assert "ZeroDivisionError" in told
    assert "(line 6 of the cell)" in told
    magics["rung"]("2", "class MyDDP(MyDDP):\n    def average_gradients(self):\n        raise KeyError\n")
    magics["rung"]("3", "MyDDP = MyDDP\n")
    assert "(a line of an earlier cell)" in capsys.readouterr().out


@pytest.mark.timeout(300)  # 40 s alone, and 100 beside the other jobs of CI
@pytest.mark.slow
def test_our_solutions_pass_in_the_cells_of_tutorial_2_each_going_on_from_the_one_before(home, magics, capsys):
    for number in range(1, 9):
        text = inspect.getsource(BASES.get(number) or solutions.SOLUTIONS[number - 1])
        base = "nn.Module" if number == 1 else "MyDDP"
        needs = "from ddplab.learn.solutions import *\nfrom ddplab.reference.minimal import *\n" * (number == 1)
        own = re.sub(r"class \w+\(\w+(\.\w+)?\)", f"class MyDDP({base})", text, count=1)
        magics["rung"](str(number), needs + own)
        assert f"{number} of 17 rungs" in (told := capsys.readouterr().out), told
