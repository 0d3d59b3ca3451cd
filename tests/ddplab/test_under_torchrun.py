"""Every command that trains, under torchrun: on the ranks of the launcher, of which rank 0 prints and writes.

`make test-torchrun` runs all of these tests.
"""

import re
import subprocess
import sys

import pytest

from ddplab.reference.trace import Trace
from ddplab.simulator import Fabric, tune
from validation.tests.test_virtual_links import NEEDS_LINKS

from .command_process import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a test launches ranks twice, each time within 110 s
TINY = ("--model", "tests.models_for_cli:tiny")
TORCHRUN = ("torch.distributed.run", "--nproc-per-node=2", "--local-addr=127.0.0.1", "-m")


def torchrun(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *TORCHRUN, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


def printed(*words: object) -> str:
    """What a module prints under torchrun."""
    done = torchrun(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_record_and_validate_a_plan(tmp_path):
    trace, fabric, plan = tmp_path / "trace.json.gz", tmp_path / "fabric.json", tmp_path / "plan.json"
    assert printed("ddplab", "record", *TINY, "--iterations", 2, "--out", trace).count("recorded in") == 1
    assert len(Trace.load(trace).ranks) == 2
    Fabric.from_alpha_beta(20_000, 1e9).save(fabric)
    tune(Trace.load(trace), Fabric.load(fabric), world_size=2).save(plan)
    words = ["--plan", plan, "--repeat", 1, "--out", tmp_path / "out"]
    said = printed("ddplab", "validate", *TINY, *words)
    assert said.count("noise floor") == said.count("gain of the plan over torch's default") == 1
    assert (tmp_path / "out" / "report.json").exists()


@NEEDS_LINKS
def test_record_on_two_nodes(tmp_path):
    """Two namespaces as nodes, each with a torchrun of its own and two ranks."""
    script, out = ROOT / "tests" / "scripts" / "two_nodes.py", tmp_path / "t.json.gz"
    command = [sys.executable, script, "1gbit", "record", *TINY, "--iterations", "2", "--out", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recorded in") == 1
    assert len(Trace.load(out).ranks) == 4


def test_calibrate(tmp_path):
    words = ["--out", tmp_path / "fabric.json"]
    assert printed("ddplab", "calibrate", *TINY, *words).count("2 ranks, saved as") == 1
    assert Fabric.load(tmp_path / "fabric.json").world_sizes == [2]


def test_conform():
    conforms = "torch.nn.parallel:DistributedDataParallel conforms in 1 of "
    assert printed("ddplab", "conform", "torch", "--only", "one weight").count(conforms) == 1


def test_the_benchmark_of_the_reducer():
    words = ["--models", "small-tensors", "--modes", "", "--pairs", 2]
    assert printed("benchmarks.ddp", *words).count("peak MiB") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["record", "--model", "nosuch"], r"^ddplab: rank \d on \S+: model: expected .* got 'nosuch'$"),
        (["record", *TINY, "--world-size", 3], r"^ddplab: ranks: expected at most the 2 .* started, got 3$"),
    ],
)
def test_an_error_is_one_line_of_rank_0(words, says):
    done = torchrun("ddplab", *words)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ddplab: ")]
    assert re.search(says, line)
    assert done.returncode == 1
