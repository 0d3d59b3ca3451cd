"""The members of a pool, as the pool has them: processes that it has started itself, or those of a launcher."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from unittest import mock

from .fork_server import Surroundings, ctrl_c_blocked, process_context
from .rank_process import LEAVE, LEFT, Membership, join, serve

STACK_TIMEOUT_S, STACK_PAUSE_S = 1.0, 0.1
"""How long to wait for the first and for each further piece of a stack, because a stack has no end mark."""
STACK_LINES = 24
TAIL_LINES, TAIL_COLUMNS, TAIL_BYTES = 40, 200, 2**14
"""How much of the end of a rank's standard error a `RankError` shows, and how much of it is kept."""
TAIL_TIMEOUT_S = 1.0
"""How long to wait for the end of a rank's standard error, which its own child processes may hold open."""
MESSAGE_S = 10
"""How long to wait for each further piece of a message, in seconds."""
LEAVE_S = 10.0
"""How long to wait until a launcher's rank has left a pool. After a failure, what it waits for must fail first."""


class StartedRank:
    """A rank's process on this machine; bodies, results and progress pass through `connection`."""

    def __init__(self, membership: Membership, *, is_fork: bool) -> None:
        context = process_context() if is_fork else multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=True), context.Pipe(duplex=False), context.Pipe(duplex=False)]
        (self.connection, self._stack, errors), theirs = zip(*pipes, strict=True)
        surroundings = Surroundings()
        arguments = (theirs, surroundings, membership)
        self._process: BaseProcess = context.Process(target=serve, args=arguments, name=f"rank {membership.rank}")
        seed = mock.patch.dict(os.environ, PYTHONHASHSEED=str(membership.rank + 1))  # a fork keeps its server's
        with ctrl_c_blocked(), seed:
            self._process.start()
        surroundings.close()
        for pipe in theirs:
            pipe.close()  # so that it ends when the process exits
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:  # a message that stops midway
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_S, 0))
        self.standard_error = StandardError(errors)

    def let_leave(self) -> None:
        """End the process, even if it runs a body."""
        self.connection.close()
        self._stack.close()
        self._process.kill()

    def wait_until_left(self) -> None:
        """Wait for the end of the process."""
        self._process.join()
        self.standard_error.join(TAIL_TIMEOUT_S)

    def python_stack(self) -> str:
        """The Python stack of a rank that hangs, written by a signal handler in the rank's process."""
        assert self._process.pid is not None  # it was started
        os.kill(self._process.pid, signal.SIGUSR1)
        written = b""
        while wait([self._stack], timeout=STACK_PAUSE_S if written else STACK_TIMEOUT_S):
            if not (piece := os.read(self._stack.fileno(), 2**16)):
                break  # the signal ended the rank, which had not registered its handler yet
            written += piece
        stack = "\n".join(written.decode().splitlines()[1 : 1 + STACK_LINES])
        return stack if "File" in stack else "unknown: the rank was still starting, or outside of Python"

    def exit_status(self) -> int | None:
        """Exit status of a process that ends; None: it has not ended."""
        self._process.join(timeout=1)
        return self._process.exitcode


class JoinedRank:
    """The program's end of what connects it to a launcher's rank, whose process it can neither end nor look into."""

    standard_error = None  # the launcher has it

    def __init__(self, connection: Connection, membership: Membership) -> None:
        self.connection = connection
        connection.send((join, (membership,)))

    def let_leave(self) -> None:
        """Ask the rank to leave the pool."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(LEAVE)

    def wait_until_left(self) -> None:
        """Wait until the rank has left the pool; without an answer it counts as lost."""
        deadline = time.monotonic() + LEAVE_S
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll(max(0.0, deadline - time.monotonic())):
                if pickle.loads(self.connection.recv_bytes())[0] == LEFT:
                    return
        self.connection.close()

    def python_stack(self) -> str:
        """The Python stack of a rank that hangs, which only the rank's own process could show."""
        return "unknown: another process of the launcher"

    def exit_status(self) -> int | None:
        """Exit status of the rank's process, which only the launcher knows."""
        return None


class StandardError(threading.Thread):
    """Forwards what a rank writes to its standard error to that of the launcher, and keeps the end of it.

    The pipe keeps what a rank wrote last, also if the rank's process was killed. It ends when the rank and its child
    processes have exited.
    """

    def __init__(self, pipe: Connection) -> None:
        super().__init__(daemon=True)
        self._pipe = pipe
        self._end = b""
        self._lock = threading.Lock()
        self._forward_to: int | None = None
        with contextlib.suppress(OSError):  # closed
            self._forward_to = os.dup(2)
        self.start()

    def forward(self) -> bool:
        """Forward what the rank has written so far; returns False after the end."""
        with self._lock:
            if self._pipe.closed or not wait([self._pipe], timeout=0):
                return not self._pipe.closed
            unwritten = piece = os.read(self._pipe.fileno(), 2**16)  # all that a pipe holds
            self._end = (self._end + piece)[-TAIL_BYTES:]
            with contextlib.suppress(OSError):  # the reader of the launcher's standard error has closed it
                while self._forward_to is not None and unwritten:
                    unwritten = unwritten[os.write(self._forward_to, unwritten) :]
        return bool(piece)

    def run(self) -> None:
        """Forward all, until the pipe ends."""
        while wait([self._pipe]) and self.forward():
            pass
        with self._lock:
            self._pipe.close()
            if self._forward_to is not None:
                os.close(self._forward_to)

    def tail(self) -> str:
        """The end of what a rank that has exited wrote, for an error message."""
        self.join(TAIL_TIMEOUT_S)
        lines = self._end.decode(errors="replace").splitlines()[-TAIL_LINES:]
        shown = [line if len(line) <= TAIL_COLUMNS else f"{line[:TAIL_COLUMNS]}..." for line in lines]
        return "".join(["The end of its standard error:\n", *(f"{line}\n" for line in shown)]) if shown else ""
