"""The command `import`."""

import pytest

from ddplab.reference.trace import Trace

from ..simulator.profiler_files import SMALL, profile, write


@pytest.mark.parametrize("words", [(), ("kineto",)])
def test_the_command_writes_trace_and_report(answered, tmp_path, words):
    document, _ = profile(SMALL)
    shown, report = answered(
        "import", *words, write(document, tmp_path / "rank0.json"), "--out", tmp_path / "trace.json.gz"
    )
    assert report["gpu"] == "a GPU"
    assert Trace.load(tmp_path / "trace.json.gz").workload.world_size == 2
    assert "1 of 2 ranks gave a file" in shown
