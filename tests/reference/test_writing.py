"""Writing files: complete or not at all, whatever stands in their place."""

import os
import resource
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddplab.reference.files.writing import check_distinct, check_writable, write_atomically

BEFORE, AFTER = b"before\n", b"after\n"


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(BEFORE)
    return path


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_file_has_the_mode_that_the_system_gives(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "new" / "file", AFTER)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new" / "file").stat().st_mode) == 0o640
    assert left(tmp_path / "new") == {"file"}


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_a_file_keeps_its_mode_and_owner(file, mode):
    file.chmod(mode)
    owner = (1234, 2345) if os.getuid() == 0 else (os.getuid(), os.getgid())
    os.chown(file, *owner)
    write_atomically(file, AFTER)
    found = file.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (mode, *owner)


def test_a_symbolic_link_is_followed(file, tmp_path):
    link = tmp_path / "folder" / "link"
    link.parent.mkdir()
    link.symlink_to("../file")
    write_atomically(link, AFTER)
    assert link.is_symlink()
    assert file.read_bytes() == AFTER
    assert left(link.parent) == {"link"}


def test_a_symbolic_link_to_nothing_makes_the_file(tmp_path):
    (tmp_path / "link").symlink_to("new/file")
    write_atomically(tmp_path / "link", AFTER)
    assert (tmp_path / "new" / "file").read_bytes() == AFTER


def test_hard_links_stay_one_file(file, tmp_path):
    os.link(file, tmp_path / "other")
    write_atomically(file, AFTER)
    assert (tmp_path / "other").read_bytes() == AFTER


def test_a_read_only_file_is_refused_whoever_asks(file):
    file.chmod(0o444)
    for write in (check_writable, lambda path: write_atomically(path, AFTER)):
        with pytest.raises(OSError, match=r"file: cannot be written: it is read-only$"):
            write(file)
    assert file.read_bytes() == BEFORE


def test_a_pipe_and_a_device_are_written_through(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = subprocess.Popen(["cat", path], stdout=subprocess.PIPE)
    write_atomically(path, AFTER)
    assert reader.communicate(timeout=10)[0] == AFTER
    assert stat.S_ISFIFO(path.stat().st_mode)
    write_atomically("/dev/null", AFTER)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(OSError, match="/dev/full: cannot be written: No space left on device"):
        write_atomically("/dev/full", AFTER)


@pytest.mark.parametrize("name", ["-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_the_standard_output_is_appended_to_where_it_is_a_file(name, tmp_path):
    lines = ["print('first')", f"write_atomically({name!r}, b'second\\n')", "print('last')"]
    script = "\n".join(["from ddplab.reference.files.writing import write_atomically", *lines])
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "first\nsecond\nlast\n"


def test_a_full_disk_leaves_the_old_file_and_nothing_else(file):
    """A limit on the size of files stands for the full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**24, hard))
    try:
        with pytest.raises(OSError, match="file: cannot be written: File too large"):
            write_atomically(file, bytes(2**24 + 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == BEFORE
    assert left(file.parent) == {"file"}


def test_many_threads_write_one_path(file):
    contents = [bytes([number]) * 10_000 for number in range(80)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: write_atomically(file, data), contents))
    assert file.read_bytes() in contents
    assert left(file.parent) == {"file"}


def test_outputs_differ_from_inputs_and_from_each_other_whatever_they_are_called(file, tmp_path):
    (tmp_path / "symbolic").symlink_to("file")
    os.link(file, tmp_path / "hard")
    for name in ("file", "./file", "symbolic", "hard", "../" + tmp_path.name + "/file"):
        with pytest.raises(ValueError, match="expected a name for an output, got that of an input"):
            check_distinct([tmp_path / name], [file])
        with pytest.raises(ValueError, match="got that of another output"):
            check_distinct([file, tmp_path / name], [])
    with pytest.raises(ValueError, match="got that of another output"):
        check_distinct([tmp_path / "new", tmp_path / "." / "new"], [])
    check_distinct([tmp_path / "new", Path("-"), Path("-"), Path("/dev/null"), Path("/dev/null")], [file])
