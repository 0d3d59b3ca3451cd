"""A headless browser for the tests of pages."""

import os
import shutil

import pytest


@pytest.fixture(scope="session")
def browser():
    """Chromium; for root without its sandbox, which root cannot have."""
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium; run `apt-get install chromium`")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield started
        started.close()
