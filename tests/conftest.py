"""Fixtures: ranks that are started once for the whole session."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from reference.launch import RankPool

BODY_TIMEOUT_S = 60.0

# Ranks are shared between examples on purpose: a body leaves nothing behind. No deadline: the machine is shared.
settings.register_profile("ddplab", deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
settings.load_profile("ddplab")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout_s=BODY_TIMEOUT_S) as pool:
        yield pool


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[RankPool]:
    with RankPool(4, timeout_s=BODY_TIMEOUT_S) as pool:
        yield pool


@pytest.fixture
def ranks(request, two_ranks, four_ranks) -> RankPool:
    """The pool of `request.param` ranks."""
    return {2: two_ranks, 4: four_ranks}[request.param]
