"""The measured sizes of the code base: counts on a tiny tree of packages, and the stays and returns of a route."""

import inspect
from pathlib import Path

import pytest
import typer

from docs import house
from reference.trace import Trace
from simulator.workload.compute_times import recorded_model

FILES = {
    "reference/__init__.py": "from .parts import wheel",
    "reference/records.py": "class Record: ...",
    "reference/parts/__init__.py": "",
    "reference/parts/wheel.py": "import torch\nfrom ..records import Record\nclass Wheel: ...",
    "reference/parts/axle.py": "def axle():\n    class Wheel: ...",
    "simulator/__init__.py": "",
    "simulator/__main__.py": "",
    "simulator/clock.py": "import torchless\nfrom .engine import events",
    "simulator/engine/__init__.py": "",
    "simulator/engine/events.py": "def run():\n    from simulator.clock import Clock\n    from torch import nn",
    "simulator/engine/typed.py": "if TYPE_CHECKING:\n    import torch\n    from ..answers import text",
    "simulator/answers/__init__.py": "from ..engine.typed import Typed",
    "simulator/answers/text.py": "class Record: ...",
    "ddplab/__init__.py": "",
    "tests/test_clock.py": "",
    "tests/answers/test_text.py": "",
    "pyproject.toml": """
        [project.scripts]
        ddplab = "ddplab:main"
        [project.entry-points."ddplab.checks"]
        clock = "simulator.clock:CHECKS"
    """,
}


@pytest.fixture
def root(tmp_path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_imports_names_and_tests_are_counted_in_functions_too_but_not_for_type_checkers(root):
    assert house.torch_imports(root) == ["simulator.engine.events"]
    assert house.mutual_imports(root) == []  # a file directly in a package is no part
    assert house.repeated_class_names(root) == ["Record", "Wheel"]
    assert house.hidden_loads(root) == ["ddplab.checks: clock"]
    tested = set(house.plain_modules(root)) - set(house.untested_modules(root))
    assert tested == {"simulator.clock", "simulator.answers.text"}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            {"simulator/engine/events.py": "def run():\n    from simulator.answers.text import Record"},
            "simulator.answers<->simulator.engine",
        ),
        (
            {
                "reference/records.py": "import simulator.answers.text",
                "simulator/clock.py": "from reference.parts import wheel",
            },
            "reference<->simulator",
        ),
    ],
)
def test_parts_and_packages_import_each_other_through_functions_and_different_files(root, files, found):
    for name, text in files.items():
        (root / name).write_text(text)
    assert house.mutual_imports(root) == [found]


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
