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
        [project.entry-points.pytest11]
        ddplab = "ddplab"
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


def test_torch_counts_in_functions_but_not_for_type_checkers(root):
    assert house.torch_imports(root) == ["simulator.engine.events"]


def test_parts_import_each_other_also_through_functions(root):
    assert house.mutual_imports(root) == []  # a file directly in a package is no part
    (root / "simulator/engine/events.py").write_text("def run():\n    from simulator.answers.text import Record")
    assert house.mutual_imports(root) == ["simulator.answers<->simulator.engine"]


def test_packages_import_each_other_through_different_sub_packages(root):
    (root / "reference/records.py").write_text("import simulator.answers.text")
    (root / "simulator/clock.py").write_text("from reference.parts import wheel")
    assert house.mutual_imports(root) == ["reference<->simulator"]


def test_class_names_are_repeated_across_packages_and_in_functions(root):
    assert house.repeated_class_names(root) == ["Record", "Wheel"]


def test_a_module_is_tested_by_a_file_of_its_name_in_any_folder(root):
    tested = set(house.plain_modules(root)) - set(house.untested_modules(root))
    assert tested == {"simulator.clock", "simulator.answers.text"}
    assert not [name for name in house.plain_modules(root) if name.endswith(("__main__", "engine"))]


def test_commands_and_plugins_of_pytest_are_not_hidden(root):
    assert house.hidden_loads(root) == ["ddplab.checks: clock"]


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


def test_a_row_is_marked_if_its_target_is_missed():
    row = house.Row("files", 5, 5)
    assert str(row).endswith("<= 5")
    assert str(row._replace(value=6)).endswith("<= 5 *")
    assert str(row._replace(value=4, sign=">=")).endswith(">= 5 *")
    assert str(row._replace(target=None)).endswith("5")


def test_commands_of_groups_count_and_groups_do_not():
    app, group = typer.Typer(), typer.Typer()

    @app.command()
    def one(_path: str, _times: int = 2) -> None: ...

    @group.command()
    def other() -> None: ...

    app.add_typer(group, name="many")
    assert house.commands_of(app) == {"one": ["_path", "_times"], "many other": []}
