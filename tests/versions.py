"""`make versions`: run the tests whose outcome may depend on torch with several versions of torch.

The versions are the oldest that `pyproject.toml` promises, the pinned one and the newest. Each has an
environment of its own in `out/versions`, in which the other packages are those of `constraints.txt`, and its own
Python where this machine has that. One line a version says how many tests passed; a log beside the environment has
the rest. Versions can be named instead: `python -m tests.versions 2.9 2.12.1`.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "out" / "versions"
NEWEST = "newest"
PYTHONS = {"2.11": "3.12", NEWEST: "3.13"}
"""Python for a version of torch; for others 3.11, the oldest that ddplab works with."""
TESTS = (
    "tests/reference",  # bucketing, features, hooks, Join, recorder, likeness to torch's class, torch's own tests
    *(f"tests/ddplab/test_{name}.py" for name in ("emulate", "virtual_training", "modelled_network")),
    *(f"tests/ddplab/test_{name}.py" for name in ("models", "operation_counter")),
    *(f"tests/ddplab/test_{name}.py" for name in ("all_checks", "class_under_test", "conform")),
)
"""Whatever touches torch's distributed package or its DDP class."""
INSTALL_TIMEOUT_S = 3600
TEST_TIMEOUT_S = 3600


def versions() -> list[str]:
    """Versions of torch to try, the oldest first."""
    promised = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    oldest = next(one.removeprefix("torch>=") for one in promised if one.startswith("torch>="))
    pinned = next(pin.removeprefix("torch==") for pin in _pins() if pin.startswith("torch=="))
    return [oldest, pinned, NEWEST]


def environment(version: str) -> Path:
    """Make the environment of a version, or bring that of the newest up to date; returns its Python.

    Raises:
        CalledProcessError: pip failed; `stderr` says why.
    """
    folder = FOLDER / version
    python, ready, constraints = folder / "bin" / "python", folder / ".ready", folder / "constraints.txt"
    if not ready.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _output(_python_named(PYTHONS.get(version, "3.11")), "-m", "venv", folder)
    elif version != NEWEST:
        return python
    constraints.write_text("\n".join(pin for pin in _pins() if not pin.startswith("torch==")))
    wanted = "torch" if version == NEWEST else f"torch=={version}" + (".*" if version.count(".") == 1 else "")
    pip = (python, "-m", "pip", "install", "--quiet", "--upgrade", wanted, "--editable", ".[dev]")
    _output(*pip, environment=os.environ | {"PIP_CONSTRAINT": str(constraints)})
    ready.touch()
    return python


def passes(version: str) -> bool:
    """Run the tests with a version and print a line; whether nothing failed."""
    log = FOLDER / f"{version}.log"
    try:
        python = environment(version)
        names = "import platform, torch; print(f'torch {torch.__version__}, Python {platform.python_version()}')"
        print(_output(python, "-c", names), end=": ", flush=True)
    except subprocess.CalledProcessError as error:
        print(f"torch {version}: cannot be installed: {error.stderr.strip().splitlines()[-1]}", flush=True)
        return False
    command = (python, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-rfE", *TESTS)
    with log.open("w") as file:
        try:
            status = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=TEST_TIMEOUT_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = 1
    lines = log.read_text().strip().splitlines() or ["pytest printed nothing"]
    print(f"{lines[-1].strip('= ')}; see {log.relative_to(ROOT)}", flush=True)
    return status == 0


def _pins() -> list[str]:
    return re.findall(r"^\w.*==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def _python_named(minor: str) -> str:
    """The Python of a minor version if this machine has it, else the one that runs."""
    try:
        _output(f"python{minor}", "-c", "import ensurepip, ssl")
    except (FileNotFoundError, subprocess.CalledProcessError):
        return sys.executable
    return f"python{minor}"


def _output(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = [version for version in sys.argv[1:] or versions() if not passes(version)]
    sys.exit(bool(failed))
