"""The measured sizes of the code base: imports, stays and returns of a route, lines, and commands."""

import inspect
from pathlib import Path

import typer

from docs import house
from reference.trace import Trace
from simulator.workload.compute_times import recorded_model


def test_imports_are_seen_in_functions_too_but_not_for_type_checkers(tmp_path):
    path = tmp_path / "simulator" / "clock.py"
    path.parent.mkdir()
    lines = [
        "import torchless",
        "def run():",
        "    from .engine import events",
        "if TYPE_CHECKING:",
        "    import torch",
    ]
    path.write_text("\n".join(lines))
    assert house.imports(path, tmp_path) == {"torchless", "simulator.engine.events"}


def test_a_return_is_a_stay_in_a_module_that_was_left_before():
    assert house.stays("aabbac") == ["a", "b", "a", "c"]
    assert [house.returns(route) for route in ("", "aaa", "abc", "aabbac", "abab")] == [0, 0, 0, 1, 2]


def test_routes_and_lines_are_of_our_functions_only():
    file, trace = house._short(inspect.getfile(Trace)), Trace.load(house.TRACE)
    assert house.route_of(lambda: recorded_model(trace), trace) == [house._short(inspect.getfile(recorded_model))]
    assert file in house.lines_of(lambda: Trace.load(house.TRACE))
    assert house.route_of(lambda: Path().resolve(), trace) == []
    assert house.route_of(lambda: recorded_model(trace), object()) == []
    assert house.lines_of(lambda: Path().resolve()) == {}


def test_commands_of_groups_count_and_groups_do_not():
    app, group = typer.Typer(), typer.Typer()

    @app.command()
    def one(_path: str, _times: int = 2) -> None: ...

    @group.command()
    def other() -> None: ...

    app.add_typer(group, name="many")
    assert house.commands_of(app) == {"one": ["_path", "_times"], "many other": []}
