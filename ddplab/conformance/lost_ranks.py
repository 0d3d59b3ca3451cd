"""Faults: a rank dies or raises an error, and the others must end with an error in time.

The ranks are processes without a launcher that watches over them, as on a cluster: what ends them is the class.
"""

import os
import signal
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore

from ..emulation.virtual_time import patient
from ..reference.ranks.fork_server import OUTPUTS, Surroundings, ctrl_c_blocked, process_context
from ..reference.ranks.process_settings import choose_network
from .check_runner import Bench
from .class_under_test import Subject
from .local_training import FindingError
from .real_models import Training, mean_square

WORLD_SIZE = 2
COLLECTIVES_S = 8.0
"""Time-out of collectives."""
PATIENCE_S = 10.0
"""How long the others may live on."""
START_S = 60.0
REACHED = "reached"
"""Name of the file that shows that the fault was reached."""
WORDS = {"killed": "was killed", "raises": "raised an error"}


def check(bench: Bench, kind: str) -> None:
    """An error in the last rank's backward pass, or its end there if it is killed, ends the others with an error."""
    context, surroundings = process_context(), Surroundings()
    with tempfile.TemporaryDirectory() as folder:
        arguments = bench.subject.name, kind, folder, surroundings
        ranks = [context.Process(target=_serve, args=(*arguments, rank)) for rank in range(WORLD_SIZE)]
        try:
            for process in ranks:
                with ctrl_c_blocked():
                    process.start()
            latest = time.monotonic() + patient(START_S)
            while ranks[-1].exitcode is None and not Path(folder, REACHED).exists():
                if time.monotonic() > latest:
                    raise FindingError(f"the last rank did not reach its fault in {patient(START_S):.3g} s")
                ranks[-1].join(timeout=0.1)
            ranks[-1].join(timeout=patient(COLLECTIVES_S + PATIENCE_S))  # its last collective may have to fail first
            is_left = ranks[-1].exitcode is None
            ranks[0].join(timeout=patient(PATIENCE_S))
            outcome = ranks[0].exitcode
        finally:
            surroundings.close()
            for process in ranks:
                process.kill()
                process.join()
    how = f"the last rank {WORDS[kind]} during its backward pass"
    if is_left:
        raise FindingError(f"{how}, but its process did not end: does a thread keep it that is no daemon?")
    if outcome is None:
        raise FindingError(f"{how}: rank 0 was still running {patient(PATIENCE_S):.3g} s later")
    if outcome == 0:
        raise FindingError(f"{how}: rank 0 ended without an error")


def _serve(name: str, kind: str, folder: str, surroundings: Surroundings, rank: int) -> None:
    """Train, without a launcher; the errors that a rank reports are expected.

    In the second iteration the last rank is killed, or raises an error, in its backward pass.
    """
    surroundings.enter()
    silent = os.open(os.devnull, os.O_WRONLY)
    for output in OUTPUTS:
        os.dup2(silent, output)
    choose_network(None)
    meeting, timeout = FileStore(str(Path(folder, "store")), WORLD_SIZE), timedelta(seconds=patient(COLLECTIVES_S))
    dist.init_process_group("gloo", store=meeting, timeout=timeout, rank=rank, world_size=WORLD_SIZE)
    training = Training(Subject(name), lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(6))))

    def fail(_gradient: Tensor) -> None:
        Path(folder, REACHED).touch()
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("this rank fails on purpose")

    for step in range(4):
        if step == 1 and rank == WORLD_SIZE - 1:
            layer = training.module.get_submodule("3")
            layer.register_forward_hook(lambda _layer, _inputs, output: output.register_hook(fail) and None)
        training.backward(mean_square, step)
        training.update()
        training.wrapped.zero_grad()
