"""The layout's promises: imports run one way, and the simulator needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {  # each module imports only from those before it
    "reference": [
        "errors",
        "files",
        "records",
        "bucketing",
        "trace",
        "parameters",
        "buffers",
        "bucket",
        "reducer",
        "data_parallel",
        "marks",
        "probes",
        "recorder",
        "models",
        "launch",
    ],
    "simulator": [
        "spans",
        "nccl_tests",
        "fabric",
        "workload",
        "replay",
        "closed_form",
        "perfetto",
        "prediction",
        "quiet",
        "report",
        "plots",
        "show",
        "training",
        "calibrate",
        "validate",
        "demo",
        "cli",
    ],
}
SHELL = {
    "training",
    "calibrate",
    "validate",
    "demo",
    "cli",
}  # these drive real ranks; everything else in simulator is pure


def imports(path: Path) -> set[str]:
    """Modules that a file imports, relative ones by their full name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = [path.parent.name] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("module", ["simulator", "reference.trace", "reference.bucketing"])
def test_torch_is_not_loaded_by(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("package", LAYERS)
def test_arrows_inside_a_package_run_one_way(package):
    modules = LAYERS[package]
    assert {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"} == set(modules)
    for position, module in enumerate(modules):
        allowed = {f"{package}.{earlier}" for earlier in modules[:position]}
        own = {".".join(name.split(".")[:2]) for name in imports(ROOT / package / f"{module}.py") if "." in name}
        assert {name for name in own if name.startswith(f"{package}.")} <= allowed


def test_reference_knows_nothing_of_the_simulator():
    for path in (ROOT / "reference").rglob("*.py"):
        assert not any(name.startswith("simulator") for name in imports(path)), path


@pytest.mark.parametrize("path", sorted((ROOT / "simulator").glob("*.py")), ids=lambda path: path.stem)
def test_the_simulator_imports_of_reference_only_what_is_pure(path):
    if path.stem in SHELL:
        return
    used = {".".join(name.split(".")[:2]) for name in imports(path) if name.startswith("reference.")}
    assert used <= {f"reference.{module}" for module in ("trace", "bucketing", "files", "records")}
    assert not any(name.split(".")[0] == "torch" for name in imports(path))
