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
        "observer",
        "order",
        "buffers",
        "bucket",
        "layout",
        "hooks.grad_bucket",
        "hooks.caller",
        "hooks.allreduce",
        "hooks.compress",
        "hooks.quantization",
        "hooks.state",
        "hooks.post_local_sgd",
        "hooks.low_rank",
        "hooks.low_rank_average",
        "hooks.powersgd_state",
        "hooks.powersgd",
        "diagnosis",
        "checks",
        "communication",
        "usage",
        "outputs",
        "listening",
        "torch_names",
        "reducer",
        "arguments",
        "agreement",
        "log",
        "naive",
        "join",
        "data_parallel",
        "marks",
        "probes",
        "recorder",
        "models",
        "links",
        "environment",
        "launch",
    ],
    "simulator": [
        "spans",
        "fabric.level",
        "fabric.algorithms",
        "fabric.libraries",
        "fabric.topology",
        "fabric.topology_file",
        "fabric.tables",
        "fabric.sharing",
        "fabric.contention",
        "fabric.segments",
        "fabric.growth",
        "fabric.uncertainty",
        "fabric.curves",
        "fabric.nccl_tests",
        "fabric.processor",
        "fabric.description",
        "fabric.merging",
        "fabric.fabric",
        "workload.work",
        "workload.variation",
        "workload.gaps",
        "workload.draws",
        "workload.operations",
        "workload.roofline",
        "workload.synthesis",
        "iteration.script",
        "iteration.comm_hook",
        "iteration.policy",
        "iteration.job",
        "iteration.blueprint",
        "timeline",
        "engines.work_clock",
        "engines.stretches",
        "engines.replay",
        "engines.closed_form",
        "sampling",
        "answers.breakdown",
        "answers.perfetto",
        "checks",
        "prediction",
        "grid",
        "sweep",
        "answers.timeline_plot",
        "answers.heat_map",
        "report",
        "foretell",
        "answers.plots",
        "show",
        "operation_counter",
        "device_rates",
        "calibration.summary",
        "calibration.samples",
        "calibration.stream",
        "calibration.collectives",
        "calibration.copies",
        "calibration.witness",
        "calibration.preparation",
        "calibration.rival",
        "calibration.contention",
        "calibration.hooks",
        "training",
        "calibrate",
        "validate",
        "demo",
        "commands.arguments",
        "commands.choices",
        "commands.pictures",
        "commands.fabric",
        "commands.knobs",
        "commands.manual",
        "commands.measure",
        "commands.predict",
        "commands.sweep",
        "commands.synthesize",
        "commands.validate",
        "cli",
    ],
}
SHELL = {
    "operation_counter",
    "device_rates",
    "training",
    "calibration",
    "calibrate",
    "validate",
    "demo",
    "commands",
    "cli",
}
"""Modules and packages that drive real ranks or models; everything else in simulator is pure."""


def imports(path: Path) -> set[str]:
    """Modules that a file imports, relative ones by their full name."""
    found = set()
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def dotted(path: Path) -> str:
    """A file's module name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("module", ["simulator", "reference.trace", "reference.bucketing"])
def test_torch_is_not_loaded_by(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("package", LAYERS)
def test_arrows_inside_a_package_run_one_way(package):
    modules = LAYERS[package]
    files = {dotted(path): path for path in (ROOT / package).rglob("*.py") if path.stem != "__init__"}
    assert set(files) == {f"{package}.{module}" for module in modules}
    for position, module in enumerate(modules):
        later = {f"{package}.{name}" for name in modules[position:]}
        assert not imports(files[f"{package}.{module}"]) & later


@pytest.mark.parametrize("path", sorted((ROOT / "reference").rglob("*.py")), ids=lambda path: path.stem)
def test_a_module_of_the_reference_is_read_in_one_sitting(path):
    assert len(path.read_text().splitlines()) <= 315


def test_reference_knows_nothing_of_the_simulator():
    for path in (ROOT / "reference").rglob("*.py"):
        assert not any(name.startswith("simulator") for name in imports(path)), path


@pytest.mark.parametrize("path", sorted((ROOT / "simulator").rglob("*.py")), ids=lambda path: path.stem)
def test_the_simulator_imports_of_reference_only_what_is_pure(path):
    if path.relative_to(ROOT / "simulator").parts[0].removesuffix(".py") in SHELL:
        return
    used = {".".join(name.split(".")[:2]) for name in imports(path) if name.startswith("reference.")}
    assert used <= {f"reference.{module}" for module in ("trace", "bucketing", "files", "records")}
    assert not any(name.split(".")[0] == "torch" for name in imports(path))
