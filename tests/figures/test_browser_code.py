"""The code that runs in the browser."""

from figures.interactive_timeline.browser_code import FOLDER, TIMELINE, script, timeline_script


def test_every_file_beside_the_module_is_used():
    used = {*TIMELINE, "widget.js", "timeline.html", "timeline.css"}
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".js", ".css", ".html")} == used
    assert script().count("export default") == 1
    assert "export" not in timeline_script()
