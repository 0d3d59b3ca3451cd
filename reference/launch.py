"""Start ranks: processes that form a process group and run one function each, with a time-out.

`run_ranks` runs one function and ends the processes. `RankPool` keeps them for further functions. The ranks are on
this machine or, within `launcher.on_rank_0`, the processes that torchrun, srun or mpirun has started. A script
that calls `run_ranks` without it also runs under `torchrun`, unchanged: the process is then one of the ranks, and
torchrun sets the world size.
"""

import atexit
import contextlib
import faulthandler
import gc
import math
import os
import pickle
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist

from .errors import CollectiveError, Error, RankError, RankLostError, RanksStillRunningError
from .ranks.fork_server import claim
from .ranks.launcher import launched_ranks, open_store
from .ranks.pool_members import JoinedRank, StartedRank
from .ranks.rank_process import FAILURE, PROGRESS, Membership, let_gloo_finish, received
from .ranks.rank_process import rank_device as rank_device
from .ranks.rank_process import report_progress as report_progress
from .ranks.rank_process import spans_nodes as spans_nodes

Body = Callable[..., Any]
"""An importable function `body(rank, world_size, *args)`; arguments and result must be picklable."""
Progress = Callable[[str, int, int], None]
"""Called as `progress(step, done, total)`: the name of a step, how many of its parts are done, and their total."""
DEFAULT_TIMEOUT_S = 600.0
REMINDER_S = 20.0
"""Time after the last return of a rank after which the launcher says that others are still running."""
UNEVEN = "if they had fewer batches, the others wait for them in a collective: train inside `with model.join():`"
MISMATCH = "Gloo ends a process whose collectives differ from those of the other ranks"
OTHERS_S = 2.0
"""How long to wait for what the other ranks report after one was lost or has lost another."""


def no_progress(_step: str, _done: int, _total: int) -> None:
    """Ignore all progress."""


def run_ranks(
    body: Body, world_size: int, *args: Any, backend: str = "gloo", timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Run `body(rank, world_size, *args)` on `world_size` ranks; returns the results by rank.

    Under torchrun without `launcher.on_rank_0`, the body runs in this process, as the rank that torchrun sets.

    Raises:
        RankError: A rank raised an error, exited, or was still running after `timeout_s`. The others are ended.
    """
    if dist.is_torchelastic_launched() and launched_ranks() is None:
        return _run_as_one_rank(body, args, backend, timeout_s)
    with RankPool(world_size, backend=backend, timeout_s=timeout_s) as pool:
        return pool.run(body, *args)


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


def world_size_or(default: int) -> int:
    """Return the number of ranks that a launcher has started; without one, the default."""
    found = launched_ranks()
    return default if found is None else found.place.world_size


def default_backend(world_size: int) -> str:
    """Return NCCL's name where it is and each rank has a CUDA device, else Gloo's."""
    if (found := launched_ranks()) is not None:
        enough = all(rank.devices for rank in found.all()[:world_size])
    else:
        enough = torch.cuda.device_count() >= world_size
    return "nccl" if enough and dist.is_nccl_available() else "gloo"


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
        only_data: Whether ranks may return nothing but data, because they run code that is not to be trusted.

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
    only_data: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.world_size, SupportsIndex) or self.world_size < 1:
            raise ValueError(f"world_size: expected at least 1, got {self.world_size!r}")
        self._launched = launched_ranks()
        if self._launched is not None and self.world_size > (most := self._launched.place.world_size):
            raise ValueError(f"ranks: expected at most the {most} that the launcher started, got {self.world_size}")
        self._ranks: list[StartedRank | JoinedRank] = []
        self._resources = contextlib.ExitStack()

    @property
    def is_running(self) -> bool:
        """Whether the ranks have been started, and not been ended since."""
        return bool(self._ranks)

    @property
    def nodes(self) -> list[str]:
        """The node of each rank, by its name with the launcher; all ranks of this machine are on one."""
        if self._launched is None:
            return [""] * self.world_size
        return [rank.place.node for rank in self._launched.all()[: self.world_size]]

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
        if not callable(body):
            raise ValueError(f"body: expected a function body(rank, world_size, *args), got {body!r}")
        if not self._ranks:
            self._start()
        try:
            request = pickle.dumps((body, args))
            for member in self._ranks:
                with contextlib.suppress(ConnectionError):  # the rank is gone, which `_collect` reports
                    member.connection.send_bytes(request)
            return self._collect(timeout_s or self.timeout_s, on_progress)
        except BaseException:  # a failed body or Ctrl-C leaves ranks in an unknown state
            self.close()
            raise

    def close(self) -> None:
        """End the ranks, even if they are running a body."""
        atexit.unregister(self.close)
        for member in self._ranks:
            member.let_leave()
        for member in self._ranks:
            member.wait_until_left()
        self._ranks = []
        self._resources.close()

    def _start(self) -> None:
        atexit.register(self.close)  # daemon processes would need no handler, but may not start data loader workers
        if self._launched is None:
            folder = tempfile.TemporaryDirectory(prefix="ddplab-ranks-", ignore_cleanup_errors=True)
            store: Path | tuple[str, int] = Path(self._resources.enter_context(folder), "store")
            self._resources.callback(os.close, claim(folder.name))
        else:
            meeting = open_store(self._launched.place)
            self._resources.callback(lambda: meeting)  # keep it open
            store = self._launched.address, meeting.port
        for rank, own in enumerate(self._memberships(store)):
            launched = self._launched and self._launched.all()[rank].connection
            is_fork = rank >= self.new_interpreters
            try:
                self._ranks += [JoinedRank(launched, own) if launched else StartedRank(own, is_fork=is_fork)]
            except OSError:
                raise Error(f"{self.name(rank)} was lost; start the program again") from None

    def _memberships(self, store: Path | tuple[str, int]) -> list[Membership]:
        known = [rank.place for rank in self._launched.all()] if self._launched else []
        nodes = [place.node for place in known] or self.nodes
        addresses: Sequence[str | None] = [None] * self.world_size
        if self._launched is not None and len(set(self.nodes)) > 1:
            addresses = self._launched.addresses(range(self.world_size))
        shared = self.world_size, store, self.backend, self.timeout_s, self.pinned, self.device
        local_ranks = [place.local_rank for place in known] or range(self.world_size)
        return [
            Membership(*shared, rank, local_ranks[rank], local_size=nodes.count(nodes[rank]), address=address)
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
                returned = f" Ranks {sorted(results)} had returned." if results else ""
                stacks = [
                    f"Stack of rank {rank}, innermost call first:\n{self._ranks[rank].python_stack()}"
                    for rank in late
                ]
                raise RanksStillRunningError(
                    late[0],
                    f"ranks {late} were still running at the time-out of {timeout_s:g} s; all were ended.{returned}",
                    advice=UNEVEN if results else "",
                    last_output="\n\n".join(stacks),
                    returned=results,
                )
            for rank in answered:
                kind, value = self._receive(rank)
                if kind == PROGRESS:
                    on_progress(*value)
                else:
                    results[rank] = value
                    remind_at = time.monotonic() + REMINDER_S if len(results) < self.world_size else math.inf
        for member in self._ranks:
            if member.standard_error is not None:
                member.standard_error.forward()
        return [results[rank] for rank in range(self.world_size)]

    def _answered(self, ranks: Sequence[int], deadline: float) -> list[int]:
        """Those of the ranks that have sent a message or exited; waits for one of them until the deadline."""
        connections = {self._ranks[rank].connection: rank for rank in ranks}
        answered: list[Any] = wait(list(connections), timeout=max(0.0, deadline - time.monotonic()))
        return [connections[connection] for connection in answered]

    def _receive(self, rank: int, *, others: str = "") -> tuple[int, Any]:
        """The message of a rank; if it was lost, an error with what the others report, unless that is known."""
        member = self._ranks[rank]
        try:
            kind, value = received(member.connection.recv_bytes(), only_data=self.only_data)
        except (pickle.UnpicklingError, ValueError, TypeError, BlockingIOError) as error:
            raise RankLostError(rank, f"{self.name(rank)} sent what is no result: {error}") from None
        except (EOFError, ConnectionResetError):
            status = member.exit_status()
            code = "" if status is None else f" (exit code {status})"
            hint = f"; {MISMATCH}" if status == -signal.SIGABRT and self.backend == "gloo" else ""
            # With `debug=True` another rank names launches that do not match.
            failed = (self._then_failed(other, failure) for other, failure in self._reports_beside(rank) if failure)
            others = others or next(failed, "")
            cause = f"{self.name(rank)} exited without reporting an error{code}{hint}{others}"
            last_output = member.standard_error.tail() if member.standard_error is not None else ""
            raise RankLostError(rank, cause, last_output=last_output) from None
        if kind != FAILURE:
            return kind, value
        if not isinstance(value, RankError):
            raise value if self._launched is None else type(value)(f"{self.name(rank)}: {value}")
        # The first failure is the cause: other ranks fail because they lost that rank.
        if isinstance(value, CollectiveError):  # the end of a process elsewhere may be noticed after this
            for other, failure in self._reports_beside(rank):
                if failure is None:
                    return self._receive(other, others=self._then_failed(rank, value))
        others = "; the other ranks were ended" if self.world_size > 1 else ""
        cause = f"{self.name(rank)} failed: {value.cause}{others}."
        raise type(value)(rank, cause, traceback=value.traceback)

    def _then_failed(self, rank: int, failure: RankError) -> str:
        return f". {self.name(rank).capitalize()} then failed: {failure.cause}"

    def _reports_beside(self, one: int) -> Iterator[tuple[int, RankError | None]]:
        """The other ranks that fail within a short time, with their errors; None: the rank has exited."""
        others = [rank for rank in range(self.world_size) if rank != one]
        deadline = time.monotonic() + OTHERS_S
        while others and (answered := self._answered(others, deadline)):
            for rank in answered:
                others.remove(rank)
                try:
                    kind, value = received(self._ranks[rank].connection.recv_bytes(), only_data=self.only_data)
                except (EOFError, OSError, pickle.UnpicklingError, ValueError, TypeError):
                    yield rank, None
                else:
                    if kind == FAILURE and isinstance(value, RankError):
                        yield rank, value
