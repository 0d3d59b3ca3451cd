"""The pytest plugin: other projects do not notice it, and the checks of `ddplab conform` run as tests."""

import os
import subprocess
import sys

import pytest

from ddplab.conformance import overlap
from ddplab.conformance.class_under_test import Subject

NAIVE, STALE = "reference.minimal:NaiveDataParallel", "tests.faulty_reducers:NeverSendsBuffers"
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--ddp")
    parser.addoption("--ddp-full")
"""
TEST = """
import sys
import reference

def test_all_is_its_own(request):
    assert "ddplab.pytest_plugin" in sys.modules
    assert reference.mine and request.config.getoption("--ddp") == "x"
    assert sys.modules.keys().isdisjoint(("reference.launch", "simulator", "torch"))
"""


def test_a_project_with_the_option_ddp_and_a_package_reference_does_not_notice_it(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "__init__.py").write_text("mine = True\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--ddp", "x"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert " 1 passed in " in done.stdout, done.stdout + done.stderr


@pytest.fixture
def conform(tmp_path, monkeypatch, capsys):
    """Runs the checks in this process, which has imported everything, and returns the lines of the output."""
    monkeypatch.chdir(tmp_path)

    def run(*options: object) -> list[str]:
        plain = ("--color=no", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-p", "no:xdist")
        pytest.main([*plain, "-rA", "--pyargs", "ddplab", *map(str, options)])
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected --ddplab-class MODULE:CLASS, got no class to check"),
        (("--ddplab-class", "torch.nn:Linear"), "missing 1 required positional argument: 'out_features'"),
    ],
)
def test_a_class_that_cannot_be_checked_is_one_error(conform, options, message):
    output = conform(*options)
    assert message in "\n".join(output)
    assert " 1 error in " in output[-1]
    assert len(output) < 40


def test_expectations_and_a_baseline_decide_as_in_the_command(conform, tmp_path):
    (tmp_path / "expect.yaml").write_text(
        "must-pass: [one weight, plans]\nexpected-fail: [buffers, accumulation]\nskip: [overlap, construction]\n"
    )
    schedule = overlap.schedule_of(Subject(STALE), overlap.MODELS[0], overlap.NETWORKS[0])
    faster = schedule.model_copy(update={"iteration_ns": schedule.iteration_ns // 2})
    overlap.save(tmp_path / "s.json", STALE, [faster])
    output = conform(
        "-k", "weight or plans or overlap or construction or buffers or accumulation or baseline",
        "--ddplab-class", STALE, "--ddplab-world-size", 2,
        "--ddplab-expect", "expect.yaml", "--ddplab-baseline", "s.json",
    )  # fmt: skip
    outcomes = {line.partition("::")[2].partition(" - ")[0]: line.split()[0] for line in output if "::" in line}
    assert outcomes == {
        "test_conformance[one weight]": "PASSED",
        "test_conformance[plans]": "FAILED",
        "test_conformance[buffers]": "XFAIL",
        "test_conformance[accumulation]": "FAILED",
        "test_conformance[baseline]": "FAILED",
    }
    assert "% on 8 ranks at 2400 Gbit/s" in "\n".join(output)
    assert " 2 skipped" in output[-1]  # the checks to skip
