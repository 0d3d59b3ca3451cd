"""The architecture: imports run one way, and what must load quickly needs no torch."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

from docs import house
from docs.house import ROOT

REFERENCE, SIMULATOR = ("ddplab.reference",), ("ddplab.simulator",)
PURE = tuple(f"ddplab.reference.{name}" for name in ("bucketing", "message_sizes", "errors", "files", "trace"))
"""The parts of `reference` that `simulator` uses: none of them needs torch."""


@pytest.fixture(scope="module")
def imports():
    """By module, the full names of the modules, and of the names in them, that it imports anywhere but for types."""
    return {name: house.imports(path, ROOT) for name, path in house.modules(ROOT).items()}


def within(name: str, parts: tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


def test_imports_are_seen_in_functions_too_but_not_for_type_checkers(tmp_path):
    path = tmp_path / "ddplab" / "simulator" / "clock.py"
    path.parent.mkdir(parents=True)
    lines = [
        "import torchless",
        "def run():",
        "    from .engine import events",
        "if TYPE_CHECKING:",
        "    import torch",
    ]
    path.write_text("\n".join(lines))
    assert house.imports(path, tmp_path) == {"torchless", "ddplab.simulator.engine.events"}


def test_no_modules_import_each_other(imports):
    loaded = {module: names | {name.rpartition(".")[0] for name in names} for module, names in imports.items()}
    graph = {
        module: {name for name in names if name in imports and not within(module, (name,))}
        for module, names in loaded.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_reference_imports_neither_of_the_other_packages(imports):
    for module, names in imports.items():
        assert not (
            within(module, REFERENCE)
            and any(within(name, ("ddplab",)) and not within(name, REFERENCE) for name in names)
        )


def test_the_packages_import_each_other_relatively_within_ddplab():
    """The folders at the root have other names when imported from there: everything in them would exist twice."""
    for module, path in house.modules(ROOT).items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not {"ddplab", "reference", "simulator"} & {name.partition(".")[0] for name in names}, module


def test_no_package_imports_the_laboratory(imports):
    assert not [module for module, names in imports.items() if any(within(name, ("validation",)) for name in names)]


def test_the_simulator_imports_no_torch_and_only_what_is_pure(imports):
    for module, names in imports.items():
        if within(module, SIMULATOR):
            assert not any(within(name, ("torch",)) for name in names), module
            others = {name for name in names if within(name, ("ddplab",)) and not within(name, SIMULATOR)}
            assert all(within(name, PURE) for name in others), module


def modules_after(code: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after `code`."""
    run = [sys.executable, "-c", f"import sys; {code}; print(*sys.modules)"]
    return set(subprocess.run(run, timeout=60, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split())


HINTS = "ddplab.cli.learn, ddplab.learn.rungs"


@pytest.mark.parametrize("modules", ["ddplab.simulator, ddplab.reference.trace, ddplab.reference.bucketing", HINTS])
def test_nothing_that_loads_slowly_is_loaded_by(modules):
    slow = {"torch", "matplotlib", "pandas", "scipy", "joblib"}
    assert modules_after(f"import {modules}").isdisjoint(slow)


def test_the_reducer_loads_neither_pydantic_nor_the_trace_nor_torchs_compiler():
    unneeded = {"pydantic", "ddplab.reference.trace", "ddplab.simulator", "torch._dynamo"}
    assert modules_after("import ddplab.reference.data_parallel").isdisjoint(unneeded)


def test_the_door_opens_without_torch():
    """`test_the_page_of_public_names_has_all` goes through it to every name."""
    assert modules_after("import ddplab; dir(ddplab)").isdisjoint({"torch", "ddplab.simulator"})
