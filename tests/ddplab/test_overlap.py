"""The check of overlap: schedules on an emulated network, and those of a baseline."""

import subprocess
from pathlib import Path

import pytest

from ddplab.conformance import overlap
from ddplab.conformance.class_under_test import Subject

from .conformance_bench import NAIVE, OURS, TORCHS, faulty


@pytest.mark.parametrize("name", [NAIVE, faulty("LaunchesAtTheEnd"), faulty("Flat")])
def test_a_class_that_launches_nothing_before_backward_ends_does_not_overlap(name):
    schedule = overlap.schedule_of(Subject(name), overlap.MODELS[0], overlap.NETWORKS[1])
    assert "after the last gradient was ready" in overlap.late_launches(schedule)


def test_a_class_that_overlaps_does(tmp_path):
    schedules = [
        overlap.schedule_of(Subject(name), overlap.MODELS[0], overlap.NETWORKS[1]) for name in (OURS, TORCHS)
    ]
    assert list(map(overlap.late_launches, schedules)) == ["", ""]
    assert schedules[0] == schedules[1]  # copies and launches cost nothing here
    overlap.save(tmp_path / "s.json", OURS, schedules)
    assert overlap.load(tmp_path / "s.json") == tuple(schedules)


# Schedules


@pytest.fixture(scope="module")
def schedule() -> overlap.EmulatedSchedule:
    return overlap.schedule_of(Subject(OURS), overlap.MODELS[2], overlap.NETWORKS[1])


def test_a_slower_schedule_is_named_by_its_first_late_bucket(schedule):
    def later(number: int, ns: int) -> overlap.EmulatedSchedule:
        launches = list(schedule.launches)
        moved = {"launched_ns": launches[number].launched_ns + ns}
        launches[number] = launches[number].model_copy(update=moved)
        slower = schedule.iteration_ns + schedule.iteration_ns // 50
        return schedule.model_copy(update={"launches": tuple(launches), "iteration_ns": slower})

    def says(now: overlap.EmulatedSchedule) -> str:
        (sentence,) = overlap.compare([now], [schedule])
        return sentence

    assert overlap.compare([schedule], [schedule]) == []
    assert overlap.compare([schedule], []) == []
    gap = schedule.launches[2].launched_ns - schedule.launches[1].launched_ns
    assert says(later(1, gap)).startswith("bucket 1 waits for bucket 2: +2.0% on 64 ranks at 100 Gbit/s")
    assert says(later(1, 10**6)).startswith("bucket 1 is launched 1 ms later")
    assert says(later(1, 10**9)).startswith("bucket 1 waits for the end of the backward pass")
    assert "2 collectives beside" in says(later(1, 5).model_copy(update={"other_collectives": 2}))
    assert "1 buckets instead of" in says(later(1, 5).model_copy(update={"launches": schedule.launches[:1]}))
    by_a_nanosecond = schedule.model_copy(update={"iteration_ns": schedule.iteration_ns + 1})
    assert says(by_a_nanosecond).startswith("the same launches, but the iteration ends later: +1 ns")


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Makes a repository with a package `packaged`; the working directory is the repository."""

    def make(layout: str, ddp: str) -> Path:
        package = tmp_path / layout / "packaged"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "ddp.py").write_text(ddp)
        git(tmp_path, "init", "--initial-branch=main")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--message=first")
        monkeypatch.syspath_prepend(tmp_path / layout)
        monkeypatch.chdir(tmp_path)
        return package / "ddp.py"

    return make


def subclass_of(name: str) -> str:
    path, _, attribute = name.partition(":")
    return f"from {path} import {attribute}\n\n\nclass DDP({attribute}):\n    pass\n"


def test_a_baseline_is_the_schedule_of_the_class_at_the_revision(project):
    """The working tree overlaps, the revision does not."""
    project("src", subclass_of(NAIVE)).write_text(subclass_of(OURS))
    before = overlap.load_baseline("main", "packaged.ddp:DDP")
    assert len(before) == len(overlap.MODELS) * len(overlap.NETWORKS)
    assert all(map(overlap.late_launches, before))


@pytest.mark.parametrize("layout", [".", "src", "lib/python"])
@pytest.mark.parametrize("inside", [".", "below"])
def test_the_revision_is_imported_wherever_its_package_is(project, layout, inside, monkeypatch):
    project(f"{inside}/{layout}", 'raise ImportError("that of the revision")\n').write_text(subclass_of(OURS))
    monkeypatch.chdir(inside)
    with pytest.raises(ValueError, match=r"has no schedule at main: ImportError: that of the revision$"):
        overlap.load_baseline("main", "packaged.ddp:DDP")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("packaged.ddp:NaiveDataParallel", "expected to .* revision, got reference.minimal from /.*/minimal.py$"),
        ("elsewhere:DDP", "expected to import it from the revision, got elsewhere from /.*/new/elsewhere.py$"),
        ("packaged.later:DDP", "ModuleNotFoundError: No module named 'packaged.later'$"),
    ],
)
def test_a_class_that_is_not_from_the_revision_is_refused(project, name, message, monkeypatch):
    """It would be compared with itself."""
    path = project("src", subclass_of(NAIVE))
    path.with_name("later.py").write_text(subclass_of(NAIVE))
    Path("new").mkdir()
    monkeypatch.syspath_prepend("new")
    Path("new/elsewhere.py").write_text(subclass_of(NAIVE))
    with pytest.raises(ValueError, match=f"^--baseline: {name} has no schedule at HEAD: {message}"):
        overlap.load_baseline("HEAD", name)


@pytest.mark.parametrize("text", ["--output=victim.txt", "--git-dir", "nothing", "HEAD:src", "src", "", "-"])
def test_a_text_that_is_neither_a_file_nor_a_revision_is_refused(project, text):
    """Git does not take it for an option either."""
    project("src", subclass_of(NAIVE))
    victim = Path("victim.txt")
    victim.write_text("mine")
    with pytest.raises(ValueError, match="--baseline: expected a file or a git revision, got ") as error:
        overlap.load_baseline(text, NAIVE)
    assert "\n" not in str(error.value)
    assert victim.read_text() == "mine"
