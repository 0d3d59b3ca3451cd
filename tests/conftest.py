"""Fixtures: pools of ranks, new ones for each file of tests, so that no file meets what another one left behind."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from .explore import load_profile

if TYPE_CHECKING:  # the process that hands tests out runs none, and needs no torch
    from ddplab.reference.launch import RankPool

BODY_TIMEOUT_S = 60.0
WORLD_SIZES = {"two_ranks": 2, "four_ranks": 4}
IMPORTED = (
    *("pytest", "tests.strategies", "tests.reference.torch_suite.suite"),
    *("ddplab.conformance.all_checks", "ddplab.train_and_compare"),
)
"""What bodies, and the tests beside some of them, import."""

load_profile()


@pytest.fixture(scope="session", autouse=True)
def server(request) -> None:
    """The server that ranks are forked from imports while tests without ranks run."""
    from ddplab.reference.ranks.fork_server import start_server
    from ddplab.reference.ranks.process_settings import keep_freed_memory

    keep_freed_memory()  # emulated devices allocate megabytes again and again
    used = {name for item in request.session.items for name in item.fixturenames}
    if used & {*WORLD_SIZES, "bench_of", "judging"}:
        bodies = [name for name in sys.modules if name.startswith("tests.") and name.endswith("_bodies")]
        start_server(*bodies, *IMPORTED)


def pool(world_size: int) -> "RankPool":
    from ddplab.reference.launch import RankPool

    return RankPool(world_size, timeout_s=BODY_TIMEOUT_S)


@pytest.fixture(scope="module")
def two_ranks(server) -> Iterator["RankPool"]:
    with pool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four_ranks(server) -> Iterator["RankPool"]:
    with pool(4) as ranks:
        yield ranks


@pytest.fixture
def ranks(request, two_ranks, four_ranks) -> "RankPool":
    """The pool of `request.param` ranks."""
    return {2: two_ranks, 4: four_ranks}[request.param]


@pytest.fixture
def here(monkeypatch, capsys):
    """Runs the command in this process, which has imported everything; a new one would take seconds each time."""
    from ddplab.cli.main import main

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["ddplab", *map(str, words)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(words, ended.value.code or 0, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def browser():
    """Chromium, headless; for root without its sandbox, which root cannot have."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("pages are tested in a browser, and there is none here; run `apt-get install chromium`")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield started
        started.close()
