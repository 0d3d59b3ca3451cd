"""A page in a browser, for tests."""

from playwright.sync_api import Browser, Page


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
