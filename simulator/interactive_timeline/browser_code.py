"""The code that runs in the browser: JavaScript and a style sheet, read from the files beside this one."""

from pathlib import Path

FOLDER = Path(__file__).parent
PICTURE = ("dom.js", "layout.js", "picture.js", "drawing.js", "boundaries.js", "scrubber.js")
"""Files of the picture of one iteration, which a page can use without the widget."""
WIDGET = ("asking.js", "elements.js", "results.js", "timeline.js")
"""Files of the widget, which asks a kernel. No file imports another, so that all can be joined into one module."""


def script() -> str:
    """Return the widget's JavaScript module; its default export has the function `render` of anywidget."""
    return joined(*(FOLDER / name for name in PICTURE + WIDGET))


def picture_script() -> str:
    """Return the JavaScript of the picture alone; it exports nothing."""
    return joined(*(FOLDER / name for name in PICTURE))


def joined(*files: Path) -> str:
    """Return the contents of these files one after the other."""
    return "\n".join(file.read_text() for file in files)


def style() -> str:
    """Return the style sheet of picture and widget."""
    return (FOLDER / "timeline.css").read_text()
