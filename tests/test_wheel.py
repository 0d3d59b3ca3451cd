"""The built wheel, as a stranger installs it: beside modules of their own, typed, and tested.

`make test-wheel` runs these tests. The environment takes torch and the rest from that of the tests, and has the wheel
alone in front of it; `test_getting_it` installs into empty environments.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

import ddplab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parent.parent
TRAIN = """\
import sys
import torch
import ddplab

def body(rank, world_size):
    model = ddplab.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.full((1, 2), float(rank))).sum().backward()
    return model.module.weight.grad.tolist()

if __name__ == "__main__":
    import reference
    from simulator import baseline
    print(reference.__file__, baseline, ddplab.run_ranks(body, 2))
"""
TYPED = """\
from ddplab import DistributedDataParallel, Fabric, Prediction, Trace, predict
from torch import nn

prediction: Prediction = predict(Trace.load("t.json.gz"), Fabric.load("f.json"), world_size=8, bucket_cap_mb=25)
milliseconds: float = prediction.iteration_ns / 1e6
wrapped = DistributedDataParallel(nn.Linear(2, 1))
reveal_type(prediction.interval_ns)
predict(Trace.load("t.json.gz"), Fabric.load("f.json"), world_size=8, bucket_cap_mib=25)
predict(Trace.load("t.json.gz"), Fabric.load("f.json"), world_size=8, order=3)
milliseconds.iteration_ns
"""
"""A user's script of ten lines, of which the last three are wrong."""
RUN_AGAINST_THE_WHEEL = (
    *(f"tests/reference/test_{name}.py" for name in ("bucketing", "minimal", "trace")),
    *(f"tests/simulator/test_{name}.py" for name in ("sweep", "nccl_tests", "catalogue", "timeline_plot")),
    "tests/ddplab/test_virtual_time.py",
)


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel in `dist`, made from the source distribution there."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    subprocess.run(["make", "wheel"], cwd=ROOT, check=True, timeout=200)
    (made,) = (ROOT / "dist").glob("ddplab-*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Python of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=100)
    made = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", made, "install", "--quiet", "--no-deps", wheel]
    subprocess.run(pip, check=True, timeout=200)
    packages = subprocess.check_output(
        [made, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    )
    Path(packages.strip(), "others.pth").write_text(sysconfig.get_path("purelib"))
    return made


def run(python: Path, *words: object, cwd: Path, expected: int = 0) -> str:
    """Run a command of the environment; returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_wheel_has_one_importable_name_and_its_data(wheel):
    names = ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"ddplab", f"ddplab-{ddplab.__version__}.dist-info"}
    files = subprocess.check_output(
        ["git", "ls-files", "ddplab", "reference", "simulator"], cwd=ROOT, text=True
    ).split()
    links = {"ddplab/reference", "ddplab/simulator"}
    wanted = {name if name.startswith("ddplab/") else f"ddplab/{name}" for name in files if name not in links}
    assert wanted == {name for name in names if name.startswith("ddplab/")}
    assert "ddplab/py.typed" in wanted


def test_the_source_distribution_has_the_linked_folders_once_in_the_place_of_the_links(wheel):
    with tarfile.open(next((ROOT / "dist").glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"ddplab/reference/minimal.py", "ddplab/simulator/prediction.py", "tests/test_wheel.py"} <= names
    assert not [name for name in names if name.startswith(("reference/", "simulator/"))]


@pytest.mark.parametrize("own", ["reference/__init__.py", "reference.py"])
def test_a_users_modules_named_reference_and_simulator_are_imported_as_theirs(own, python, tmp_path):
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("")
    (tmp_path / "simulator.py").write_text("baseline = 'theirs'")
    (tmp_path / "train.py").write_text(TRAIN)
    averages = [[[0.5, 0.5]]] * 2
    assert run(python, "python", "train.py", cwd=tmp_path) == f"{tmp_path / own} theirs {averages}\n"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    script = "import ddplab; ddplab.predict; import reference; print(reference.__file__)"
    assert "No module named 'reference'" in run(python, "python", "-c", script, cwd=elsewhere, expected=1)
    for command in (("ddplab", "show", "settings"), ("python", "-m", "ddplab", "show", "settings")):
        assert "bucket_cap_mb" in run(python, *command, cwd=tmp_path)


def test_the_version_is_that_of_the_wheel(python, tmp_path):
    assert run(python, "ddplab", "--version", cwd=tmp_path) == f"ddplab {ddplab.__version__}\n"
    program = "from importlib.metadata import version; print(version('ddplab'))"
    assert run(python, "python", "-c", program, cwd=tmp_path) == f"{ddplab.__version__}\n"


def test_mypy_sees_the_types_of_a_users_script(python, tmp_path):
    (tmp_path / "script.py").write_text(TYPED)
    mypy = (sys.executable, "-m", "mypy", "--strict", "--python-executable", python, "script.py")
    printed = run(python, *mypy, cwd=tmp_path, expected=1)
    found = re.findall(r"script\.py:(\d+): (?:error|note): (.*)", printed)
    assert found[0] == ("7", 'Revealed type is "tuple[int, int]"'), printed
    assert {int(line) for line, _ in found} == {7, 8, 9, 10}, printed


def test_the_wheel_passes_tests(python, tmp_path):
    """In a tree without the packages."""
    for name in ("tests", "docs", "benchmarks", "validation"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    where = run(python, "python", "-c", "import ddplab; print(ddplab.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    printed = run(
        python, "python", "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", *RUN_AGAINST_THE_WHEEL, cwd=tmp_path
    )
    assert re.search(r"^\d{3,} passed", printed, re.MULTILINE), printed


def test_the_matrix_of_ci_has_the_pythons_of_the_classifiers():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    step = next(step for step in jobs["pythons"]["steps"] if step.get("id") == "classifiers")["run"]
    command = step.replace('>> "$GITHUB_OUTPUT"', "")
    printed = subprocess.check_output(["bash", "-ec", command], cwd=ROOT, text=True)
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    named = [one.rpartition(" ")[2] for one in classifiers if one.startswith("Programming Language :: Python :: 3.")]
    assert json.loads(printed.partition("=")[2]) == named
    assert len(named) >= 3


def test_a_release_names_the_addresses_of_the_repository_that_made_it(tmp_path):
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    step = next(step for step in jobs["build"]["steps"] if step.get("id") == "addresses")["run"]
    (tmp_path / "ddplab").mkdir()
    # As committed, because the release has already edited its own.
    for name in ("pyproject.toml", "README.md", "LICENSE", "ddplab/__init__.py"):
        (tmp_path / name).write_bytes(subprocess.check_output(["git", "show", f"HEAD:{name}"], cwd=ROOT))
    address, tag = "https://github.example/owner/name", f"v{ddplab.__version__}"
    server, repository = address.split("/owner/")[0], "owner/name"
    variables = {"GITHUB_SERVER_URL": server, "GITHUB_REPOSITORY": repository, "GITHUB_REF_NAME": tag}
    subprocess.run(["bash", "-ec", step], cwd=tmp_path, env=os.environ | variables, check=True)
    metadata = json.loads(
        subprocess.check_output([sys.executable, "-m", "hatchling", "metadata"], cwd=tmp_path, text=True)
    )
    assert metadata["urls"] == {
        "Repository": address,
        "Documentation": f"{address}/deployments/github-pages",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }
    assert metadata["scripts"] == {"ddplab": "ddplab.command:main"}
