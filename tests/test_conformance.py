"""Conformance: correct classes pass, and each faulty class fails the check that is meant for its fault."""

import json
import re
import runpy
import subprocess
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import Phase, given
from hypothesis import strategies as st

from ddplab.cli.main import app
from ddplab.conformance import check_runner as bench_module
from ddplab.conformance import overlap
from ddplab.conformance.all_checks import CHECKS, PLAIN, program_of
from ddplab.conformance.check_outcomes import EXPECTATIONS, CheckResult, read_expectations, why_left_out, write_script
from ddplab.conformance.check_runner import QUICK, Bench, Effort, run_check
from ddplab.conformance.class_under_test import Subject
from ddplab.conformance.local_training import FindingError, compare, describe_difference, run_locally, same
from ddplab.conformance.random_programs import programs
from ddplab.conformance.random_timing import run_in_virtual_time
from reference.files.writing import printable

from .explore import examples
from .faulty_reducers import wrong_on_rank_0

OURS = "reference.data_parallel:DistributedDataParallel"
TORCHS = "torch.nn.parallel:DistributedDataParallel"
NAIVE = "reference.minimal:NaiveDataParallel"
CORRECT = ("Bucketed", "Small")
ADAPTERS = ("get_ddp_bucketed", "make_ddp")
"""Functions that wrap a module with a correct class."""
LITTLE = Effort(4, derandomized=True)
SLOW = {"a failing rank", "a lost rank", "state machine", "overlap"}
"""Checks that start processes or take seconds; `ddplab conform` runs them in CI."""


def faulty(name: str) -> str:
    return f"tests.faulty_reducers:{name}"


@pytest.fixture
def bench_of(request):
    """Makes a bench on four ranks, or on the pool that a test names, which makes no program smaller."""
    ranks = request.getfixturevalue(getattr(request, "param", "four_ranks"))

    def make(name: str, *, against: str | None = None) -> Bench:
        bench = Bench(Subject(name), ranks, LITTLE, against=None if against is None else Subject(against))
        bench.shrinks = False
        bench.start()
        return bench

    return make


def outcomes(bench: Bench, checks=None) -> dict[str, CheckResult]:
    names = [name for name in CHECKS if name not in SLOW] if checks is None else checks
    return {name: run_check(name, CHECKS[name], bench) for name in names}


@pytest.mark.parametrize(
    ("name", "bench_of"),
    [(OURS, "four_ranks"), (TORCHS, "two_ranks")],
    indirect=["bench_of"],
    ids=["ours", "torch's"],
)
def test_ours_and_torchs_pass_everything_that_they_support(bench_of, name):
    found = outcomes(bench_of(name, against=TORCHS))
    assert {one.check: one.message for one in found.values() if one.outcome == "failed"} == {}
    unsupported = {one.check for one in found.values() if one.outcome == "not supported"}
    assert unsupported == (set() if name == OURS else {"plans", "mixed precision", "first pass of a static graph"})


@pytest.mark.parametrize("bench_of", ["two_ranks"], indirect=True)
@pytest.mark.parametrize("name", [NAIVE, *map(faulty, CORRECT)])
def test_classes_of_others_pass_and_what_they_lack_is_no_failure(bench_of, name):
    found = outcomes(bench_of(name))
    assert {one.check: one.message for one in found.values() if one.outcome == "failed"} == {}
    lacking = {one.check for one in found.values() if one.outcome == "not supported"}
    assert "comm hooks" in lacking
    assert ("accumulation" in lacking) == (name != faulty("Small"))


@pytest.mark.parametrize("name", [*map(faulty, ADAPTERS)])
def test_functions_that_wrap_a_module_pass_as_classes_do(bench_of, name):
    found = outcomes(bench_of(name), ["bucket caps", "real models", "accumulation", "random programs", "any timing"])
    assert {one.check: one.message for one in found.values() if one.outcome == "failed"} == {}
    assert [one.check for one in found.values() if one.outcome == "not supported"] == ["accumulation"]


@pytest.mark.parametrize(
    ("name", "check", "says"),
    [
        ("Sums", "one weight", "iteration 0, rank 0: gradient of 'w0': 4 of the expected"),
        ("DividesByTwo", "one weight", "2 of the expected"),
        ("KeepsItsLastBucket", "bucket caps", "gradient of 'w0'"),
        ("OnlyRankZeroIsRight", "one weight", "rank 1: gradient of 'w0': 0.5 of the expected"),
        ("StartsUnequal", "construction", "on rank 1 is not that of rank 0"),
        ("CopiesOutInMemoryOrder", "special parameters", "elements differ"),
        ("CopiesOutInMemoryOrder", "kept gradients", "elements differ"),
        ("SendsBuffersFromRankZero", "process group", "with rank 1's"),
        ("NeverSendsBuffers", "construction", "buffer 'samples' on rank 1 is not that of rank 0"),
        ("NeverSendsBuffers", "buffers", "iteration 1, rank 1: buffer of"),
        ("EndsAtAnyBackwardPass", "several backward passes", "autograd.grad of the inputs first: iteration 0"),
        ("CopySharesReducer", "several modules", "failed: AssertionError"),
        ("CopyStaysLocal", "several modules", "a deep copy is trained on its own rank only, although"),
        ("AveragesInTrainingModeOnly", "accumulation", "gradient of"),
        ("DividesAfterTheSum", "special values", "half-precision gradient 0, 40000 on this rank"),
        ("SkipsSubclasses", "special parameters", "parameters of a subclass of Tensor, iteration 0"),
        ("KeepsBucketsOfAFailedPass", "a backward pass that raises", "an error after the last gradient on ranks"),
        ("RetriesLocally", "a backward pass that raises", "an error before the first gradient"),
    ],
)
def test_a_faulty_class_fails_where_its_fault_is(bench_of, name, check, says):
    result = outcomes(bench_of(faulty(name)), [check])[check]
    assert result.outcome == "failed"
    assert says in result.message


@pytest.mark.parametrize(
    ("name", "says"), [("DoesNotWait", "gradient of"), ("LaunchesAsReady", "expected its collective")]
)
def test_faults_of_timing_are_found_without_a_clock(bench_of, name, says):
    result = outcomes(bench_of(faulty(name)), ["any timing"])["any timing"]
    assert result.outcome == "failed"
    assert says in result.message
    assert result.program is not None


@pytest.mark.parametrize("name", [NAIVE, faulty("LaunchesAtTheEnd"), faulty("Flat")])
def test_a_class_that_launches_nothing_before_backward_ends_does_not_overlap(name):
    schedule = overlap.schedule_of(Subject(name), overlap.MODELS[0], overlap.NETWORKS[1])
    assert "after the last gradient was ready" in overlap.late_launches(schedule)


def test_a_class_that_overlaps_does(tmp_path):
    schedules = [
        overlap.schedule_of(Subject(name), overlap.MODELS[0], overlap.NETWORKS[1]) for name in (OURS, TORCHS)
    ]
    assert list(map(overlap.late_launches, schedules)) == ["", ""]
    assert schedules[0] == schedules[1]  # copies and launches cost nothing here
    overlap.save(tmp_path / "s.json", OURS, schedules)
    assert overlap.load(tmp_path / "s.json") == tuple(schedules)


# Buffers


@pytest.mark.parametrize(
    ("name", "habit"),
    [
        (OURS, "in each forward pass that follows a synchronised one"),
        (TORCHS, "in each forward pass that follows a synchronised one"),
        (faulty("Small"), "in synchronised forward passes"),
    ],
)
def test_buffers_may_be_sent_in_different_passes_and_the_report_says_in_which(bench_of, name, habit):
    result = outcomes(bench_of(name), ["buffers"])["buffers"]
    assert (result.outcome, result.message) == ("passed", f"broadcast {habit}")


# First cause first


def test_where_ranks_do_not_match_only_checks_run_that_can_still_say_something(bench_of):
    checks = ["any timing", "one weight", "bucket caps", "real models", "random programs"]
    found = list(outcomes(bench_of(faulty("LaunchesAsReady")), checks).values())
    assert [one.outcome for one in found] == ["failed", "passed", "left out", "left out", "left out"]
    assert found[2].message == "the ranks did not match in any timing, which needs no option"
    assert [bool(one.problem) for one in found] == [True, False, False, False, False]


def test_after_two_checks_in_which_ranks_hang_all_others_are_left_out():
    hung = [
        CheckResult(name, "failed", "ranks [0] were still running at the time-out of 10 s") for name in ("a", "b")
    ]
    wrong = CheckResult("a", "failed", "0.5 of the expected")
    assert why_left_out("random programs", hung) == "the ranks did not match in a and b"
    assert why_left_out("random programs", hung[:1]) == ""
    assert why_left_out("random programs", [wrong] * 5) == ""


def test_what_a_rank_returned_is_the_finding_when_others_hang(bench_of, monkeypatch):
    monkeypatch.setattr(bench_module, "TIMEOUT_S", 1.0)
    bench = bench_of(NAIVE)
    with pytest.raises(FindingError, match="wrong on rank 0"):
        bench.run(wrong_on_rank_0, bench.subject)


def test_only_the_first_fault_is_made_smaller(bench_of):
    bench = bench_of(faulty("Sums"))
    bench.shrinks = True
    assert Phase.shrink in bench.settings().phases
    outcomes(bench, ["random programs"])
    assert Phase.shrink not in bench.settings().phases


# Schedules


@pytest.fixture(scope="module")
def schedule() -> overlap.EmulatedSchedule:
    return overlap.schedule_of(Subject(OURS), overlap.MODELS[2], overlap.NETWORKS[1])


def test_a_slower_schedule_is_named_by_its_first_late_bucket(schedule):
    def later(number: int, ns: int) -> overlap.EmulatedSchedule:
        launches = list(schedule.launches)
        moved = {"launched_ns": launches[number].launched_ns + ns}
        launches[number] = launches[number].model_copy(update=moved)
        slower = schedule.iteration_ns + schedule.iteration_ns // 50
        return schedule.model_copy(update={"launches": tuple(launches), "iteration_ns": slower})

    def says(now: overlap.EmulatedSchedule) -> str:
        (sentence,) = overlap.compare([now], [schedule])
        return sentence

    assert overlap.compare([schedule], [schedule]) == []
    assert overlap.compare([schedule], []) == []
    gap = schedule.launches[2].launched_ns - schedule.launches[1].launched_ns
    assert says(later(1, gap)).startswith("bucket 1 waits for bucket 2: +2.0% on 64 ranks at 100 Gbit/s")
    assert says(later(1, 10**6)).startswith("bucket 1 is launched 1 ms later")
    assert says(later(1, 10**9)).startswith("bucket 1 waits for the end of the backward pass")
    assert "2 collectives beside" in says(later(1, 5).model_copy(update={"other_collectives": 2}))
    assert "1 buckets instead of" in says(later(1, 5).model_copy(update={"launches": schedule.launches[:1]}))
    by_a_nanosecond = schedule.model_copy(update={"iteration_ns": schedule.iteration_ns + 1})
    assert says(by_a_nanosecond).startswith("the same launches, but the iteration ends later: +1 ns")


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Makes a repository with a package `packaged`; the working directory is the repository."""

    def make(layout: str, ddp: str) -> Path:
        package = tmp_path / layout / "packaged"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "ddp.py").write_text(ddp)
        git(tmp_path, "init", "--initial-branch=main")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--message=first")
        monkeypatch.syspath_prepend(tmp_path / layout)
        monkeypatch.chdir(tmp_path)
        return package / "ddp.py"

    return make


def subclass_of(name: str) -> str:
    path, _, attribute = name.partition(":")
    return f"from {path} import {attribute}\n\n\nclass DDP({attribute}):\n    pass\n"


def test_a_baseline_is_the_schedule_of_the_class_at_the_revision(project):
    """The working tree overlaps, the revision does not."""
    project("src", subclass_of(NAIVE)).write_text(subclass_of(OURS))
    before = overlap.load_baseline("main", "packaged.ddp:DDP")
    assert len(before) == len(overlap.MODELS) * len(overlap.NETWORKS)
    assert all(map(overlap.late_launches, before))


@pytest.mark.parametrize("layout", [".", "src", "lib/python"])
@pytest.mark.parametrize("inside", [".", "below"])
def test_the_revision_is_imported_wherever_its_package_is(project, layout, inside, monkeypatch):
    project(f"{inside}/{layout}", 'raise ImportError("that of the revision")\n').write_text(subclass_of(OURS))
    monkeypatch.chdir(inside)
    with pytest.raises(ValueError, match=r"has no schedule at main: ImportError: that of the revision$"):
        overlap.load_baseline("main", "packaged.ddp:DDP")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("packaged.ddp:NaiveDataParallel", "expected to .* revision, got reference.minimal from /.*/minimal.py$"),
        ("elsewhere:DDP", "expected to import it from the revision, got elsewhere from /.*/new/elsewhere.py$"),
        ("packaged.later:DDP", "ModuleNotFoundError: No module named 'packaged.later'$"),
    ],
)
def test_a_class_that_is_not_from_the_revision_is_refused(project, name, message, monkeypatch):
    """It would be compared with itself."""
    path = project("src", subclass_of(NAIVE))
    path.with_name("later.py").write_text(subclass_of(NAIVE))
    Path("new").mkdir()
    monkeypatch.syspath_prepend("new")
    Path("new/elsewhere.py").write_text(subclass_of(NAIVE))
    with pytest.raises(ValueError, match=f"^--baseline: {name} has no schedule at HEAD: {message}"):
        overlap.load_baseline("HEAD", name)


@pytest.mark.parametrize("text", ["--output=victim.txt", "--git-dir", "nothing", "HEAD:src", "src", "", "-"])
def test_a_text_that_is_neither_a_file_nor_a_revision_is_refused(project, text):
    """Git does not take it for an option either."""
    project("src", subclass_of(NAIVE))
    victim = Path("victim.txt")
    victim.write_text("mine")
    with pytest.raises(ValueError, match="--baseline: expected a file or a git revision, got ") as error:
        overlap.load_baseline(text, NAIVE)
    assert "\n" not in str(error.value)
    assert victim.read_text() == "mine"


# Local training


@examples(30)
@given(programs(3))
def test_local_training_of_a_program_is_what_one_process_computes(program):
    """Without `no_sync` and with cleared gradients, the average is the gradient of the ranks' mean loss."""
    from ddplab.conformance.local_training import WeakProgramError
    from ddplab.conformance.training_programs import Net, loss_of, optimizer_of

    steps = tuple(replace(step, zero="none") for step in program.steps)
    program = replace(program, steps=steps)
    try:
        expected = run_locally(program, 3)
    except WeakProgramError:
        return
    net = Net(program)
    optimizer = optimizer_of(program, net)
    for number, step in enumerate(program.steps):
        if step.kind == "change_lr":
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        if step.kind == "train":
            net.zero_grad()
            sum(loss_of(net, program, number, rank, 3) for rank in range(3)).div(3).backward()
            for name, parameter in net.named_parameters():
                for rank in range(3):
                    assert same(expected[number][rank].gradients[name], parameter.grad)
            if step.optimize:
                optimizer.step()


@examples(10)
@given(programs(2), st.integers(0, 99))
def test_a_seed_determines_all_timing(program, seed):
    first, second = (run_in_virtual_time(Subject(faulty("DoesNotWait")), program, 2, seed) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        for a, b in zip(one, two, strict=True):
            assert all(same(a.gradients[name], b.gradients[name]) for name in a.gradients)


def test_a_difference_names_parameter_bucket_and_ratio():
    program = program_of(PLAIN, ["train"], 2)
    (expected,) = run_locally(program, 2)
    wrong = dict(expected[0].gradients)
    name = next(iter(wrong))
    wrong[name] = wrong[name] * 0.5
    got = expected[0]._replace(gradients=wrong, buckets=((1,), (0, 2)))
    with pytest.raises(
        FindingError, match=r"iteration 7, rank 1: gradient of 'w0' \(bucket 1 of 2\): 0.5 of the expec"
    ):
        compare(got, expected[0], iteration=7, rank=1)
    assert describe_difference(None, torch.ones(1)) == "got None, expected a tensor"
    assert describe_difference(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 2.0])) == (
        "2.5 of the expected at 1 of 2 elements"
    )
    assert describe_difference(torch.tensor([1.0, 5.0]), torch.tensor([2.0, 2.0])) == (
        "2 of 2 elements differ; got 1 at [0], expected 2"
    )


@examples(20)
@given(programs(3))
def test_the_text_of_a_program_is_the_program(program):
    from ddplab.conformance import training_programs as module

    assert eval(repr(program), vars(module)) == program


# Outcomes


@pytest.mark.parametrize(
    ("outcome", "expected", "problem"),
    [
        ("passed", None, ""),
        ("passed", "must-pass", ""),
        ("passed", "expected-fail", "a: passed, but was expected to fail; remove it from the file"),
        ("failed", None, "a: why"),
        ("failed", "must-pass", "a: why"),
        ("failed", "expected-fail", ""),
        ("not supported", None, ""),
        ("not supported", "must-pass", "a: must pass, but is not supported: why"),
        ("left out", None, ""),
        ("left out", "must-pass", "a: must pass, but was left out: why"),
    ],
)
def test_a_problem_is_an_outcome_that_is_not_as_expected(outcome, expected, problem):
    assert CheckResult("a", outcome, "why", expected=expected).problem == problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a", "expected the lists must-pass, expected-fail, skip, got list"),
        ("a: 3", "expected the lists"),
        ("must: [a]", "got one named 'must'"),
        ("skip: [z]", "skip: expected one of a, b; got 'z'"),
        ("skip: [a]\nmust-pass: [a]", "a is in two lists"),
        ("skip: [", "expected YAML"),
        ("\x00", "expected YAML"),
    ],
)
def test_expectations_that_make_no_sense_are_told_in_one_line(tmp_path, text, message):
    path = tmp_path / "expect.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_expectations(path, ["a", "b"])
    assert "\n" not in str(error.value)


def test_expectations_are_read(tmp_path):
    path = tmp_path / "expect.yaml"
    path.write_text("must-pass: [a]\nexpected-fail: [b]\nskip: []\n")
    assert read_expectations(path, ["a", "b"]) == {"a": "must-pass", "b": "expected-fail"}
    assert set(EXPECTATIONS) == {"must-pass", "expected-fail", "skip"}


def test_the_script_of_a_fault_has_its_program(tmp_path):
    program = program_of(PLAIN, ["train", "accumulate"], 3, options={"bucket_cap_mb": 1e-6})
    write_script(tmp_path / "fault.py", "m:C", 3, CheckResult("b", "failed", "wrong", program))
    assert runpy.run_path(str(tmp_path / "fault.py"))["PROGRAM"] == program


TEXTS = st.text(st.characters() | st.sampled_from("\x00\x1b\r\n\ud800\udcff\ufffe\"'\\\\{}<&]"), max_size=30)
"""What an exception may say: any characters, also surrogates."""


@examples(200)
@given(TEXTS)
def test_whatever_an_exception_says_its_script_is_a_program_that_has_the_message(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("script") / "fault.py"
    write_script(path, "m:C", 3, CheckResult("b", "failed", text, program_of(PLAIN, ["train"], 3)))
    assert runpy.run_path(str(path))["__doc__"] == f'm:C fails the check "b".\n\n{text}\n'


@given(TEXTS)
def test_a_printable_text_can_be_written_and_differs_only_where_it_must(text):
    assert re.fullmatch(r"[\t\n -~\xa0-\U0010ffff]*", printable(text).encode().decode())
    assert printable(printable(text)) == printable(text)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at_all:DDP", "expected the name of an importable module"),
        ("torch.nn:nothing_of_this_name", "expected a class or a function named nothing_of_this_name"),
        ("torch.nn:a b", "expected MODULE:CLASS"),
        (":C", "expected MODULE:CLASS"),
    ],
)
def test_a_class_that_does_not_exist_is_told_in_one_line(name, message):
    with pytest.raises(ValueError, match=message) as error:
        Subject(name).check()
    assert "\n" not in str(error.value)


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `ddplab conform` in this process; returns the exception that ended it, and the JSON and JUnit files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError\n")

    def run(*words: str) -> tuple[Exception | None, dict, ElementTree.Element]:
        error = None
        try:
            app(["conform", *words, "--json", "r.json", "--junit", "r.xml"], standalone_mode=False)
        except ValueError as found:
            error = found
        return error, json.loads(Path("r.json").read_text()), ElementTree.parse("r.xml").getroot()[0]

    return run


def test_the_command_runs_the_named_checks_whatever_settings_the_project_has_for_its_own_tests(command, capsys):
    Path("expect.yaml").write_text("expected-fail: [overlap]\nskip: [construction]\n")
    error, report, suite = command(
        NAIVE, "--only", "overlap,nested no_sync,one weight,construction", "--expect", "expect.yaml"
    )
    assert error is None
    assert report["conforms"]
    assert {one["check"]: (one["outcome"], one["expected"]) for one in report["checks"]} == {
        "overlap": ("failed", "expected-fail"),
        "one weight": ("passed", None),
        "nested no_sync": ("not supported", None),
    }
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[:3]] == ["failed", "passed", "not"]
    assert (suite.get("name"), suite.get("failures"), suite.get("skipped")) == (f"conformance of {NAIVE}", "0", "3")


def test_the_command_ends_with_an_error_after_a_fault_and_writes_its_program(command):
    name = faulty("Sums")
    error, report, suite = command(name, "--only", "one weight,optimizers", "-x", "--script", "fault.py")
    assert str(error) == f"{name} does not conform: 1 problem"
    (problem,) = report["problems"]
    assert problem == "one weight: iteration 0, rank 0: gradient of 'w0': 3 of the expected"
    assert repr(runpy.run_path("fault.py")["PROGRAM"]) == report["checks"][0]["program"]
    assert len(suite.findall("testcase/failure")) == 1


def test_a_run_in_which_no_check_applies_is_a_problem(command):
    error, report, _ = command(NAIVE, "--only", "plans")
    assert str(error) == f"{NAIVE} does not conform: 1 problem"
    assert report["problems"] == ["no check ran; a run without a check is no proof"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere:C",), "nowhere:C: expected the name of an importable module"),
        ((NAIVE, "--only", "weights"), "--only: expected names of checks, got weights; there are any timing,"),
        ((NAIVE, "--only", "plans", "--baseline", "x"), "--only: expected the check overlap too"),
        ((NAIVE, "--baseline", "x"), "--baseline: expected a file or a git revision, got 'x'"),
    ],
)
def test_bad_input_of_the_command_is_told_in_one_line(command, capfd, words, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        app(["conform", *words], standalone_mode=False)
    assert "\n" not in str(error.value)
    assert "ERROR" not in capfd.readouterr().err


def test_quick_mode_tries_the_same_programs_every_time():
    assert QUICK.derandomized


def test_the_guide_names_every_check():
    guide = (Path(__file__).parent.parent / "docs" / "conformance.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", guide.partition("## The checks")[2], re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", " ".join(rows))) == set(CHECKS)
