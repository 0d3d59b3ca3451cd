"""`make versions` tries what `pyproject.toml` promises."""

from . import versions


def test_the_oldest_promised_version_comes_first_and_all_tests_exist():
    oldest, pinned, newest = versions.versions()
    assert f'"torch>={oldest}"' in (versions.ROOT / "pyproject.toml").read_text()
    assert f"torch=={pinned}" in (versions.ROOT / "constraints.txt").read_text().splitlines()
    assert newest == versions.NEWEST
    assert f"torch ({oldest} to " in (versions.ROOT / "README.md").read_text()
    assert [test for test in versions.TESTS if not (versions.ROOT / test).exists()] == []
