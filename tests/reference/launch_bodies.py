"""Rank bodies about launching alone. They import little, so that ranks which are started only for them start soon."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import parent_process
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ddplab.reference.errors import CollectiveError, LaunchOrderError
from ddplab.reference.launch import RankPool, report_progress
from ddplab.reference.ranks.fork_server import Surroundings


def identify(rank: int, world_size: int, *args: object) -> tuple[object, ...]:
    return rank, world_size, dist.get_rank(), dist.get_world_size(), *args


def cores(_rank: int, _world_size: int) -> list[int]:
    return sorted(os.sched_getaffinity(0))


def fail_on(rank: int, _world_size: int, failing: int) -> int:
    if rank == failing:
        raise ArithmeticError("the sums do not add up")
    dist.barrier()  # its peers wait for the one that failed
    return rank


class OwnError(CollectiveError):
    def __init__(self) -> None:
        super().__init__(1, "it is our own")


def raise_error(rank: int, _world_size: int, failing: int, kind: type[Exception]) -> None:
    if rank == failing:
        raise kind(rank, "no") if kind is LaunchOrderError else kind()


def die_on(rank: int, _world_size: int, dying: int) -> int:
    if rank == dying:
        os._exit(17)
    dist.barrier()
    return rank


def die_after_reports(rank: int, _world_size: int, dying: int) -> None:
    """End the process of one rank after the others have reported that a connection was lost."""
    if rank == dying:
        time.sleep(0.3)
        os._exit(17)
    raise RuntimeError("gloo/transport: connection closed by peer")


def crash(rank: int, _world_size: int, crashing: int, how: str) -> None:
    """End the process of one rank natively, after it has written a line to its standard error."""
    if rank == crashing:
        os.write(2, b"the last words\n")
        if how == "segfault":
            ctypes.string_at(0)
        if how == "abort":
            os.abort()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "terminate":
            ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()
    threading.Event().wait(5)


def write_errors(rank: int, _world_size: int, lines: int) -> None:
    """Write more to the standard error than a pipe holds."""
    for number in range(lines):
        os.write(2, f"rank {rank} line {number} {'x' * 80}\n".encode())


def leave_a_child(rank: int, _world_size: int, aborting: int) -> None:
    """Abort with a child process that holds the standard error open."""
    if rank == aborting:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
        os.abort()


def hang_on(rank: int, _world_size: int, hanging: int) -> int:
    if rank == hanging:
        threading.Event().wait()  # nobody sets it: only the launcher's time-out can end this rank
    return rank


def hang(_rank: int, _world_size: int) -> None:
    threading.Event().wait()


def return_unpicklable(_rank: int, _world_size: int) -> object:
    return lambda: None


def return_tensor(rank: int, _world_size: int) -> Tensor:
    return torch.full((3,), float(rank))


def count_threads(_rank: int, _world_size: int) -> int:
    return torch.get_num_threads()


def die_after_returning(rank: int, _world_size: int, dying: int) -> None:
    """Return, and then end the process of one rank by a signal."""
    if rank == dying:
        threading.Timer(0.2, os.abort).start()


def vanish(surroundings: Surroundings) -> None:
    """A launcher that ends while one rank computes, and another one waits for a message that never comes."""
    surroundings.enter()
    RankPool(2, timeout_s=600).run(outlive, on_progress=lambda *_: os._exit(0))


def outlive(rank: int, _world_size: int) -> int:
    """Return a result after the launcher has ended."""
    if rank == 1:
        dist.recv(torch.ones(1), 0)
    launcher = parent_process()
    assert launcher is not None
    report_progress("computing", 0, 1)
    launcher.join()
    return rank


def surroundings(rank: int, _world_size: int, variable: str) -> tuple[str | None, str, float]:
    os.write(1, f"rank {rank} prints\n".encode())
    os.write(2, f"rank {rank} warns\n".encode())
    return os.environ.get(variable), str(Path.cwd()), float(np.random.random())


def raise_two_lines(_rank: int, _world_size: int) -> None:
    raise ValueError("expected a weight\nsee the list of names")


def some_tensors(rank: int, _world_size: int) -> dict[str, torch.Tensor]:
    """Tensors of which each has something that a copy of its values alone would lose."""
    named = torch.ones(2)
    named.note = "of rank"  # type: ignore[attr-defined]
    return {
        "plain": torch.arange(6.0).reshape(2, 3) + rank,
        "scalar": torch.tensor(2**62 + rank),
        "empty": torch.zeros(0, 3, dtype=torch.bool),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
        "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "slice": torch.arange(10.0)[::3],
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(3, dtype=torch.complex64).conj(),
        "sparse": torch.eye(3).to_sparse(),
        "differentiable": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "named": named,
    }
