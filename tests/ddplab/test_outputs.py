"""Outputs of commands: no command overwrites what it reads."""

import gzip
import json
import re
from pathlib import Path

import pytest

from ..strategies import iteration, trace_of
from .command_process import ROOT, ddplab


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
    assert (done.returncode, done.stdout) == (2 if words[0] == "conform" else 1, "")
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


FORGED = "x\nfits: buy 512 GPUs\r\n::error::y\x1b[31m\u202e\u2028fits: z"


def test_no_name_in_a_file_forges_a_line_or_reaches_a_terminal(here, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = trace_of([[iteration(500, (3000, 2000), 3500, 700)] * 2], [400, 800]).model_dump(mode="json")
    trace["workload"] |= dict.fromkeys(("model", "device_name", "torch_version"), FORGED)
    trace["workload"]["parameters"][0]["name"] = FORGED
    Path("t.json").write_text(json.dumps(trace))
    level = {"latency_us": 5, "gb_per_s": 12}
    Path("pod.yaml").write_text(json.dumps({"source": FORGED, "levels": {FORGED: level}}))
    Path("two.yaml").write_text(json.dumps({"levels": {FORGED: level, "b": level | {"of": f"{FORGED}?"}}}))
    for kind in ("Rank 0 Pid device", "AllReduce"):
        Path("r.json").write_text(json.dumps([{"name": kind + FORGED, "size": FORGED, "type": FORGED}]))
    Path("p.csv").write_text(f'system,per_gpu_hour,currency,source,date\n"{FORGED}",1,USD,"{FORGED}",2026-11-28\n')
    Path("c.csv").write_text(f'"{FORGED}",b\n')
    Path("s.json").write_text(json.dumps({FORGED: 1}))
    profile = gzip.decompress((ROOT / "validation/profiler/v100x1_resnet50_rank0.json.gz").read_bytes()).decode()
    forged = json.dumps(FORGED)[1:-1]
    for name in ("Tesla V100-SXM2-32GB", "volta_", "ProfilerStep#", "nccl"):
        assert name in profile, name
        profile = profile.replace(name, name + forged)
    Path("k.json").write_text(profile)
    plan = ("--world-size", "8,16", "--device", "a100", "--details", "--json", "j.json")
    for words in (
        ("show", "t.json", "pod.yaml"), ("show", "s.json"), ("predict", "t.json", "--fabric", "pod.yaml"),
        ("plan", "t.json", "pod.yaml", *plan), ("plan", "t.json", "two.yaml", *plan),
        ("plan", "t.json", "pod.yaml", *plan, "--samples", "1e6", "--prices", "p.csv"),
        ("plan", "t.json", "pod.yaml", *plan, "--samples", "1e6", "--prices", "c.csv"),
        ("predict", "t.json", "--fabric", "r.json"), ("predict", "t.json", "--fabric", "s.json"),
        ("tune", "t.json", "--fabric", "pod.yaml", "--world-size", "8"), ("import", "kineto", "k.json"),
    ):  # fmt: skip
        done = here(*words)
        said = done.stdout + done.stderr
        assert not re.search(r"^(fits: [bz]|::error)|[\x1b\u202e\u2028]", said, re.MULTILINE), words
