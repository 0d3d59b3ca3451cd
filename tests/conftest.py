"""Fixtures: pools of ranks that are started once per session."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from reference.fork_server import start_server
from reference.launch import RankPool

from .explore import load_profile

BODY_TIMEOUT_S = 60.0
START_TIMEOUT_S = 100.0
WORLD_SIZES = {"two_ranks": 2, "four_ranks": 4}

load_profile()


@pytest.fixture(scope="session", autouse=True)
def starting(request) -> Iterator[dict[str, Future[RankPool]]]:
    """The pools of ranks that this session's tests use; they start while tests without ranks run."""
    used = {name for item in request.session.items for name in item.fixturenames}
    if used & set(WORLD_SIZES):
        start_server("tests.bodies", "tests.torch_suite.suite")
    with ExitStack() as stack, ThreadPoolExecutor(max_workers=1) as starter:
        pools = {name: RankPool(size, timeout_s=BODY_TIMEOUT_S) for name, size in WORLD_SIZES.items() if name in used}
        yield {name: starter.submit(_started, stack.enter_context(pool)) for name, pool in pools.items()}


def _started(pool: RankPool) -> RankPool:
    from . import bodies  # imports torch, which sessions without ranks do not need

    pool.run(bodies.import_everything, timeout_s=START_TIMEOUT_S)
    return pool


@pytest.fixture(scope="session")
def two_ranks(starting) -> RankPool:
    return starting["two_ranks"].result()


@pytest.fixture(scope="session")
def four_ranks(starting) -> RankPool:
    return starting["four_ranks"].result()


@pytest.fixture
def ranks(request, two_ranks, four_ranks) -> RankPool:
    """The pool of `request.param` ranks."""
    return {2: two_ranks, 4: four_ranks}[request.param]
