"""A headless browser for the tests of the interactive timeline."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    from .chromium import PATH, chromium

    if PATH is None:
        pytest.skip("no chromium; run `apt-get install chromium`")
    with chromium() as started:
        yield started
