"""`make versions` tries what `pyproject.toml` promises, and a failure is one line that does not hide the rest."""

import subprocess

from . import versions


def test_the_oldest_promised_version_comes_first_and_all_tests_exist():
    oldest, pinned, newest = versions.versions()
    assert f'"torch>={oldest}"' in (versions.ROOT / "pyproject.toml").read_text()
    assert f"torch=={pinned}" in (versions.ROOT / "constraints.txt").read_text().splitlines()
    assert newest == versions.NEWEST
    assert f"torch {oldest} " in (versions.ROOT / "README.md").read_text()
    assert [test for test in versions.TESTS if not (versions.ROOT / test).exists()] == []


def test_a_version_that_cannot_be_installed_is_one_line(monkeypatch, capsys):
    def refuse(version):
        raise subprocess.CalledProcessError(1, "pip", stderr="looking\nERROR: No matching distribution\n")

    monkeypatch.setattr(versions, "environment", refuse)
    assert not versions.passes("9.9")
    assert capsys.readouterr().out == "torch 9.9: cannot be installed: ERROR: No matching distribution\n"
