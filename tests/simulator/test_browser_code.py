"""The code that runs in the browser."""

from simulator.interactive_timeline.browser_code import FOLDER, PICTURE, WIDGET, picture_script, script


def test_every_file_beside_the_module_is_used():
    used = {*PICTURE, *WIDGET, "timeline.css"}
    assert {path.name for path in FOLDER.iterdir() if path.suffix in (".js", ".css")} == used
    assert script().count("export default") == 1
    assert "export" not in picture_script()
