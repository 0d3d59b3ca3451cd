"""The commands that train on real ranks: `record`, `calibrate` and `validate`."""

import hashlib

import pytest

from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric

TINY = "tests.models_for_cli:tiny"


def test_record_writes_a_trace_of_all_ranks(trace):
    recorded = Trace.load(trace)
    assert recorded.workload.model == TINY
    assert [len(rank.iterations) for rank in recorded.ranks] == [4, 4]


def test_calibrate_and_validate_on_real_ranks(answered, tmp_path):
    """The slow one: it really measures. Predictions are on disk, as hashed."""
    asked = ("--caps", "0.01,single", "--hooks", "none,fp16", "--repeat", 1, "--out", tmp_path)
    _, report = answered("validate", "--model", TINY, *asked)
    assert [(row["cap_mb"], row["hook"]) for row in report["rows"]] == [
        (0.01, "none"), (0.01, "fp16"), (None, "none"), (None, "fp16"),
    ]  # fmt: skip
    for row in report["rows"]:
        assert row["error"] == pytest.approx(row["predicted_ns"] / row["measured_ns"] - 1)
        assert row["measured_ns"] > 0
    written = (tmp_path / "predictions.json").read_bytes()
    assert hashlib.sha256(written).hexdigest() == report["predictions_sha256"]
    fabric = Fabric.load(tmp_path / "fabric.json")
    assert fabric.all_reduce_ns(1 << 27, 2) > fabric.all_reduce_ns(1 << 12, 2) > 0
    assert [hook.name for hook in fabric.processor.hooks] == ["none", "fp16"]


def test_what_calibrate_names_as_next_is_possible_after_one_rank(printed, here, trace, tmp_path):
    fabric = tmp_path / "fabric.json"
    said = printed("calibrate", "--model", TINY, "--world-size", 1, "--out", fabric)
    (line,) = (line for line in said.splitlines() if line.startswith("next: ddplab "))
    words = line.replace("TRACE", str(trace)).split()[2:]
    done = here(*words)
    assert done.returncode == 0, done.stderr
    said = here(*words[:-1], 4).stderr
    assert "measure it (ddplab calibrate --world-size 4), or describe the links" in said, "one rank is no basis"
