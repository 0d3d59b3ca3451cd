"""The code that runs in the browser: one JavaScript module and one style sheet, read from the files beside it."""

from pathlib import Path

FOLDER = Path(__file__).parent
SCRIPTS = ("layout.js", "asking.js", "picture.js", "elements.js", "drawing.js", "timeline.js")
"""Files of the widget's module, in order. None imports another, so that they can be put together into one module."""


def script() -> str:
    """Return the widget's JavaScript module; its default export has the function `render` of anywidget."""
    return "\n".join((FOLDER / name).read_text() for name in SCRIPTS)


def style() -> str:
    """Return the widget's style sheet."""
    return (FOLDER / "timeline.css").read_text()
