"""A headless Chromium for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""None: there is no browser, and the tests that need one are skipped."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a browser. As root it runs without its sandbox, which root cannot have."""
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=PATH, args=arguments)
        yield browser
        browser.close()


class Watched:
    """A page without a network, its errors, and the addresses that it requested.

    Attributes:
        page: The page.
        problems: Errors and warnings in the console, and uncaught errors.
        requested: Every requested address.
    """

    def __init__(self, browser: Browser, **context: object) -> None:
        self.context = browser.new_context(**context)
        self.context.set_offline(True)
        self.page: Page = self.context.new_page()
        self.problems: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
