"""Start processes in a tenth of a second: fork them from a server that has imported torch, which takes seconds.

On Linux, the server is that of Python's `multiprocessing`. It runs nothing but imports, has no other threads, and
uses no GPU, so its forks are as good as new interpreters. Elsewhere every process is a new interpreter.
"""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

IMPORTED = ("torch", "torch._dynamo", "numpy")
"""Modules that the server imports. None is of this project, so that a process always has the present code."""
AVAILABLE = sys.platform == "linux"
IN_SERVER = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONSAFEPATH": "1"}
"""Environment variables of the server. A module that asks at import whether there is a GPU does not initialize CUDA,
which a fork could not do again (torch's notes on multiprocessing, "poison fork"). A file `torch.py` in the working
directory is not imported."""
OUTPUTS = (1, 2)
"""File descriptors of standard output and standard error."""
MARK = "ddplab.lock"
"""Name of the file that marks each temporary folder of a process of ours."""
_starting = threading.Lock()


def start_server(*further_modules: str) -> None:
    """Start the server of this process, unless there is one, and do not wait for its imports.

    The server also imports `further_modules`. Changes of their code after that have no effect.
    """
    if not AVAILABLE:
        return
    with _starting, ctrl_c_blocked():
        multiprocessing.set_forkserver_preload([*IMPORTED, *further_modules])
        if multiprocessing.current_process()._config.get("tempdir") is None:  # type: ignore[attr-defined]
            claim(util.get_temp_dir())  # where its socket lies; one that is there may be that of a parent
        with mock.patch.dict(os.environ, IN_SERVER):
            forkserver.ensure_running()


def claim(folder: str) -> int:
    """Mark a temporary folder as in use, until the returned descriptor is closed; remove those of killed processes.

    A killed process leaves its folders, but the system ends its locks.
    """
    unnamed = Path(folder, f"{MARK}.new")
    mark = os.open(unnamed, os.O_CREAT | os.O_WRONLY)
    fcntl.flock(mark, fcntl.LOCK_EX)
    unnamed.rename(Path(folder, MARK))  # which other processes see locked
    for other in Path(tempfile.gettempdir()).glob(f"*/{MARK}"):
        with contextlib.suppress(OSError):  # in use, or gone
            if other.lstat().st_uid == os.getuid():
                with other.open() as left:
                    fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(other.parent, ignore_errors=True)
    return mark


def process_context() -> "ForkServerContext | SpawnContext":
    """Return what makes processes, as `process_context().Process(...)`; starts the server if there is none."""
    start_server()
    return multiprocessing.get_context("forkserver") if AVAILABLE else multiprocessing.get_context("spawn")


@contextlib.contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """Processes started in this context ignore Ctrl-C: the launcher ends them, without a traceback from each."""
    resource_tracker.ensure_running()  # otherwise `start` would start the tracker, which unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _outputs() -> dict[int, Connection]:
    """Return copies of the descriptors to which this process writes, in the form in which they can be sent.

    Where `sys.stdout` is the standard error, because a file goes to the standard output, so is the first of them.
    """
    copies = {}
    for number, stream in zip(OUTPUTS, (sys.stdout, sys.stderr), strict=True):
        with contextlib.suppress(OSError):  # closed
            try:
                copies[number] = Connection(os.dup(stream.fileno()), readable=False)
            except (AttributeError, ValueError):  # None, or it has no file
                copies[number] = Connection(os.dup(number), readable=False)
    return copies


@dataclass(frozen=True)
class Surroundings:
    """What a new process inherits from its parent, and a fork of the server would have from the server's start.

    Make one before the start of a process, pass it as an argument, and `enter` it in the process.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment variables. Those that a library reads while it is imported come too late."""
    outputs: Mapping[int, Connection] = field(default_factory=_outputs)
    """Copies of standard output and standard error, by file descriptor."""

    def enter(self) -> None:
        """Make them those of this process, which also gets a seed of its own for NumPy's global generator."""
        os.environ.clear()
        os.environ.update(self.environment)
        for number, copy in self.outputs.items():
            os.dup2(copy.fileno(), number)
        self.close()
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()

    def close(self) -> None:
        """Close the copies."""
        for copy in self.outputs.values():
            copy.close()
