"""Ranks under a launcher: the place of a process by the launcher's variables, and processes that serve rank 0."""

import contextlib
import os
import socket
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.process import BaseProcess
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.errors import Error
from ddplab.reference.ranks.fork_server import OUTPUTS, Surroundings, process_context
from ddplab.reference.ranks.launcher import Place, address_for_others, first_host, launched

from .launcher_bodies import serve_or_run

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "9", "WORLD_SIZE": "16",
    "LOCAL_RANK": "1", "GROUP_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "1234",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[003-004]",
}  # fmt: skip
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "MASTER_ADDR": "gpu003",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, Place(9, 16, 1, "1", "node1", 1234, has_store=True)),
        (SRUN, Place(9, 16, 1, "1", "gpu003", 23456, has_store=False)),
        (SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}, Place(9, 16, 1, "1", "a", 5, has_store=False)),
        (MPIRUN, Place(9, 16, 1, socket.gethostname(), "gpu003", 29500, has_store=False)),
        ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}, None),
        (SRUN | {"SLURM_NTASKS": "1"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),
    ],
)
def test_a_launcher_gives_each_process_its_place(variables, place):
    """Not in the script of sbatch, which has the variables of Slurm too, nor in a shell that srun has started."""
    assert launched(variables) == place


def test_mpirun_on_several_nodes_needs_an_address():
    with pytest.raises(Error, match=r"^mpirun: expected MASTER_ADDR, .* add `-x MASTER_ADDR=HOST"):
        launched({name: value for name, value in MPIRUN.items() if name != "MASTER_ADDR"})


@given(st.integers(0, 999), st.integers(1, 5), st.sampled_from(["", "-ib"]), st.sampled_from(["", ",login1"]))
def test_the_first_host_of_a_list(number, digits, ending, others):
    first = f"{number:0{digits}}"
    assert first_host(f"gpu{first}{ending}{others}") == f"gpu{first}{ending}"
    assert first_host(f"gpu[{first}-{number + 3:0{digits}},{number + 9}]{ending}{others}") == f"gpu{first}{ending}"


def test_an_empty_list_of_hosts_is_refused():
    with pytest.raises(Error, match="SLURM_STEP_NODELIST, got ''"):
        first_host("")


def test_others_reach_this_machine_at_the_address_where_the_launcher_does():
    assert address_for_others("127.0.0.1") == "127.0.0.1"
    assert address_for_others("localhost") == "localhost"


# Processes


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


@contextlib.contextmanager
def as_launched(case: str, world_size: int, launcher: str) -> Iterator[tuple[list[BaseProcess], list[list[TextIO]]]]:
    """A process for each rank, with the variables of a launcher; and their standard outputs and errors, by rank."""
    port, processes, outputs = str(free_port()), [], []
    numbers, prefix = {
        "srun": (("PROCID", "NTASKS", "LOCALID", "NODEID"), "SLURM_"),
        "mpirun": (("RANK", "SIZE", "LOCAL_RANK"), "OMPI_COMM_WORLD_"),
    }[launcher]
    with contextlib.ExitStack() as stack:
        for rank in range(world_size):
            values = {f"{prefix}{name}": str(world_size if name in ("NTASKS", "SIZE") else rank) for name in numbers}
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SLURM_STEP_ID": "0"}
            read, written = zip(*(Pipe(duplex=False) for _ in OUTPUTS), strict=True)
            surroundings = Surroundings(os.environ | values | meeting, dict(zip(OUTPUTS, written, strict=True)))
            processes.append(process_context().Process(target=serve_or_run, args=(surroundings, case)))
            processes[-1].start()
            surroundings.close()
            stack.callback(processes[-1].join)
            stack.callback(processes[-1].kill)
            outputs.append([stack.enter_context(open(os.dup(end.fileno()))) for end in read])
        yield processes, outputs


HOST = socket.gethostname()
AGAIN = str([(0, 3), (1, 3), (2, 3)])
LOST = f"rank 1 on {HOST} was lost; start the program again"


@pytest.mark.parametrize(
    ("case", "launcher", "says", "statuses"),
    [
        (
            "some",
            "srun",
            [
                f"{AGAIN} [(0, 2), (1, 2)]\n[2, 2]\n['0', '1', '2'] True\n",
                f"rank 1 on {HOST} failed: ArithmeticError: the sums do not add up; the other ranks",
                f"\n{AGAIN}\n",
            ],
            [0, 0, 0],
        ),
        ("exit", "mpirun", [f"rank 1 on {HOST} exited without reporting an error", LOST], [1, 17, 0]),
        ("hang", "mpirun", ["ranks [1] were still running at the time-out", LOST], [1, 1, 0]),
    ],
)
def test_rank_0_has_the_ranks_of_a_launcher(case, launcher, says, statuses):
    """A pool may have some of them. After a failure they join again, unless they are lost. Nodes share a clock."""
    with as_launched(case, 3, launcher) as (processes, files):
        outputs = [[file.read() for file in one] for one in files]
        for process in processes:
            process.join()
    assert [part for part in says if part not in "".join(outputs[0])] == [], outputs
    assert [process.exitcode for process in processes] == statuses
    if not any(statuses):
        assert [output for output, _ in outputs[1:]] == ["", ""]


def test_the_others_end_with_rank_0():
    with as_launched("wait", 2, "srun") as ((first, second), files):
        assert files[0][0].readline() == "ready\n"
        first.kill()
        assert [file.read() for file in files[1]] == ["", ""]
        second.join()
        assert second.exitcode == 1
