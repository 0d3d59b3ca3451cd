"""A page in a browser, for tests."""

from playwright.sync_api import Browser, BrowserContext, Page

_contexts: dict[tuple[tuple[str, bool], ...], BrowserContext] = {}


class Watched:
    """A page without a network, its errors, and the addresses that it requested.

    Pages share a context, because each new one starts a process, for 1.5 processor seconds; the pages store nothing.

    Attributes:
        page: The page.
        problems: Errors and warnings in the console, and uncaught errors.
        requested: Every requested address.
    """

    def __init__(self, browser: Browser, *, width: int = 1280, height: int = 800, **options: bool) -> None:
        """`options` are those of a context."""
        if (key := tuple(sorted(options.items()))) not in _contexts:
            _contexts[key] = browser.new_context(**options)
            _contexts[key].set_offline(True)
        self.page: Page = _contexts[key].new_page()
        self.page.set_viewport_size({"width": width, "height": height})
        self.problems: list[str] = []
        self.requested: list[str] = []
        self.page.on("console", lambda message: self.problems.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requested.append(request.url))
