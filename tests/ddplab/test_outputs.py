"""Outputs of commands: no command overwrites what it reads."""

import json
import re
from pathlib import Path

import pytest

from ..strategies import iteration, trace_of
from .command_process import ddplab


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a trace and two fabrics."""
    path = tmp_path_factory.mktemp("inputs")
    trace_of([[iteration(500, (3000, 2000), 3500, 700)] * 2], [400, 800]).save(path / "t.json")
    (path / "pod.yaml").write_text("levels:\n  network: {latency_us: 5, gb_per_s: 12}\n")
    (path / "mine.py").write_text("from tests.models_for_cli import tiny\n")
    (path / "out").mkdir()
    (path / "out" / "fabric.json").write_text("{}")
    return path


PREDICT = ("predict", "t.json", "--fabric", "pod.yaml")


@pytest.mark.parametrize(
    "words",
    [
        (*PREDICT, "--json", "t.json"),
        (*PREDICT, "--json", "pod.yaml"),
        (*PREDICT, "--timeline", "t.json"),
        (*PREDICT, "--json", "a.png", "--timeline", "./a.png"),
        ("predict", "t.json", "--json", "out/fabric.json"),
        ("tune", "t.json", "--fabric", "pod.yaml", "--out", "t.json"),
        ("synthesize", "--rescale", "t.json", "--from", "v100", "--out", "t.json"),
        ("emulate", "t.json", "--fabric", "pod.yaml", "--json", "t.json"),
        ("plan", "t.json", "pod.yaml", "--json", "pod.yaml"),
        ("show", "pod.yaml", "--json", "pod.yaml"),
        ("import", "kineto", "t.json", "--out", "t.json"),
        ("synthesize", "--model", "mine:tiny", "--out", "mine.py"),
        ("record", "--model", "mine:tiny", "--out", "mine.py"),
        ("conform", "mine:tiny", "--junit", "mine.py"),
    ],
    ids=" ".join,
)
def test_a_command_that_would_overwrite_its_inputs_is_refused(here, folder, monkeypatch, words):
    monkeypatch.chdir(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = here(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith("ddplab: ")
    assert "expected a name for an output, got that of" in done.stderr.splitlines()[-1]
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_command_that_would_fill_the_folder_of_its_input_is_refused(here, folder, monkeypatch):
    monkeypatch.chdir(folder)
    done = here("validate", "--plan", "t.json", "--out", ".")
    assert done.returncode == 1
    assert done.stderr == "ddplab: t.json: expected inputs outside of ., which the command fills; change --out\n"


def test_a_result_on_the_standard_output_is_all_that_is_there_and_a_mistake_one_line_without_it(folder):
    done = ddplab(*PREDICT, "--json", "-", cwd=folder)
    assert done.returncode == 0
    assert json.loads(done.stdout)["rows"]
    assert "predicted" in done.stderr
    done = ddplab("predict", "absent.json", "--json", "-", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"ddplab: absent.json: cannot be read: No such file or directory; .*\n", done.stderr)
