"""The command as a user runs it: real processes, signals, exit codes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddplab.reference.trace import Trace

from .command_process import ddplab

ROOT = Path(__file__).parents[2]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]


def started(*words: object, folder: Path) -> subprocess.Popen[str]:
    """Start the command with temporary files in a folder."""
    return subprocess.Popen(
        [Path(sys.executable).parent / "ddplab", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env=os.environ | {"TMPDIR": str(folder)},
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in SIGNALS],  # the background ignores SIGINT
    )  # fmt: skip


def listening(session: int) -> set[str]:
    """Addresses, as in /proc/net/tcp, on which the processes of a session listen."""
    sockets = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            if int((process / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                sockets |= {os.readlink(one) for one in (process / "fd").iterdir()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.skipif(sys.platform != "linux", reason="reads in /proc who listens, which only Linux has")
def test_ranks_listen_on_the_loopback_interface_alone(tmp_path):
    """Those of a pool that was started, and those that take the place of lost ones."""
    seen = set()
    with started("conform", "ddplab", "--only", "a lost rank", folder=tmp_path) as running:
        while running.poll() is None:
            seen |= listening(running.pid)
            time.sleep(0.1)  # /proc has no event; each rank lives for longer than this
        errors = running.communicate()[1]
    assert running.returncode == 0, errors
    assert seen == {"0100007F"}  # 127.0.0.1


def assert_ended_in_order(returncode: int, errors: str, number: signal.Signals, folder: Path) -> None:
    assert returncode == 128 + number
    assert errors.splitlines()[-1].startswith(f"ddplab: ended by {number.name}")
    assert "Traceback" not in errors
    left = [one.name for one in folder.iterdir() if not one.name.startswith("torchinductor")]  # a cache of torch's
    assert left == []


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)],
    ids=["Ctrl-C, to all", "SIGTERM, to the command"],
)
def test_a_signal_ends_the_command_and_its_ranks_and_leaves_nothing(number, send, tmp_path):
    process = started("record", "--model", "tests.models_for_cli:telling", "--iterations", "100000", folder=tmp_path)
    try:
        assert process.stdout.readline() == "computing\n"
        send(process.pid, number)
        _, errors = process.communicate(timeout=60)  # as long as a rank lives, it holds these pipes
    finally:
        process.kill()
    assert_ended_in_order(process.returncode, errors, number, tmp_path)


@pytest.mark.parametrize(("number", "delay_s"), [(signal.SIGINT, 0.0), (signal.SIGHUP, 0.6)])
def test_a_signal_while_the_command_starts_is_one_line(number, delay_s, tmp_path):
    """Ctrl-C, or a terminal that is closed."""
    process = started("predict", "absent.json", folder=tmp_path)
    while not _handles_sigterm(process.pid):
        assert process.poll() is None
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(delay_s)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    if process.returncode == 1:  # it was faster
        assert errors.startswith("ddplab: absent.json")
    else:
        assert_ended_in_order(process.returncode, errors, number, tmp_path)


IN_A_DESTRUCTOR = """
import os, signal, time
from ddplab import command
from ddplab.cli import main

class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

def run():
    Interrupted()
    time.sleep(60)  # a command at work; the signal must end it long before

main.main = run
command.main()
"""


def test_a_signal_in_a_destructor_is_not_lost():
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_DESTRUCTOR], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 128 + signal.SIGTERM
    assert ran.stderr == "ddplab: ended by SIGTERM; all ranks have ended, and no file is incomplete\n"


def _handles_sigterm(pid: int) -> bool:
    mask = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_files_of_the_user_replace_neither_torch_nor_this_project(tmp_path):
    for name in ("torch.py", "reference/__init__.py", "simulator/__init__.py", "reference/launch.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('that of the user')")
    (tmp_path / "mine.py").write_text("from sibling import tiny")
    (tmp_path / "sibling.py").write_text((ROOT / "tests" / "models_for_cli.py").read_text())
    words = ("--model", "mine:tiny", "--world-size", "1", "--iterations", "2", "--out", "t.json")
    done = ddplab("record", *words, cwd=tmp_path)
    assert (done.returncode, Trace.load(tmp_path / "t.json").workload.model) == (0, "mine:tiny")


def test_a_rank_of_virtual_time_that_never_returns_does_not_change_the_exit_status():
    """Such as one of a class that loops forever: ending its thread inside torch would abort the process."""
    program = (
        "import atexit, sys, threading, types\n"
        "def spin():\n"
        "    while True: pass\n"
        "atexit.register(print, 'Python shuts down')\n"
        "cli = types.ModuleType('ddplab.cli.main')\n"
        "def conform():\n"
        "    threading.Thread(target=spin, name='rank 1', daemon=True).start()\n"
        "    print('verdict')\n"
        "    sys.exit(1)\n"
        "cli.main = conform\n"
        "sys.modules['ddplab.cli.main'] = cli\n"
        "import ddplab.command\n"
        "ddplab.command.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "verdict\n")
