"""`make gpu`: parts and outcomes, absent packages, traces beside the profiler, and their rows in the score."""

import contextlib
import gzip
import importlib.util
import json
import re
import shlex
import subprocess
import sys

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gpu
from benchmarks.gpu import Part, load, missing, parts, run_all, run_commands
from benchmarks.gpu_traces import agreement
from ddplab.reference.trace import Iteration
from validation import part_h_profiles

from .ddplab.small_trace import small_trace
from .explore import examples

DONE, FAILS = "platform", "no_such_module"  # `python -m platform` prints a line
ROOT = gpu.ROOT


@pytest.fixture
def run(tmp_path):
    """Runs parts, each with one command; returns their states."""

    def run(*modules, again=False, minutes=1.0):
        chosen = [Part(f"part-{number}", 60.0, [module]) for number, module in enumerate(modules)]
        return [one.state for one in run_all(chosen, tmp_path / "run", again=again, minutes=minutes)]

    return run


def begun(capsys):
    return [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith(" ...")]


def test_a_part_that_fails_is_recorded_and_the_next_run_repeats_only_what_is_not_done(run, tmp_path, capsys):
    assert run(FAILS, DONE) == ["failed", "done"]
    assert FAILS in load(tmp_path / "run" / "part-0.json.gz").error
    assert begun(capsys) == ["part-0", "part-1"]
    assert run(DONE, DONE) == ["done", "done"]
    assert begun(capsys) == ["part-0"]
    assert run(DONE, DONE, again=True) == ["done", "done"]
    assert begun(capsys) == ["part-0", "part-1"]
    (tmp_path / "run" / "part-1.json.gz").write_bytes(b"\x1f\x8b cut")
    run(DONE, DONE)
    assert begun(capsys) == ["part-1"]


def test_without_time_a_part_is_left_for_the_next_run(run, tmp_path):
    assert run(DONE, DONE, minutes=0.0) == ["no time", "no time"]
    assert list((tmp_path / "run").iterdir()) == []


HANGS = """
import subprocess, sys
child = subprocess.Popen(["sleep", "600"])
with open(sys.argv[1], "w") as file:
    file.write(str(child.pid))
print("begun", flush=True)
child.wait()
"""


def test_a_command_that_hangs_is_ended_with_what_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "LEAST_S", 0.0)
    beside = [sys.executable, "-c", "print('done')"]
    ended, other = run_commands([[sys.executable, "-c", HANGS, str(tmp_path / "child")], beside], 3.0)
    assert ended["status"] is None
    assert (other["status"], other["output"]) == (0, "done\n")
    assert "begun" in ended["output"]
    with contextlib.suppress(psutil.NoSuchProcess):
        child = psutil.Process(int((tmp_path / "child").read_text()))
        assert child.status() == psutil.STATUS_ZOMBIE or child.wait(10) is None


def test_values_that_a_command_wrote_are_part_of_the_outcome_even_if_it_fails(tmp_path):
    part = Part("part", 60.0, ['timeit -n 1 -r 1 \'open("VALUES/x.json", "w").write("[3]")\' \'raise ValueError\''])
    (outcome,) = run_all([part], tmp_path, again=False, minutes=1.0)
    assert outcome.state == "failed"
    assert json.loads(gzip.decompress((tmp_path / "part.json.gz").read_bytes()))["values"] == {"x": [3]}


def test_each_part_has_a_name_of_its_own_modules_that_exist_and_its_kind_on_the_cpu():
    kinds = []
    for every in (parts(dry=False), parts(dry=True)):
        assert len({part.name for part in every}) == len(every)
        for command in (command for part in every for command in part.commands):
            module, *_ = shlex.split(command)
            assert importlib.util.find_spec(module) is not None
        kinds.append(list(dict.fromkeys(part.name.partition("-")[0] for part in every)))
    assert kinds[0] == kinds[1]


def test_only_packages_that_are_absent_or_too_old_are_missing(tmp_path):
    wanted = ["torch>=99", "numpy>=1.5", "pytest>=999.1", "no-such-package>=1; sys_platform == 'linux'"]
    (tmp_path / "pyproject.toml").write_text(f"[project]\ndependencies = {wanted}")
    assert missing(tmp_path) == ["pytest>=999.1", "no-such-package>=1"]
    assert missing() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_the_command_ends_with_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match=r"^.*expected a CUDA device.*$"):
        gpu.main()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run_does_every_part_and_its_traces_agree_with_the_profiler_and_get_rows_in_the_score(
    tmp_path, monkeypatch
):
    """`.ci/run` runs this test in place of `make gpu DRY=1`."""
    words = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--again"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (folder,) = re.findall("^results: (.*), ", ended.stdout, re.MULTILINE)
    (tmp_path / "run").symlink_to(ROOT / folder)
    outcome = load(next((tmp_path / "run").glob("traces-*.json.gz")))
    assert {name.rpartition("_")[2] for name in outcome.values["agreement"]} == {"module", "ours", "torch"}
    monkeypatch.setattr(part_h_profiles, "RUNS", tmp_path)
    monkeypatch.setattr(part_h_profiles, "PROFILES", tmp_path)
    paths = [path for path in part_h_profiles.profiles.__wrapped__() if path.is_file()]
    assert len(paths) == 6
    rows = {path.name: part_h_profiles.score(path).rows for path in paths}
    assert {name for name, of_trace in rows.items() if of_trace} == {name for name in rows if "module" not in name}
    assert all(len(of_trace) <= 1 for of_trace in rows.values())


# Agreement

TRACE = small_trace()
STEP = TRACE.ranks[0].iterations[0]


def moved(one: Iteration, ready_ns: int, end_ns: int) -> Iteration:
    moments = tuple(None if ns is None else ns + ready_ns for ns in one.ready_ns)
    return one.model_copy(update={"ready_ns": moments, "end_ns": one.end_ns + end_ns})


def with_iterations(iterations):
    (rank,) = TRACE.ranks[:1]
    return TRACE.model_copy(update={"ranks": (rank.model_copy(update={"iterations": tuple(iterations)}),)})


@examples(10)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(3, 6), st.integers(0, 10**9))
def test_agreement_is_the_distance_as_a_fraction_of_the_iteration(ready_ns, end_ns, steps, shift_ns):
    """Neither the first step, nor the last, nor the moment at which recordings begin counts."""
    imported = with_iterations([STEP] * steps)
    inner = moved(STEP, ready_ns, end_ns).shifted(shift_ns)
    outer = moved(STEP, 10**8, 10**8)
    found = agreement(with_iterations([outer, *[inner] * (steps - 2), outer]), imported)
    assert found["iteration"] == pytest.approx(end_ns / STEP.duration_ns)
    assert found["ready"] == found["last ready"] == found["ready, largest"]
    assert found["ready"] == pytest.approx(ready_ns / STEP.duration_ns)


def test_traces_of_different_or_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="argument 2 is"):
        agreement(with_iterations([STEP] * 4), with_iterations([STEP] * 3))
    with pytest.raises(ValueError, match="expected at least 3 steps"):
        agreement(with_iterations([STEP] * 2), with_iterations([STEP] * 2))
