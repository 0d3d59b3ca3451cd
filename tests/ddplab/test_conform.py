"""The command `conform`."""

import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import yaml

from ddplab.cli.main import app
from ddplab.conformance import check_runner
from ddplab.conformance.all_checks import CHECKS, until
from ddplab.conformance.local_training import FindingError

from .conformance_bench import NAIVE, TORCHS, faulty

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Runs `ddplab conform` in this process; returns the exception that ended it, and the JSON and JUnit files."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[Exception | None, dict, ElementTree.Element]:
        error = None
        try:
            app(["conform", *words, "--json", "r.json", "--junit", "r.xml"], standalone_mode=False)
        except ValueError as found:
            error = found
        return error, json.loads(Path("r.json").read_text()), ElementTree.parse("r.xml").getroot()[0]

    return run


def test_the_command_runs_the_named_checks_and_compares_them_with_expectations(command, capsys):
    Path("expect.yaml").write_text("expected-fail: [one weight]\nskip: [construction]\n")
    error, report, suite = command(
        faulty("Sums"), "--only", "overlap,nested no_sync,one weight,construction", "--expect", "expect.yaml"
    )
    assert error is None
    assert report["conforms"]
    assert {one["check"]: (one["outcome"], one["expected"]) for one in report["checks"]} == {
        "overlap": ("passed", None),
        "one weight": ("failed", "expected-fail"),
        "nested no_sync": ("not supported", None),
        "construction": ("left out", "skip"),
    }
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert printed[:4] == ["passed", "failed", "left", "not"]
    name = f"conformance of {faulty('Sums')}"
    assert (suite.get("name"), suite.get("failures"), suite.get("skipped")) == (name, "0", "3")


def test_the_level_decides_and_the_last_line_counts_what_failed_below_it(command, capsys):
    checks = "one weight,half-precision sums,nested no_sync"
    error, report, _ = command(faulty("DividesAfterTheSum"), "--only", checks)
    assert error is None
    name = faulty("DividesAfterTheSum")
    last = f"{name} conforms in 3 of {len(CHECKS)} checks at level must: 2 passed, 1 failed at level should"
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert [(one["check"], one["level"]) for one in report["checks"]] == [
        ("one weight", "must"), ("half-precision sums", "should"), ("nested no_sync", "must"),
    ]  # fmt: skip
    assert report["versions"].keys() == {"ddplab", "torch", "python"}
    error, report, _ = command(name, "--only", "half-precision sums", "--level", "should")
    assert (report["conforms"], error.__class__) == (False, ValueError)


def test_the_action_passes_its_inputs_on_and_its_status_is_that_of_the_command(tmp_path):
    """Its last step, as GitHub runs it: inputs reach the shell as variables, so that none of them is code."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = action["runs"]["steps"][-1]
    given = {"class": "nowhere:DDP; touch hacked", "expect": "", "level": "should"}
    assert given.keys() == action["inputs"].keys()
    variables = {name: given[value[4:-3].removeprefix("inputs.")] for name, value in step["env"].items()}
    command = tmp_path / "ddplab"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ddplab "$@"\n')
    command.chmod(0o755)
    environment = os.environ | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-ec", step["run"]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, (tmp_path / "hacked").exists()) == (2, False)
    assert done.stderr.splitlines()[-1].endswith("got 'nowhere:DDP; touch hacked'")
    assert (tmp_path / "conform.xml").is_file()


def test_a_tolerance_permits_rounding_and_no_wrong_divisor(command):
    checks = "any timing,one weight,bucket caps,real models,random programs"
    assert command(faulty("AveragesInBfloat16"), "--only", checks)[0] is not None
    error, report, _ = command(faulty("AveragesInBfloat16"), "--only", checks, "--tolerance", "0.01")
    assert (error, report["tolerance"]) == (None, 0.01)
    _, report, _ = command(faulty("Sums"), "--only", checks, "--tolerance", "0.01")
    assert {one["outcome"] for one in report["checks"]} == {"failed"}


def test_saved_expectations_notice_a_check_that_does_not_apply_any_more(command):
    command(faulty("HasAHook"), "--only", "one weight,comm hooks", "--save-expect", "e.yaml")
    lines = [f"class: {faulty('HasAHook')}", "must-pass: [one weight]", "expected-fail: []"]
    assert Path("e.yaml").read_text().splitlines()[1:] == lines
    command(TORCHS, "--only", "one weight,comm hooks", "--save-expect", "e.yaml")
    error, report, _ = command(faulty("HasAHook"), "--only", "one weight", "--expect", "e.yaml")
    assert str(error).startswith(f"e.yaml: class: expected {faulty('HasAHook')}, got '{TORCHS}'; ")
    assert report["conforms"] is None
    Path("e.yaml").write_text(Path("e.yaml").read_text().replace(TORCHS, faulty("HasAHook")))
    _, report, _ = command(faulty("HasAHook"), "--only", "one weight,comm hooks", "--expect", "e.yaml")
    (problem,) = report["problems"]
    assert problem.startswith(
        "comm hooks: must pass, but is not supported: it refuses register_comm_hook: RuntimeError"
    )


def test_the_budget_repeats_random_programs_with_other_seeds():
    checks = {name: CHECKS[name] for name in ("one weight", "random programs", "state machine")}
    bench = SimpleNamespace(seed=3)
    assert [name for name, _ in until(0.0, checks, bench)] == list(checks)
    names = [(name, bench.seed) for name, _ in islice(until(math.inf, checks, bench), 6)][3:]
    assert names[0] == ("random programs with seed 4", 4)
    assert names[1:] == [("state machine with seed 4", 4), ("random programs with seed 5", 5)]


def test_on_github_problems_are_annotations_and_the_summary_has_all_checks(command, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    command(faulty("Sums"), "--only", "one weight,construction")
    assert (
        "::error title=ddplab conform::one weight: iteration 0, rank 0: gradient of 'w0'" in capsys.readouterr().out
    )
    summary = Path("summary.md").read_text()
    assert "| passed | must | construction |" in summary
    assert "does not conform: 1 problem" in summary


SENDS_CODE = """
class Code:
    def __reduce__(self):
        return exec, ("import os; os._exit(0)",)
import ddplab.reference.ranks.rank_process as here
here._send(here._pool[0], here.RESULT, Code())
"""
STOPS_MIDWAY = """
import os, struct, time
import ddplab.reference.ranks.rank_process as here
os.write(here._pool[0].fileno(), struct.pack("!i", 1000) + b"x")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit(0)", "it raised SystemExit: 0 (.*, line 1) .*; put what it runs under `if __name__"),
        ("import os; os._exit(0)", "expected an importable module; rank 0 exited without reporting an error"),
        ("raise KeyboardInterrupt", "expected an importable module; rank 0 failed: KeyboardInterrupt"),
        (SENDS_CODE, "expected an importable module; rank 0 sent what is no result: builtins.exec is no data"),
        (STOPS_MIDWAY, "expected an importable module; rank 0 sent what is no result: .Errno 11. "),
        ("1 / 0", "it raised ZeroDivisionError: division by zero (.*, line 1) when it was imported"),
    ],
)
def test_a_module_that_ends_or_fails_while_it_is_imported_is_a_failure_in_one_line(command, code, says):
    Path("ending.py").write_text(code)
    error, report, suite = command("ending:DDP", "--only", "one weight")
    assert re.search(says.replace("(", "\\(").replace(".*, line 1)", ".*, line 1\\)"), str(error))
    assert "\n" not in str(error)
    assert (report["conforms"], report["problems"]) == (None, [f"the run ended early: {error}"])
    assert suite.get("failures") == "1"


def test_a_run_that_is_interrupted_does_not_conform(command, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(CHECKS, "construction", interrupted)
    _, report, suite = command(NAIVE, "--only", "one weight,construction")
    assert report["problems"] == ["the run ended early: KeyboardInterrupt"]
    assert suite.get("failures") == "1"


def test_ctrl_c_during_the_imports_prevents_no_output(command, monkeypatch):
    monkeypatch.setattr("ddplab.cli.conform.start_server", lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        _, report, suite = command(NAIVE, "--only", "one weight")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert (report["conforms"], report["problems"]) == (None, ["the run ended early: KeyboardInterrupt"])
    assert suite.get("failures") == "1"


def test_the_command_ends_with_an_error_after_a_fault_and_writes_its_program(command):
    name = faulty("Sums")
    error, report, suite = command(name, "--only", "one weight,optimizers", "-x")
    assert str(error) == f"{name} does not conform: 1 problem"
    (problem,) = report["problems"]
    assert problem == "one weight: iteration 0, rank 0: gradient of 'w0': 3 times the expected value"
    assert repr(runpy.run_path("out/conform.py")["PROGRAM"]) == report["checks"][0]["program"]
    with pytest.raises(FindingError, match=problem.partition(": ")[2]):
        runpy.run_path(str(Path("out/conform.py").absolute()), run_name="__main__")
    assert len(suite.findall("testcase/failure")) == 1


def test_expectations_saved_beside_a_baseline_can_be_read_again(command, capsys):
    command(TORCHS, "--only", "overlap", "--level", "speed", "--save-schedule", "s.json")
    checks = ("--only", "one weight,overlap", "--baseline", "s.json")
    assert command(TORCHS, *checks, "--save-expect", "e.yaml")[0] is None
    assert Path("e.yaml").read_text().splitlines()[2:] == ["must-pass: [overlap, one weight]", "expected-fail: []"]
    assert command(TORCHS, *checks, "--expect", "e.yaml")[0] is None
    last = f"{TORCHS} conforms in 3 of {len(CHECKS) + 1} checks at level must: 3 passed"
    assert capsys.readouterr().out.splitlines()[-1] == last


def test_a_pass_below_the_level_does_not_make_a_class_conform(command):
    """Level must was said to hold after a run of checks of level should alone, which decide nothing."""
    error, report, _ = command(NAIVE, "--only", "gradients of another dtype,missing sparse gradients,bucket layout")
    assert (error.exit_status, report["conforms"]) == (2, None)
    assert "passed" in {one["outcome"] for one in report["checks"]}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize("full", ["--json", "--junit", "--save-expect"])
def test_an_output_that_cannot_be_written_is_no_verdict_and_prevents_no_other(monkeypatch, tmp_path, full):
    """The status was 1, of a class that does not conform, and without JSON there was no JUnit file."""
    monkeypatch.chdir(tmp_path)
    outputs = {"--json": "r.json", "--junit": "r.xml", full: "/dev/full"}
    words = [word for output in outputs.items() for word in output]
    with pytest.raises(ValueError, match=r"^/dev/full: cannot be written: No space") as error:
        app(["conform", NAIVE, "--only", "one weight", *words], standalone_mode=False)
    assert error.value.exit_status == 2
    assert {one.name for one in tmp_path.glob("r.*")} == {*outputs.values()} - {"/dev/full"}


NO_PROOF = "no check that decides ran; a run without one is no proof"


def test_a_run_in_which_no_check_applies_is_a_problem(command):
    error, report, _ = command(NAIVE, "--only", "plans")
    assert (str(error), error.exit_status) == (f"{NAIVE} could not be judged: 1 problem; {NO_PROOF}", 2)
    assert report["problems"] == [NO_PROOF]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere:C",), "nowhere:C: expected the name of an importable module"),
        ((NAIVE, "--only", "weights"), "--only: expected names of checks, got weights; there are any timing,"),
        ((NAIVE, "--only", "plans", "--save-schedule", "x"), "--only: expected the check overlap too"),
        ((NAIVE, "--backend", "glo"), "--backend: expected one of gloo, nccl, "),
        ((NAIVE, "--world-size", "1"), "world size: expected at least 2, got 1"),
        ((NAIVE, "--baseline", "x"), "x: cannot be read: No such file"),
    ],
)
def test_bad_input_of_the_command_is_told_in_one_line(command, capfd, words, message):
    error, report, suite = command(*words)
    assert str(error).startswith(message)
    assert (error.exit_status, report["conforms"], suite.get("failures")) == (2, None, "1")
    assert "\n" not in str(error)
    assert "ERROR" not in capfd.readouterr().err


@pytest.mark.parametrize("package", [None, "ddplab"], ids=["ddplab", "python -m ddplab"])
def test_a_misspelt_command_line_is_no_verdict(here, monkeypatch, package):
    monkeypatch.setattr(sys.modules["__main__"], "__package__", package)
    for words in (["--level", "foo"], ["--tolerance", "0.7"], ["--world-size", 0], ["--bogus"]):
        assert here("conform", NAIVE, *words).returncode == 2


@pytest.mark.parametrize("option", [["--tolerance", "0.01"], ["--against", "torch"]])
def test_an_adapter_is_refused_where_gradients_are_compared(monkeypatch, tmp_path, option):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^{option[0]}: expected classes whose gradients are compared"):
        app(["conform", "tests.faulty_adapters:sharding", *option], standalone_mode=False)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NeverConstructed", r"got no answer in [\d.]+ s$"),
        ("wraps_nothing", r"rank \d failed: TypeError: it returned NoneType instead of a module;"),
        ("returns_a_module", r"rank \d failed: TypeError: it returned Linear instead of \(wrapped, step\);"),
    ],
)
def test_a_subject_that_does_not_wrap_a_module_is_told_in_one_line(monkeypatch, tmp_path, name, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(check_runner, "TIMEOUT_S", 2.0)
    with pytest.raises(ValueError, match=message) as error:
        app(["conform", faulty(name), "--only", "one weight"], standalone_mode=False)
    assert "\n" not in str(error.value)
