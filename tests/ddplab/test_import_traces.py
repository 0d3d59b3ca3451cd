"""The command `import`."""

import json

import pytest

from ddplab.cli.main import main
from reference.trace import Trace

from ..simulator import profiler_files
from ..simulator.profiler_files import Script, write

SMALL = Script(
    shapes=((4, 3), (4,), (3, 2), (3,)), buckets=(1, 3), kernel_ns=(900_000, 400_000, 700_000, 300_000),
    host_ns=50_000, all_reduce_ns=(800_000, 600_000), steps=3, noted_shapes=True, vendor="cuda",
)  # fmt: skip


def test_the_command_writes_trace_and_report(tmp_path, capsys, monkeypatch):
    document, _ = profiler_files.profile(SMALL)
    path = write(document, tmp_path / "rank0.json")
    out, report = tmp_path / "trace.json.gz", tmp_path / "report.json"
    words = ["ddplab", "import", "kineto", str(path), "--out", str(out), "--json", str(report)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert json.loads(report.read_text())["gpu"] == "a GPU"
    assert Trace.load(out).workload.world_size == 2
    assert "only 1 of 2 ranks has a file" in capsys.readouterr().out
