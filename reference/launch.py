"""Start ranks: processes that form a process group and run one function each, with a time-out.

`run_ranks` runs one function and ends the processes. `RankPool` keeps them for further functions. The ranks are on
this machine or, within `launcher.on_rank_0`, the processes that torchrun, srun or mpirun has started. A script
that calls `run_ranks` without it also runs under `torchrun`, unchanged: the process is then one of the ranks, and
torchrun sets the world size.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import math
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import psutil
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before any process group exists, as its default arguments hold the group
from torch._C._distributed_c10d import FileStore, TCPStore

from .errors import CollectiveError, Error, RankError, RankLostError, RanksStillRunningError
from .ranks.fork_server import IMPORTED, Surroundings, ctrl_c_blocked, process_context
from .ranks.launcher import launched_ranks

Body = Callable[..., Any]
"""An importable function `body(rank, world_size, *args)`; arguments and result must be picklable."""

Progress = Callable[[str, int, int], None]
"""Called as `progress(step, done, total)`: the name of a step, how many of its parts are done, and their total."""


def no_progress(_step: str, _done: int, _total: int) -> None:
    """Ignore all progress."""


DEFAULT_TIMEOUT_S = 600.0

REMINDER_S = 20.0
"""Time after the last return of a rank after which the launcher says that others are still running."""
UNEVEN = "if they had fewer batches, the others wait for them in a collective: train inside `with model.join():`"
MISMATCH = "Gloo ends a process whose collectives differ from those of the other ranks"
OTHERS_S = 2.0
"""How long to wait for what the other ranks report after one was lost or has lost another."""
STACK_TIMEOUT_S, STACK_PAUSE_S = 1.0, 0.1
"""How long to wait for the first and for each further piece of a stack, because a stack has no end mark."""
STACK_LINES = 24
TAIL_LINES, TAIL_COLUMNS, TAIL_BYTES = 40, 200, 2**14
"""How much of the end of a rank's standard error a `RankError` shows, and how much of it is kept."""
FINISH_PAUSE_S, FINISH_TIMEOUT_S = 0.01, 2.0
"""How often and how long to look whether Gloo's threads have freed the last collectives."""
LOST_PEER = re.compile("gloo/transport|remote process")
"""In the error of a rank whose connection to another was lost, with Gloo and with NCCL."""
TAIL_TIMEOUT_S = 1.0
"""How long to wait for the end of a rank's standard error, which its own child processes may hold open."""

LOOPBACK = "127.0.0.1"
LEAVE_S = 10.0
"""How long to wait until a launcher's rank has left a pool. After a failure, what it waits for must fail first."""

_RESULT, _FAILURE, _PROGRESS, _LEFT = range(4)  # kinds of messages from a rank to the launcher
_LEAVE = b""  # what tells a rank, in place of a body, that its pool has ended
_launcher: Connection | None = None  # in a rank's process: the pipe to the launcher
_spans_nodes = False  # in a rank's process: whether some ranks are on other machines
_device: str | None = None  # in a rank's process: the type of the device that its pool was given


def run_ranks(
    body: Body, world_size: int, *args: Any, backend: str = "gloo", timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Run `body(rank, world_size, *args)` on `world_size` ranks; returns the results by rank.

    Under torchrun without `launcher.on_rank_0`, the body runs in this process, with the rank and the world size that
    torchrun sets.

    Raises:
        RankError: A rank raised an error, exited, or was still running after `timeout_s`. The others are ended.
    """
    if dist.is_torchelastic_launched() and launched_ranks() is None:
        return _run_as_one_rank(body, args, backend, timeout_s)
    with RankPool(world_size, backend=backend, timeout_s=timeout_s) as pool:
        return pool.run(body, *args)


def report_progress(step: str, done: int, total: int) -> None:
    """Report progress from a body to the launcher's `on_progress`; does nothing outside of a pool's rank."""
    if _launcher is not None:
        _send(_launcher, _PROGRESS, (step, done, total))


def world_size_or(default: int) -> int:
    """Return the number of ranks that a launcher has started; without one, the default."""
    found = launched_ranks()
    return default if found is None else found.place.world_size


def default_backend(world_size: int) -> str:
    """Return NCCL's name where it is and each rank has a CUDA device, else Gloo's."""
    found = launched_ranks()
    if found is not None:
        enough = all(one.devices for one in found.all()[:world_size])
    else:
        enough = torch.cuda.device_count() >= world_size
    return "nccl" if enough and dist.is_nccl_available() else "gloo"


def spans_nodes() -> bool:
    """Return whether this process is a rank, and others are on other machines, whose clocks differ from its own."""
    return _spans_nodes


def rank_device() -> torch.device:
    """Return the device on which this rank trains: that of its pool, or else its GPU with NCCL, otherwise the CPU."""
    uses_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    if _device == "cuda" or (_device is None and uses_nccl):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(eq=False)
class RankPool(contextlib.AbstractContextManager["RankPool"]):
    """Processes that form one process group and run one body after another.

    Use as a context manager, or call `close`. After a `RankError` the next `run` starts new processes. A launcher's
    processes cannot be replaced: they join the pool again, unless one was lost or does not end its body.

    Args:
        world_size: Number of ranks.
        backend: As for `torch.distributed.init_process_group`.
        timeout_s: Time-out in seconds of each `run`, of which the first also starts the ranks, and of collectives.
        pinned: Whether each rank, with its network threads, runs on its own share of the processor's cores (Linux).
        device: Where ranks train, `cpu` or `cuda`; ranks share GPUs if there are fewer, which NCCL refuses. None: on
            their GPUs with NCCL, otherwise on the CPU.
        new_interpreters: How many of the ranks, from the first, are new interpreters with hash seeds of their own, as
            under torchrun, so that they order sets differently. Forks share hashes and addresses, and start faster.

    Raises:
        ValueError: The launcher has started fewer ranks.
    """

    world_size: int
    _: KW_ONLY
    backend: str = "gloo"
    timeout_s: float = DEFAULT_TIMEOUT_S
    pinned: bool = False
    device: str | None = None
    new_interpreters: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size: expected at least 1, got {self.world_size}")
        self._launched = launched_ranks()
        if self._launched is not None and self.world_size > (most := self._launched.place.world_size):
            raise ValueError(f"ranks: expected at most the {most} that the launcher started, got {self.world_size}")
        self._ranks: list[_StartedRank | _LaunchedRank] = []
        self._resources = contextlib.ExitStack()

    @property
    def nodes(self) -> list[str]:
        """The node of each rank, by its name with the launcher; all ranks of this machine are on one."""
        if self._launched is None:
            return [""] * self.world_size
        return [one.place.node for one in self._launched.all()[: self.world_size]]

    def name(self, rank: int) -> str:
        """How errors name a rank: under a launcher, with the machine that it is on."""
        if self._launched is None:
            return f"rank {rank}"
        return f"rank {rank} on {self._launched.all()[rank].host}"

    def __exit__(self, *_error: object) -> None:
        self.close()

    def run(
        self, body: Body, *args: Any, timeout_s: float | None = None, on_progress: Progress = no_progress
    ) -> list[Any]:
        """Run `body(rank, world_size, *args)` on every rank; returns the results by rank.

        `timeout_s` overrides the pool's time-out, and `on_progress` gets what ranks `report_progress`.

        Raises:
            RankError: As for `run_ranks`.
            ModelError: A body named a model that does not exist.
            Error: A body raised it, or the ranks cannot write to the folder of temporary files.
        """
        if not self._ranks:
            self._start()
        try:
            for one in self._ranks:
                with contextlib.suppress(ConnectionError):  # the rank is gone, which `_collect` reports
                    one.connection.send_bytes(pickle.dumps((body, args)))
            return self._collect(timeout_s or self.timeout_s, on_progress)
        except BaseException:  # a failed body or Ctrl-C leaves ranks in an unknown state
            self.close()
            raise

    def close(self) -> None:
        """End the ranks, even if they are running a body."""
        atexit.unregister(self.close)
        for one in self._ranks:
            one.let_leave()
        for one in self._ranks:
            one.wait_until_left()
        self._ranks = []
        self._resources.close()

    def _start(self) -> None:
        atexit.register(self.close)  # daemon processes would need no handler, but may not start data loader workers
        if self._launched is None:
            folder = tempfile.TemporaryDirectory(prefix="ddplab-ranks-", ignore_cleanup_errors=True)
            store: Path | tuple[str, int] = Path(self._resources.enter_context(folder), "store")
        else:
            meeting = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
            self._resources.callback(lambda: meeting)  # keep it open
            store = self._launched.address, meeting.port
        for rank, membership in enumerate(self._memberships(store)):
            launched = self._launched and self._launched.all()[rank].connection
            try:
                self._ranks.append(
                    _LaunchedRank(launched, membership)
                    if launched
                    else _StartedRank(membership, is_fork=rank >= self.new_interpreters)
                )
            except OSError:
                raise Error(f"{self.name(rank)} was lost; start the program again") from None

    def _memberships(self, store: Path | tuple[str, int]) -> "list[_Membership]":
        """Return what makes each process a rank of this pool."""
        known = [one.place for one in self._launched.all()] if self._launched else []
        nodes = [place.node for place in known] or self.nodes
        addresses: Sequence[str | None] = [None] * self.world_size
        if self._launched is not None and len(set(self.nodes)) > 1:
            addresses = self._launched.addresses(range(self.world_size))
        return [
            _Membership(
                rank,
                self.world_size,
                store,
                self.backend,
                self.timeout_s,
                local_rank=known[rank].local_rank if known else rank,
                local_size=nodes.count(nodes[rank]),
                pinned=self.pinned,
                device=self.device,
                address=address,
            )
            for rank, address in enumerate(addresses)
        ]

    def _collect(self, timeout_s: float, on_progress: Progress) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        remind_at = math.inf
        results: dict[int, Any] = {}
        while late := [rank for rank in range(self.world_size) if rank not in results]:
            answered = self._answered(late, min(deadline, remind_at))
            if not answered and time.monotonic() < deadline:
                remind_at = math.inf
                warnings.warn(
                    f"ranks {late} are still running {REMINDER_S:g} s after ranks {sorted(results)} have returned; "
                    f"{UNEVEN}; otherwise this ends at the time-out of {timeout_s:g} s",
                    stacklevel=3,
                )
                continue
            if not answered:
                hint = f" Ranks {sorted(results)} had returned: {UNEVEN}." if results else ""
                stacks = "".join(
                    f"\n\nStack of rank {rank}, innermost call first:\n{self._ranks[rank].python_stack()}"
                    for rank in late
                )
                raise RanksStillRunningError(
                    late[0],
                    f"ranks {late} were still running at the time-out of {timeout_s:g} s; all were ended."
                    f"{hint}{stacks}",
                    returned=results,
                )
            for rank in answered:
                kind, value = self._receive(rank)
                if kind == _PROGRESS:
                    on_progress(*value)
                else:
                    results[rank] = value
                    remind_at = time.monotonic() + REMINDER_S if len(results) < self.world_size else math.inf
        for one in self._ranks:
            one.forward_errors()
        return [results[rank] for rank in range(self.world_size)]

    def _answered(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Those of the ranks that have sent a message or exited; waits for one of them until the deadline."""
        connections = {self._ranks[rank].connection: rank for rank in ranks}
        answered: list[Any] = wait(list(connections), timeout=max(0.0, deadline - time.monotonic()))
        return [connections[connection] for connection in answered]

    def _receive(self, rank: int, *, others: str = "") -> tuple[int, Any]:
        """The message of a rank; if it was lost, an error with what the others report, unless that is known."""
        one = self._ranks[rank]
        try:
            kind, value = pickle.loads(one.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            status = one.exit_status()
            code = "" if status is None else f" (exit code {status})"
            hint = f"; {MISMATCH}" if status == -signal.SIGABRT and self.backend == "gloo" else ""
            raise RankLostError(
                rank,
                f"{self.name(rank)} exited without reporting an error{code}{hint}"
                f"{others or self._others(rank)}{one.end_of_errors()}",
            ) from None
        if kind == _FAILURE and not isinstance(value, RankError):
            raise value if self._launched is None else type(value)(f"{self.name(rank)}: {value}")
        if kind == _FAILURE:  # the first failure is the cause: other ranks fail because they lost that rank
            if isinstance(value, CollectiveError):  # the end of a process elsewhere may be noticed after this
                for other, report in self._reports_beside(rank):
                    if report is None:
                        return self._receive(other, others=self._then_failed(rank, value))
            cause = _first_line(value)
            raise type(value)(
                rank, f"{self.name(rank)} failed: {cause}; the other ranks were ended. Traceback:\n\n{value}"
            )
        return kind, value

    def _others(self, lost: int) -> str:
        """What another rank reports after one was lost; with `debug=True` it names launches that do not match."""
        for rank, report in self._reports_beside(lost):
            if report is not None and report[0] == _FAILURE and isinstance(report[1], RankError):
                return self._then_failed(rank, report[1])
        return ""

    def _then_failed(self, rank: int, failure: RankError) -> str:
        return f". {self.name(rank).capitalize()} then failed: {_first_line(failure)}"

    def _reports_beside(self, one: int) -> Iterator[tuple[int, tuple[int, Any] | None]]:
        """What each other rank reports within a short time; None: the rank has exited."""
        others = [rank for rank in range(self.world_size) if rank != one]
        deadline = time.monotonic() + OTHERS_S
        while others and (answered := self._answered(others, deadline)):
            for rank in answered:
                others.remove(rank)
                try:
                    yield rank, pickle.loads(self._ranks[rank].connection.recv_bytes())
                except (EOFError, ConnectionError, pickle.UnpicklingError):
                    yield rank, None


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
        try:
            self._forward_to: int | None = os.dup(2)
        except OSError:  # closed
            self._forward_to = None
        self.start()

    def forward(self) -> bool:
        """Forward what the rank has written so far; returns False after the end."""
        with self._lock:
            if self._pipe.closed or not wait([self._pipe], timeout=0):
                return not self._pipe.closed
            unwritten = piece = os.read(self._pipe.fileno(), 2**16)  # all that a pipe holds
            self._end = (self._end + piece)[-TAIL_BYTES:]
            with contextlib.suppress(OSError):  # nobody reads the launcher's
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
        return "".join(["\n\nThe end of its standard error:\n", *(f"{line}\n" for line in shown)]) if shown else ""


class _LaunchedRank:
    """The program's end of what connects it to a launcher's rank, whose process it can neither end nor look into."""

    def __init__(self, connection: Connection, membership: "_Membership") -> None:
        self.connection = connection
        connection.send((_join, (membership,)))

    def let_leave(self) -> None:
        """Ask the rank to leave the pool."""
        with contextlib.suppress(OSError):
            self.connection.send_bytes(_LEAVE)

    def wait_until_left(self) -> None:
        """Wait until the rank has left the pool; without an answer it counts as lost."""
        deadline = time.monotonic() + LEAVE_S
        with contextlib.suppress(EOFError, OSError):
            while self.connection.poll(max(0.0, deadline - time.monotonic())):
                if pickle.loads(self.connection.recv_bytes())[0] == _LEFT:
                    return
        self.connection.close()

    def python_stack(self) -> str:
        """The Python stack of a rank that hangs, which only the rank's own process could show."""
        return "unknown: another process of the launcher"

    def exit_status(self) -> int | None:
        """Exit status of the rank's process, which only the launcher knows."""
        return None

    def forward_errors(self) -> None:
        """Do nothing: the launcher forwards the standard error of its processes."""

    def end_of_errors(self) -> str:
        """What the rank's process wrote last, which the launcher has."""
        return ""


class _StartedRank:
    """A rank's process on this machine; bodies, results and progress pass through `connection`."""

    def __init__(self, membership: "_Membership", *, is_fork: bool) -> None:
        context = process_context() if is_fork else multiprocessing.get_context("spawn")
        pipes = [context.Pipe(duplex=True), context.Pipe(duplex=False), context.Pipe(duplex=False)]
        (self.connection, self._stack, errors), theirs = zip(*pipes, strict=True)
        surroundings = Surroundings()
        arguments = (theirs, surroundings, membership)
        self._process: BaseProcess = context.Process(target=_serve, args=arguments, name=f"rank {membership.rank}")
        seed = mock.patch.dict(os.environ, PYTHONHASHSEED=str(membership.rank + 1))  # a fork keeps its server's
        with ctrl_c_blocked(), seed:
            self._process.start()
        surroundings.close()
        for pipe in theirs:
            pipe.close()  # so that it ends when the process exits
        self._standard_error = StandardError(errors)

    def let_leave(self) -> None:
        """End the process, even if it runs a body."""
        self.connection.close()
        self._stack.close()
        self._process.kill()

    def wait_until_left(self) -> None:
        """Wait for the end of the process."""
        self._process.join()
        self._standard_error.join(TAIL_TIMEOUT_S)

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

    def forward_errors(self) -> None:
        """Forward what the process has written to its standard error so far."""
        self._standard_error.forward()

    def end_of_errors(self) -> str:
        """The end of what the process wrote to its standard error, for an error message."""
        return self._standard_error.tail()


def _first_line(failure: RankError) -> str:
    """Return the first line of an error's message, after its traceback; a later line may be a detail."""
    lines = str(failure).strip().splitlines()
    start = max(
        (number for number, line in enumerate(lines) if line.startswith("Traceback (most recent")), default=-1
    )
    return next((line for line in lines[start + 1 :] if line and not line.startswith(" ")), lines[-1])


class _Membership(NamedTuple):
    """What makes a process a rank of a pool: see `RankPool` and `_meet`.

    `local_rank` counts among the `local_size` ranks of this machine. `address` is that of the machine on the network
    that connects the ranks; None: all of them are on one machine.
    """

    rank: int
    world_size: int
    store: Path | tuple[str, int]
    backend: str
    timeout_s: float
    local_rank: int
    local_size: int
    pinned: bool
    device: str | None
    address: str | None


def _serve(pipes: Sequence[Connection], surroundings: Surroundings, membership: _Membership) -> None:
    """Main function of a rank's process: run bodies, as a member of a pool, until the pipe closes."""
    connection, writes_stack, writes_errors = pipes
    surroundings.enter()
    for name in IMPORTED:  # a new interpreter must not take the time for this in the middle of a body
        importlib.import_module(name)
    os.dup2(writes_errors.fileno(), 2)
    writes_errors.close()
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=writes_stack.fileno(), all_threads=False)
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the launcher has exited
        _run_bodies(connection, membership)


def _join(connection: Connection, membership: _Membership) -> None:
    """Run bodies in a launcher's process, as a member of a pool, and leave the pool."""
    cores = os.sched_getaffinity(0) if sys.platform == "linux" else None
    _run_bodies(connection, membership)
    if dist.is_initialized():
        gc.collect()  # the group's last reference may be in a cycle of a body's objects
        with contextlib.suppress(RuntimeError):  # another rank was lost
            dist.destroy_process_group()
        let_gloo_finish()
    if cores is not None:
        os.sched_setaffinity(0, cores)
    _send(connection, _LEFT, None)


def _run_bodies(connection: Connection, own: _Membership) -> None:
    """Run the bodies of a pool, until there is none."""
    global _launcher, _spans_nodes, _device
    _launcher, _spans_nodes, _device = connection, own.address is not None, own.device
    if own.pinned:
        pin(own.local_rank, own.local_size)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // own.local_size))
    choose_network(own.address)
    keep_freed_memory()
    while request := connection.recv_bytes():
        try:
            body, args = pickle.loads(request)
            if not dist.is_initialized():
                if own.backend == "nccl" or own.device == "cuda":
                    if not torch.cuda.device_count():
                        raise Error("ranks: expected a CUDA device, got none; use Gloo and the CPU")
                    torch.cuda.set_device(own.local_rank % torch.cuda.device_count())
                _meet(own)
            _send(connection, _RESULT, body(own.rank, own.world_size, *args))
        except Exception as error:  # noqa: BLE001 - any error of the body, or a result that cannot be pickled
            _send(connection, _FAILURE, _failure(own.rank, error))


def _failure(rank: int, error: Exception) -> Error:
    """Return what a rank reports of an error: an `Error` needs no traceback, the message of a `RankError` is one."""
    if isinstance(error, RankError):  # a class of another module may have another constructor
        kind: type[RankError] = next(one for one in type(error).__mro__ if one.__module__ == RankError.__module__)
        return kind(rank, traceback.format_exc())
    if isinstance(error, Error):
        return error
    text = traceback.format_exc()
    return (CollectiveError if LOST_PEER.search(text) else RankError)(rank, text)


def _meet(own: _Membership) -> None:
    """Initialise the process group with a store: a file, or the address and port of the launcher's."""
    timeout = timedelta(seconds=own.timeout_s)
    meet = partial(dist.init_process_group, own.backend, rank=own.rank, world_size=own.world_size, timeout=timeout)
    if isinstance(own.store, tuple):
        meet(store=TCPStore(*own.store, is_master=False, timeout=timeout))
        return
    try:
        meet(store=FileStore(str(own.store), own.world_size))
    except dist.DistStoreError as error:
        advice = "make room there, or set TMPDIR"
        raise Error(f"ranks: cannot meet through a file in {own.store.parent}: {error}; {advice}") from None


def _end_with_launcher() -> None:
    """End this rank when its launcher has ended or was killed, even while the rank waits for other ranks."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)


def _send(connection: Connection, kind: int, value: Any) -> None:
    """Send a plain pickle: `Connection.send` passes tensors in shared memory, which is freed when a rank exits."""
    connection.send_bytes(pickle.dumps((kind, value)))


def _run_as_one_rank(body: Body, args: tuple[Any, ...], backend: str, timeout_s: float) -> list[Any]:
    if not faulthandler.is_enabled():
        faulthandler.enable()
    started_here = not dist.is_initialized()
    if started_here:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        results: list[Any] = [None] * dist.get_world_size()
        mine = body(dist.get_rank(), dist.get_world_size(), *args)
        # Results pass through the CPU. NCCL would use the current GPU, by default GPU 0 on every rank, and fail.
        timeout = timedelta(seconds=timeout_s)
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
        dist.all_gather_object(results, mine, group=group)
        return results
    finally:
        if started_here:
            gc.collect()  # the group's last reference may be in a cycle of the body's objects
            dist.destroy_process_group()
            let_gloo_finish()


def let_gloo_finish() -> None:
    """Wait until Gloo's threads have freed the last collectives, which must happen before Python ends.

    The destructor of a group joins these threads. If something still holds the group, such as a data-parallel module,
    they go on while Python ends, and a thread that then needs Python's lock, to free an object that a collective
    holds, ends the process: "terminate called without an active exception". This thread holds no lock while it
    sleeps, so a thread of Gloo that sleeps as well, at two moments, has nothing left to free.
    """
    calm = 0
    deadline = time.monotonic() + FINISH_TIMEOUT_S
    while calm < 2 and time.monotonic() < deadline:
        time.sleep(FINISH_PAUSE_S)
        calm = 0 if "R" in _states_of_threads("pt_gloo_runloop") else calm + 1


def _states_of_threads(name: str) -> set[str]:
    """States of this process's threads of a name, as in proc(5); without Linux, none."""
    states = set()
    for thread in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            of_name, _, rest = thread.read_text().partition("(")[2].rpartition(")")
            if of_name == name:
                states.add(rest.split()[0])
    return states


def pin(rank: int, world_size: int) -> None:
    """Restrict this process to its rank's share of the cores; does nothing without Linux.

    The scheduler otherwise moves ranks and network threads between cores, at a cost that differs from run to run.
    """
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores_of(rank, world_size, sorted(os.sched_getaffinity(0))))


def cores_of(rank: int, world_size: int, available: Sequence[int]) -> list[int]:
    """Return a rank's share of the available cores.

    More ranks than cores take them in turn. If some cores would get more ranks than others, all ranks get all cores,
    so that the scheduler can share them out evenly.
    """
    if world_size > len(available) and world_size % len(available):
        return list(available)
    return list(available[rank % len(available) :: world_size])


def choose_network(address: str | None) -> None:
    """Make Gloo use the network of an address or, without one, the loopback interface."""
    for name, ends in psutil.net_if_addrs().items():
        if any(end.address == (address or LOOPBACK) for end in ends):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system between iterations.

    `zero_grad` frees every gradient and the next backward pass allocates them again. By default glibc returns
    such memory or keeps it depending on what was freed before, and each page costs a fault when it is allocated
    again: with 120 MB of gradients the same iteration takes 110 or 165 ms by accident. Does nothing without glibc's
    mallopt(3).
    """
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_mmap_max, 0)  # every tensor comes from memory that is kept, even those above 32 MiB
