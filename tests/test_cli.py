"""The command as a user runs it: real processes, real files, exit codes, one clear line for a mistake."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from reference.trace import Trace
from simulator import Fabric

ROOT = Path(__file__).parent.parent
TINY = "tests.models_for_cli:tiny"


def ddplab(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "ddplab", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110, check=False)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "trace.json.gz"
    done = ddplab("record", "--model", TINY, "--world-size", 2, "--iterations", 4, "--out", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def fabric(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "fabric.json"
    Fabric.from_alpha_beta(20_000, 1e9, concurrency=2).save(path)
    return path


def test_record_writes_a_trace_of_all_ranks(trace):
    recorded = Trace.load(trace)
    assert recorded.workload.model == TINY
    assert [len(rank.iterations) for rank in recorded.ranks] == [4, 4]


def test_predict_prints_a_table_and_writes_json_and_timeline(trace, fabric, tmp_path):
    done = ddplab(
        "predict", trace, "--fabric", fabric, "--world-size", 8, "--caps", "0.01,single",
        "--orders", "ready,forward", "--json", tmp_path / "p.json", "--perfetto", tmp_path / "t.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "single" in done.stdout
    assert "iteration ms" in done.stdout
    rows = json.loads((tmp_path / "p.json").read_text())["rows"]
    assert [(row["cap_mb"], row["order"]) for row in rows] == [
        (0.01, "ready"), (0.01, "forward"), (None, "ready"), (None, "forward"),
    ]  # fmt: skip
    assert all(row["iteration_ns"] >= row["compute_ns"] for row in rows)
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_calibrate_and_validate_on_real_ranks(tmp_path):
    """The slow one: it really measures. Predictions are on disk, with the hash that the report names."""
    import hashlib

    done = ddplab(
        "validate", "--model", TINY, "--caps", "0.01,single", "--repeat", 1, "--out", tmp_path,
        "--json", tmp_path / "j",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "j").read_text())
    assert set(report) == {
        "predictions_sha256",
        "mape",
        "paired_mape",
        "worst_error",
        "sign_errors",
        "coverage",
        "rows",
    }
    assert [row["cap_mb"] for row in report["rows"]] == [0.01, None]
    for row in report["rows"]:
        assert row["error"] == pytest.approx(row["predicted_ns"] / row["measured_ns"] - 1)
        assert row["measured_ns"] > 0
    written = (tmp_path / "predictions.json").read_bytes()
    assert hashlib.sha256(written).hexdigest() == report["predictions_sha256"]
    assert (tmp_path / "report.csv").exists()
    fabric = Fabric.load(tmp_path / TINY / "fabric.json")
    assert fabric.all_reduce_ns(1 << 27, 2) > fabric.all_reduce_ns(1 << 12, 2) > 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["record", "--model", "alexnet"],
            "ddplab: --model: expected resnet50, resnet18, mlp, transformer, small-tensors or module",
        ),
        (["record", "--model", "no_such:thing"], "No module named 'no_such'"),
        (
            ["record", "--model", "tests.models_for_cli:not_callable"],
            "not_callable is not callable but a int",
        ),
        (["record", "--model", "tests.models_for_cli:not_a_pair"], "expected it to return (module, loss_fn)"),
        (["record", "--world-size", "0"], "Invalid value for '--world-size'"),
        (["record", "--frobnicate"], "No such option"),
        (["predict", "absent.json"], "ddplab: absent.json: cannot be read: No such file"),
        (["predict", "{trace}", "--fabric", "absent.json"], "ddplab: absent.json: cannot be read"),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--caps", "1,two"],
            "ddplab: --caps: expected sizes in MB",
        ),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--caps", "-1"],
            "ddplab: --caps: expected sizes in MB",
        ),
        (
            ["predict", "{trace}", "--fabric", "{fabric}", "--orders", "up"],
            "ddplab: --orders: expected ready, reverse",
        ),
        (["record", "--out", "/dev/null/trace.json"], "cannot be written: /dev/null is not a folder"),
        (["predict", "{trace}", "--fabric", "{fabric}", "--json", "."], "cannot be written: it is a folder"),
        (["predict", "{trace}", "--fabric", "{trace}"], "not a fabric file"),
        (["predict", "{fabric}"], "schema_version: field required"),
        (["validate", "--caps", ""], "ddplab: --caps: expected sizes in MB"),
    ],
)
def test_a_mistake_is_told_in_one_line(words, says, trace, fabric):
    done = ddplab(*(word.format(trace=trace, fabric=fabric) for word in words))
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    told = [line for line in done.stderr.splitlines() if line and not line.startswith(("Usage", "Try", "recording"))]
    assert len(told) == 1


def test_ctrl_c_ends_the_command_and_its_ranks():
    command = [Path(sys.executable).parent / "ddplab", "record", "--model", TINY, "--iterations", "100000"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # tests run in the background ignore it
    )  # fmt: skip
    _wait_for_a_rank(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Traceback" not in errors
    _wait_until(lambda: not _alive(process.pid), "a process of the command outlived it")


def _wait_for_a_rank(pid: int) -> None:
    """Until the command has a child that has computed for three seconds: it is past its imports."""

    def computing() -> bool:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return any(_processor_seconds(child) > 3 for child in children)

    _wait_until(computing, "no rank began to compute")


def _processor_seconds(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _wait_until(condition, complaint: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, complaint
        # Polled, as Linux tells nobody how long a process has computed, or that the last of a group is gone.
        time.sleep(0.1)
