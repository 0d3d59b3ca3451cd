"""Ranks under a launcher: the place of a process by the launcher's variables, and processes that serve rank 0."""

import contextlib
import os
import pickle
import socket
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Client
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.errors import Error
from ddplab.reference.ranks import launcher
from ddplab.reference.ranks.fork_server import OUTPUTS, Surroundings, process_context
from ddplab.reference.ranks.launcher import LaunchedRanks, Place, address_for_others, first_host, launched
from ddplab.reference.ranks.process_settings import LOOPBACK

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
HOST = socket.gethostname()
OF_RANK_0 = {"has_store": False, "on_one_node": False}
ONE_NODE = OF_RANK_0 | {"on_one_node": True}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (TORCHRUN, Place(9, 16, 1, "1", "node1", 1234, has_store=True, on_one_node=False)),
        (TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, Place(9, 16, 1, "1", "node1", 1234, has_store=True, on_one_node=True)),
        (SRUN, Place(9, 16, 1, "1", "gpu003", 23456, **OF_RANK_0)),
        (SRUN | {"SLURM_STEP_NUM_NODES": "1"}, Place(9, 16, 1, "1", LOOPBACK, 23456, **ONE_NODE)),
        (SRUN | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}, Place(9, 16, 1, "1", "a", 5, **OF_RANK_0)),
        (MPIRUN, Place(9, 16, 1, HOST, "gpu003", 29500, **OF_RANK_0)),
        (
            MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "16"},
            Place(9, 16, 1, HOST, LOOPBACK, 29500, **ONE_NODE),
        ),
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


def test_connections_of_strangers_neither_stall_a_job_nor_run_code_in_it(monkeypatch, tmp_path):
    """Silent ones, garbage, and those that have the key but say what no rank says, as one by one they come first."""
    monkeypatch.setattr(launcher, "GREETING_S", 1.0)
    monkeypatch.setattr(launcher, "LATE_S", 0.0)
    monkeypatch.setattr(launcher, "MEETING_S", 20.0)
    place = Place(0, 2, 0, "0", LOOPBACK, free_port(), **ONE_NODE)
    mark = tmp_path / "mark"
    wrong = [*map(pickle.dumps, (None, (place, HOST, 0), Code(mark))), b"", b"[", b"[1, 2]", b"[" * 4000, b"x" * 9999]
    places = [place, place._replace(rank=2), place._replace(rank=-1), place._replace(rank=10**9)]
    with contextlib.ExitStack() as stack, LaunchedRanks(place) as ranks:
        at = ranks._listener.address
        assert {at[0], ranks.address} == {LOOPBACK}
        for sent in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 100, pickle.dumps(Code(mark))):
            stack.enter_context(socket.create_connection(at)).sendall(sent)
        for greeting in [*wrong, *(launcher.GREETING.dump_json((one, HOST, 0)) for one in places)]:
            stack.enter_context(Client(at, authkey=ranks._key)).send_bytes(greeting)
        for number in (0, 1, 2):  # the second one says that it is the same rank
            rank = stack.enter_context(Client(at, authkey=ranks._key))
            rank.send_bytes(launcher.GREETING.dump_json((place._replace(rank=1), HOST, number)))
            if number == 0:
                assert [one.devices for one in ranks.all()][1] == 0
        assert rank.poll(5), "it is closed"
        assert [one.devices for one in ranks.all()][1] == 0
    assert not mark.exists()


class Code:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_the_others_end_with_rank_0():
    with as_launched("wait", 2, "srun") as ((first, second), files):
        assert files[0][0].readline() == "ready\n"
        first.kill()
        assert [file.read() for file in files[1]] == ["", ""]
        second.join()
        assert second.exitcode == 1
