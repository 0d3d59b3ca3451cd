"""Fixtures for the tests of `ddplab`: files that commands read, benches, and ranks that do not hang for long."""

import json
from pathlib import Path

import pytest

from ddplab.conformance.check_runner import Bench
from ddplab.conformance.class_under_test import Subject
from ddplab.emulation import virtual_time
from ddplab.simulator import Fabric

from ..nccl_log import nccl_log
from .conformance_bench import LITTLE


@pytest.fixture(scope="session")
def trace(tmp_path_factory) -> Path:
    """A trace of two ranks that the command `record` has written, in this process; no test changes it."""
    from ddplab.cli.main import app

    path = tmp_path_factory.mktemp("cli") / "trace.json.gz"
    words = ["--model", "tests.models_for_cli:tiny", "--world-size", "2", "--iterations", "4", "--out", str(path)]
    app(["record", *words], standalone_mode=False)
    return path


@pytest.fixture(scope="session")
def fabric(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "fabric.json"
    Fabric.from_alpha_beta(20_000, 1e9, concurrency=2).save(path)
    return path


@pytest.fixture(scope="session")
def topology(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "topology.yaml"
    path.write_text(
        "levels:\n  node: {members: 2, latency_us: 2, gb_per_s: 10}\n  nic: {of: node, latency_us: 9, gb_per_s: 1}\n"
    )
    return path


@pytest.fixture
def logs(tmp_path) -> list[Path]:
    """Of nccl-tests: 8.65 us on two ranks, 9.65 us on four."""
    paths = [tmp_path / "two.log", tmp_path / "four.txt"]
    for path, ranks, us in zip(paths, (2, 4), (8.65, 9.65), strict=True):
        path.write_text(nccl_log(ranks, {8: us, 2**20: 99.25}))
    return paths


@pytest.fixture
def printed(here):
    """Runs the command, which must succeed, and returns what it printed."""

    def run(*words: object) -> str:
        done = here(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def answered(printed, tmp_path):
    """Runs the command as `printed` does; returns what it printed and its JSON document."""

    def run(*words: object) -> tuple[str, dict]:
        shown = printed(*words, "--json", tmp_path / "answer.json")
        return shown, json.loads((tmp_path / "answer.json").read_text())

    return run


@pytest.fixture
def bench_of(request):
    """Makes a bench on two ranks, or on the pool that a test names, which makes no program smaller."""
    ranks = request.getfixturevalue(getattr(request, "param", "two_ranks"))
    ranks.only_data = True  # as of the commands

    def make(name: str, *, against: str | None = None) -> Bench:
        bench = Bench(Subject(name), ranks, LITTLE, against=None if against is None else Subject(against))
        bench.shrinks = False
        bench.start()
        return bench

    yield make
    ranks.only_data = False


@pytest.fixture(scope="module")
def soon():
    """A rank that hangs in virtual time is an error within seconds, also while Hypothesis shrinks an example."""
    before, virtual_time.TURN_TIMEOUT_S = virtual_time.TURN_TIMEOUT_S, 10.0
    yield
    virtual_time.TURN_TIMEOUT_S = before
