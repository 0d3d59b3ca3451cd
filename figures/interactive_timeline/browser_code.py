"""The code that runs in the browser: markup, JavaScript and a style sheet, read from the files beside this one."""

import json
from pathlib import Path

FOLDER = Path(__file__).parent
TIMELINE = ("dom.js", "layout.js", "picture.js", "drawing.js", "boundaries.js", "scrubber.js", "timeline.js")
"""Files of the timeline, which the Annotated DDP shows too. No file imports another; all are joined into one."""


def script() -> str:
    """Return the widget's JavaScript module; its default export has the function `render` of anywidget."""
    return f"const MARKUP = {json.dumps(markup())};\n{timeline_script()}\n{joined(FOLDER / 'widget.js')}"


def timeline_script() -> str:
    """Return the JavaScript of the timeline alone; it exports nothing."""
    return joined(*(FOLDER / name for name in TIMELINE))


def joined(*files: Path) -> str:
    """Return the contents of these files one after the other."""
    return "\n".join(file.read_text() for file in files)


def markup() -> str:
    """Return the HTML inside the element that shows the timeline."""
    return (FOLDER / "timeline.html").read_text()


def style() -> str:
    """Return the style sheet of the timeline."""
    return (FOLDER / "timeline.css").read_text()
