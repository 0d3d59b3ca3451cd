"""The fork server: new processes have the present surroundings of their parent."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, Popen, run
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.launch import RankPool
from ddplab.reference.ranks import fork_server

from ..explore import examples
from . import launch_bodies as bodies


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), min_size=2, max_size=3))
@examples(3)
def test_ranks_have_the_present_environment_folder_and_output_of_their_launcher(capfd, values):
    """Fails if they have those of the moment at which the server was started from which they are forked."""
    with capfd.disabled():
        fork_server.start_server()  # its outputs are others than those below
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for value in values:
            with mock.patch.dict(os.environ, {"DDPLAB_TEST": value}), RankPool(2, timeout_s=60) as pool:
                found = pool.run(bodies.surroundings, "DDPLAB_TEST")
            assert [(variable, where) for variable, where, _ in found] == [(value, folder)] * 2
            assert len({number for _, _, number in found}) == 2  # NumPy's generator
            printed, warned = (sorted(text.splitlines()) for text in capfd.readouterr())
            assert printed == ["rank 0 prints", "rank 1 prints"]
            assert warned == ["rank 0 warns", "rank 1 warns"]
        with contextlib.redirect_stdout(sys.stderr), RankPool(2, timeout_s=60) as pool:
            pool.run(bodies.surroundings, "DDPLAB_TEST")
        printed, warned = capfd.readouterr()
        assert (printed, len(warned.splitlines())) == ("", 4)  # where a file goes to the standard output


ASKS_NO_GPU = """
import sys, torch, torch.cuda
def refuse(*_):
    raise SystemExit("asked for a GPU")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = refuse
for name in sys.argv[1:]:
    __import__(name)
"""


def test_the_server_leaves_the_gpus_to_the_ranks():
    """Once a process has asked CUDA for its devices, its forks cannot use them."""
    done = run([sys.executable, "-c", ASKS_NO_GPU, *fork_server.IMPORTED], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    with RankPool(1, timeout_s=60) as pool:
        assert pool.run(bodies.surroundings, "PYTORCH_NVML_BASED_CUDA_CHECK")[0][0] is None


USES_RANKS = """
import time
from ddplab.reference.launch import RankPool
from tests.reference import launch_bodies
if __name__ == "__main__":
    with RankPool(2) as pool:
        pool.run(launch_bodies.identify)
        print("ready", flush=True)
        time.sleep(600)
"""


def test_the_folders_of_a_killed_process_are_removed_at_the_next_start_and_those_of_others_stay(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "ranks.py").write_text(USES_RANKS)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, tmp_path / "ranks.py"]
    with contextlib.ExitStack() as stack:
        living, killed = (stack.enter_context(Popen(command, stdout=PIPE, env=environment)) for _ in range(2))
        stack.callback(living.kill)
        stack.callback(killed.kill)
        assert [process.stdout.readline() for process in (living, killed)] == [b"ready\n"] * 2
        assert len([*tmp_path.glob("*/ddplab.lock")]) == 4, "the store of each, and the socket of each server"
        killed.kill()
        killed.wait()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        (tmp_path / "new").mkdir()
        mark = fork_server.claim(str(tmp_path / "new"))
        assert len([*tmp_path.glob("*/ddplab.lock")]) == 3
        os.close(mark)


def test_a_folder_that_was_there_is_not_claimed(tmp_path):
    """A process of multiprocessing has the folder of its parent, which lives on when it ends."""
    code = f"""
import tempfile
tempfile.tempdir = {str(tmp_path)!r}
from multiprocessing import util
folder = util.get_temp_dir()
from ddplab.reference.ranks.fork_server import start_server
start_server()
"""
    run([sys.executable, "-c", code], check=True, timeout=60)
    assert not [*tmp_path.glob("*/ddplab.lock")]
