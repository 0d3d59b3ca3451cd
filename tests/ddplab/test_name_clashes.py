"""A package of the user's with the name of one of ours: whichever is hidden, one line says so."""

import os
import subprocess
import sys

import pytest

from ddplab.name_clashes import HOME, check_own_packages, hidden_by_ours


def python(folder, *arguments):
    """Run Python in a folder, with ours installed behind it, as in a user's environment."""
    program = [sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(HOME), "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    return subprocess.run(
        program, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize("file", ["reference/__init__.py", "reference/model.py", "reference.py", "simulator/a.py"])
@pytest.mark.parametrize("where", ["sys.path", "the working directory"])
def test_a_package_that_ours_hides_is_named(file, tmp_path, monkeypatch, where):
    """Also a folder without `__init__.py`, and a module."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("")
    if where == "sys.path":
        monkeypatch.setattr(sys, "path", [str(HOME), str(tmp_path)])
    else:
        monkeypatch.chdir(tmp_path)
    (line,) = hidden_by_ours()
    found = tmp_path / file.partition("/")[0]
    expected = f"expected no other package or module named {found.stem}, got {found}, which ddplab's package hides"
    assert line.startswith(expected)


def test_other_folders_and_copies_of_ours_hide_nothing(tmp_path, monkeypatch):
    for made in ("data/reference/table.csv", "clone/reference/trace.py", "clone/ddplab/command.py"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).write_text("")
    monkeypatch.setattr(sys, "path", [str(HOME), str(tmp_path / "data"), str(tmp_path / "clone")])
    assert hidden_by_ours() == []
    check_own_packages()


@pytest.mark.parametrize("arguments", [("-m", "ddplab", "show", "settings"), ("-c", "import ddplab; ddplab.predict")])
def test_a_package_that_hides_ours_ends_command_and_tests_with_one_line(tmp_path, arguments):
    """`python -m` and `python -c` put the working directory first."""
    (tmp_path / "reference.py").write_text("")
    done = python(tmp_path, *arguments)
    assert done.returncode != 0
    line = f"expected ddplab's package reference in {HOME}, but Python imports {tmp_path / 'reference.py'}"
    assert [line in one for one in done.stderr.strip().splitlines()][-1], done.stderr
    assert "Traceback" not in done.stderr or "-c" in arguments


def test_the_command_names_the_package_that_it_hides_and_goes_on(tmp_path):
    (tmp_path / "reference.py").write_text("")
    program = "import sys; sys.path.pop(0); sys.argv = ['ddplab', 'show']; from ddplab.command import main; main()"
    done = python(tmp_path, "-c", program)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"ddplab: warning: expected no other package or module named reference, got {tmp_path}")
