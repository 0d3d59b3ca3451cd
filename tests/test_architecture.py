"""The layout's promises: imports run one way, and the simulator needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PURE = ("bucketing", "errors", "quantities", "reading", "trace", "writing")
"""Modules of `reference` that need no torch."""
LAYERS = {  # each module imports only from those before it
    "reference": [
        "errors",
        "bucketing",
        "minimal",
        "quantities",
        "writing",
        "reading",
        "trace",
        "parameters",
        "observer",
        "device_clock",
        "emulated_device",
        "checks.launch_order",
        "broadcast",
        "buckets",
        "comm_hooks.interface",
        "comm_hooks.allreduce",
        "comm_hooks.compress",
        "comm_hooks.quantization",
        "comm_hooks.post_local_sgd",
        "comm_hooks.powersgd",
        "checks.backward",
        "checks.construction",
        "unused_parameters",
        "torch_compat",
        "backward_pass",
        "gradient_inbox",
        "reducer",
        "delayed_all_reduce",
        "forward_parameters",
        "mixed_precision",
        "tensor_parallel",
        "join",
        "data_parallel",
        "instrumentation",
        "recorder",
        "models",
        "virtual_links",
        "fork_server",
        "launch",
        "conformance.subject",
        "conformance.programs",
        "conformance.strategies",
        "conformance.local_training",
        "conformance.bodies",
        "conformance.bench",
        "conformance.layouts",
        "conformance.torch_options",
        "conformance.backward_passes",
        "conformance.several_modules",
        "conformance.comm_hooks",
        "conformance.uneven_inputs",
        "conformance.faults",
        "conformance.state_machine",
        "conformance.checks",
        "conformance.report",
        "conformance.kit",
    ],
    "simulator": [
        "palette",
        "fabric.topology",
        "fabric.measured_tables",
        "fabric.algorithms",
        "fabric.nccl_tests",
        "fabric.contention",
        "fabric.processor",
        "fabric.extrapolation",
        "fabric.uncertainty",
        "fabric.cost_curves",
        "fabric.fabric",
        "workload.compute_times",
        "workload.roofline",
        "workload.synthesis",
        "workload.gpu_costs",
        "workload.scale_model",
        "kineto.events",
        "kineto.steps",
        "kineto.gradients",
        "kineto.trace_of_profile",
        "schedule.comm_hooks",
        "schedule.policy",
        "schedule.schedule",
        "schedule.costs",
        "timeline",
        "engines.machine",
        "engines.events",
        "engines.closed_form",
        "distribution",
        "answers.breakdown",
        "answers.perfetto",
        "answers.residual_plot",
        "answers.timeline_plot",
        "answers.verdict",
        "argument_checks",
        "prediction",
        "sweep",
        "answers.heat_map",
        "interactive_timeline.questions",
        "interactive_timeline.browser_code",
        "interactive_timeline.page",
        "interactive_timeline.widget",
        "measure.conditions",
        "measure.report",
        "measure.operation_counter",
        "measure.device_rates",
        "measure.timing",
        "measure.collectives",
        "measure.reducer_costs",
        "measure.slow_downs",
        "measure.hook_costs",
        "emulation.virtual_time",
        "emulation.modelled_network",
        "emulation.wall_network",
        "emulation.virtual_training",
        "emulation.emulate",
        "conformance.timing",
        "conformance.overlap",
        "measure.reference_runs",
        "measure.watch",
        "measure.training_runs",
        "measure.calibrate",
        "measure.validate",
        "measure.host_work",
        "measure.validate_emulated",
        "measure.explain",
        "measure.demo",
        "cli.output",
        "cli.options",
        "cli.inspect",
        "cli.synthesize",
        "cli.import_traces",
        "cli.measure",
        "cli.predict",
        "cli.emulate",
        "cli.explain",
        "cli.conform",
        "cli.main",
    ],
    "ddplab": ["command", "pytest_plugin", "test_conformance"],
}
NEEDS_TORCH = {"conformance", "emulation", "measure", "cli"}
"""Folders of `simulator` that drive real ranks or models; everything else in it is pure."""


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


def test_the_pytest_plugin_loads_none_of_our_packages():
    """Another project may have a package called `reference`, and torch takes seconds."""
    code = (
        "import sys, ddplab.pytest_plugin; sys.exit(not {'reference', 'simulator', 'torch'}.isdisjoint(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("module", ["simulator", "reference.trace", "reference.bucketing"])
def test_neither_torch_nor_matplotlib_is_loaded_by(module):
    code = f"import sys, {module}; sys.exit(not sys.modules.keys().isdisjoint(('torch', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("package", LAYERS)
def test_arrows_inside_a_package_run_one_way(package):
    modules = LAYERS[package]
    files = {dotted(path): path for path in (ROOT / package).rglob("*.py") if path.stem != "__init__"}
    assert set(files) == {f"{package}.{module}" for module in modules}
    for position, module in enumerate(modules):
        later = {f"{package}.{name}" for name in modules[position:]}
        assert not imports(files[f"{package}.{module}"]) & later


def test_reference_knows_nothing_of_the_simulator():
    for path in (ROOT / "reference").rglob("*.py"):
        assert not any(name.startswith("simulator") for name in imports(path)), path


@pytest.mark.parametrize("path", sorted((ROOT / "simulator").rglob("*.py")), ids=lambda path: path.stem)
def test_the_simulator_imports_of_reference_only_what_is_pure(path):
    if path.relative_to(ROOT / "simulator").parts[0].removesuffix(".py") in NEEDS_TORCH:
        return
    used = {".".join(name.split(".")[:2]) for name in imports(path) if name.startswith("reference.")}
    assert used <= {f"reference.{module}" for module in PURE}
    assert not any(name.split(".")[0] == "torch" for name in imports(path))
