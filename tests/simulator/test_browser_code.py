"""The code that runs in the browser."""

from simulator.interactive_timeline.browser_code import FOLDER, SCRIPTS, script


def test_every_file_beside_the_module_is_used():
    used = {*SCRIPTS, "replay.js", "timeline.css", "page.html"}
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".js", ".css", ".html")} == used
    assert script().count("export default") == 1
