"""Getting ddplab: in empty environments, a wheel and a folder install, and what each extra is for works.

`make test-install` runs these tests. The tiny project is one of a user's, with the workflow and the hook of
docs/conformance.md, whose steps run here in a clone of it.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "tiny_project"
GUIDE = (ROOT / "docs" / "conformance.md").read_text()
WORKFLOW = TINY / ".github" / "workflows" / "conformance.yml"
HOOKS = TINY / ".pre-commit-config.yaml"
TIMEOUT_S = 900
FOR_WHAT = {
    "": "ddplab synthesize --model mlp --out t.json.gz && python -c 'import ddplab; ddplab.DistributedDataParallel'",
    "conform": "ddplab conform torch --only 'one weight'",
    "predict": "ddplab synthesize --model mlp --out t.json.gz"
    " && ddplab predict t.json.gz --fabric aws-p4d --world-size 8 --caps 25 --timeline t.png",
    "tutorials": "python -c 'import anywidget, ipywidgets, jupyterlab'",
    "site": "sphinx-build --version && python -c 'import furo, myst_nb' && linkchecker --version",
    "dev": "ruff --version && mypy --version && pytest --version"
    " && python -c 'import expecttest, playwright, pytest_timeout, xdist'",
}
"""By extra, commands that need it."""


def run(command: str, folder: Path, environment: Path) -> None:
    """Run a shell command as if the environment were activated."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
    }
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def empty_environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=TIMEOUT_S)
    return folder


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True, timeout=TIMEOUT_S)
    (made,) = folder.glob("ddplab-*.whl")
    return made


def test_the_guide_shows_the_workflow_the_hook_and_the_expectations_of_the_tiny_project():
    for file in (WORKFLOW, HOOKS, TINY / "conform.yaml"):
        assert f"```\n{file.read_text()}```" in GUIDE, file
    assert "OWNER" not in GUIDE, "nothing has to be filled in"


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_the_hook_passes_for_the_tiny_project_and_fails_for_a_fault(tmp_path):
    """As pre-commit runs it: from the project's folder, in the environment of the caller."""
    tiny = shutil.copytree(TINY, tmp_path / "tiny")
    (hook,) = yaml.safe_load(HOOKS.read_text())["repos"][0]["hooks"]
    command = shlex.split(hook["entry"])
    assert command[0] == "ddplab"
    command = [sys.executable, "-c", "from ddplab.command import main; main()", *command[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def result() -> str:
        done = subprocess.run(command, cwd=tiny, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        return f"{done.returncode} {done.stdout}{done.stderr}"

    assert result().startswith("0 ")
    code = tiny / "my_package" / "ddp.py"
    code.write_text(code.read_text().replace("            gradient.div_(dist.get_world_size())\n", ""))
    assert "one weight: " in (failed := result())
    assert failed.startswith("1 ")


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("extra", FOR_WHAT)
def test_a_wheel_installs_and_each_extra_does_its_work(wheel, extra, tmp_path):
    environment = empty_environment(tmp_path / "env")
    run(f"pip install --quiet '{wheel}{extra and f'[{extra}]'}'", tmp_path, environment)
    run(FOR_WHAT[extra], tmp_path, environment)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("what", ["./clones/ddplab", "'ddplab[conform] @ file://{folder}/clones/ddplab'"])
def test_a_clone_installs(what, tmp_path):
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clones" / "ddplab"], check=True, timeout=TIMEOUT_S)
    environment = empty_environment(tmp_path / "env")
    run(f"pip install --quiet {what.format(folder=tmp_path)}", tmp_path, environment)
    run(FOR_WHAT["conform" if "conform" in what else ""], tmp_path, environment)


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S)
def test_the_workflow_runs_step_by_step_in_the_tiny_project(tmp_path):
    """With a clone of ddplab as submodule."""
    tiny = shutil.copytree(TINY, tmp_path / "tiny")
    subprocess.run(["git", "init", "--quiet", tiny], check=True, timeout=TIMEOUT_S)
    clone = "git -c protocol.file.allow=always submodule --quiet add"
    environment = empty_environment(tmp_path / "env")
    run(f"{clone} {ROOT} third_party/ddplab", tiny, environment)
    steps = [
        step["run"] for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["conform"]["steps"] if "run" in step
    ]
    assert len(steps) == 3
    for step in steps:
        run(step, tiny, environment)
    assert "<testsuite" in (tiny / "conform.xml").read_text()
