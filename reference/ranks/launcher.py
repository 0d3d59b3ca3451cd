"""Ranks under a launcher: torchrun, srun or mpirun has started one process for each rank, on one or more nodes.

The process of rank 0 runs the program, and starts rank 0 beside itself. Every other process is a rank: it connects to
the program by TCP and joins one pool of ranks (`launch.RankPool`) after the other, until the program ends. A pool may
have some of the ranks. One that hangs or is lost cannot be replaced.

The processes find the program at the launcher's master address, on one node at the loopback interface. Connections
are authenticated by a key that the program puts into the store at that address. Over several nodes, a process
that can read this store can run code in all others, as with torch: launch in trusted networks only.
"""

import contextlib
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pydantic import TypeAdapter

from ..errors import Error
from .process_settings import LOOPBACK

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

Result = TypeVar("Result")

MEETING_S = 300.0
"""How long processes wait for each other at the start; those of slow file systems import torch for minutes."""
PAUSE_S = 0.1
GREETING_S, LONGEST_GREETING = 10.0, 4096
"""How long a connection may take to say who it is, and the most bytes in which it may."""
LATE_S = 10.0
"""How long the program stays for processes that have not found it yet at its end, and these stay after its end."""
_launched_ranks: "LaunchedRanks | None" = None


class Place(NamedTuple):
    """Place of this process among those that a launcher has started.

    `local_rank` is its number on its node, and `node` a name that each node has for itself, not always that of the
    machine. Rank 0, or the launcher's store, is at `address`; the store has this port there, and without
    `has_store` rank 0 opens it. With `on_one_node`, all processes are on this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    address: str
    port: int
    has_store: bool
    on_one_node: bool


GREETING: TypeAdapter[tuple[Place, str, int] | None] = TypeAdapter(tuple[Place, str, int] | None)
"""What a process says first: its place, host and number of devices; None: it waits for the program's end."""


def launched(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that a launcher has given this process; None if no launcher started it.

    A step of Slurm or MPI with a single task counts as none: interactive shells are such steps. Raises Error if the
    launcher gave no address at which the processes could meet.
    """
    address, port = environment.get("MASTER_ADDR", ""), 29500
    if "TORCHELASTIC_RUN_ID" in environment:
        names, node = ("RANK", "WORLD_SIZE", "LOCAL_RANK"), environment.get("GROUP_RANK", "0")
        address, on_one_node = environment["MASTER_ADDR"], environment.get("GROUP_WORLD_SIZE") == "1"
    elif "SLURM_STEP_ID" in environment and int(environment.get("SLURM_NTASKS", 1)) > 1:
        # The script of sbatch has all of these variables but SLURM_STEP_ID.
        names, node = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), environment.get("SLURM_NODEID", "0")
        on_one_node = environment.get("SLURM_STEP_NUM_NODES") == "1"
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        address = address or first_host(hosts)
        port = 20_000 + int(environment.get("SLURM_JOB_ID", 0)) % 10_000  # two jobs may share a node
    elif int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
        node = socket.gethostname()
        on_one_node = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment["OMPI_COMM_WORLD_SIZE"]
        if not address and not on_one_node:
            expected = "expected MASTER_ADDR, the host of rank 0, with mpirun on several nodes, got none"
            raise Error(f"mpirun: {expected}; add `-x MASTER_ADDR=HOST -x MASTER_PORT=29500`")
    else:
        return None
    rank, world_size, local_rank = (int(environment[name]) for name in names)
    has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = LOOPBACK if on_one_node and not has_store else address
    port = int(environment.get("MASTER_PORT") or port)
    return Place(rank, world_size, local_rank, node, address, port, has_store, on_one_node)


def first_host(nodes: str) -> str:
    """Return the first host of a list of Slurm's, such as `gpu[003-006,9],login1`; raises Error if it is empty."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise Error(f"srun: expected a list of nodes in SLURM_STEP_NODELIST, got {nodes!r}; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def on_rank_0(main: Callable[[], Result]) -> Result:
    """Run a program: without a launcher in this process, with one in the process of rank 0.

    Every other process serves its pools as a rank, and exits when the program has ended: with status 0, or 1 if the
    program was lost. Raises Error if the processes did not find each other.
    """
    place = launched()
    if place is None:
        return main()
    if place.rank:
        raise SystemExit(_serve(place))
    global _launched_ranks
    with LaunchedRanks(place) as _launched_ranks:
        try:
            return main()
        finally:
            _launched_ranks = None


def launched_ranks() -> "LaunchedRanks | None":
    """Return the launcher's ranks in a program within `on_rank_0`; None elsewhere and without a launcher."""
    return _launched_ranks


# In the program


class LaunchedRank(NamedTuple):
    """What the program knows of a process that the launcher has started: `devices` are CUDA devices that it sees.

    Without a connection for messages, it is the program's own process.
    """

    place: Place
    host: str
    devices: int
    connection: Connection | None


class LaunchedRanks(contextlib.AbstractContextManager["LaunchedRanks"]):
    """The processes that the launcher has started; at the end, all others exit. Raises Error if the port is taken."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._key = secrets.token_bytes(32)
        self._listener = Listener((listening_at(place), 0), backlog=2 * place.world_size)
        self._ranks = {0: LaunchedRank(place, socket.gethostname(), _devices(), None)}
        self._watchers: list[Connection] = []
        self._changed = threading.Condition()
        self._closed = False
        self.address = LOOPBACK if place.on_one_node else address_for_others(place.address)
        """Address of this machine for the others."""
        threading.Thread(target=self._accept, daemon=True, name="launched ranks").start()
        self._store = _store(place)
        self._store.set(_name(), repr((self.address, self._listener.address[1], self._key)))

    def __exit__(self, *_error: object) -> None:
        """Let every process exit, also one that connects later."""
        with self._changed:
            self._closed = True
            for connection in [*self._watchers, *(one.connection for one in self._ranks.values() if one.connection)]:
                _let_exit(connection)
        self._wait_for_all(LATE_S)

    def all(self) -> list[LaunchedRank]:
        """Return the processes by rank when all have connected; raises Error if some have not in time."""
        if missing := self._wait_for_all(MEETING_S):
            ranks = f"rank {missing[0]}" + (f" and {len(missing) - 1} others" if missing[1:] else "")
            raise Error(f"{ranks} did not connect to rank 0 at {self.address} within {MEETING_S:g} s")
        return [self._ranks[rank] for rank in range(self.place.world_size)]

    def _wait_for_all(self, timeout_s: float) -> list[int]:
        """Return the ranks that have not connected in this time."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ranks) == self.place.world_size, timeout_s)
            return [rank for rank in range(self.place.world_size) if rank not in self._ranks]

    def _accept(self) -> None:
        """Accept two connections of each process: one to wait for the program's end on, one for messages."""
        while not self._closed or len(self._ranks) < self.place.world_size:
            try:
                threading.Thread(target=self._greet, args=(self._listener.accept(),), daemon=True).start()
            except OSError:  # a connection was lost at once, or there are too many
                time.sleep(PAUSE_S)  # no event says that a descriptor is free again; without a pause this would spin

    def _greet(self, connection: Connection) -> None:
        """Admit a process that knows the key; close any other connection, such as one that says nothing."""
        end = socket.socket(fileno=os.dup(connection.fileno()))
        timer = threading.Timer(GREETING_S, end.shutdown, [socket.SHUT_RDWR])
        timer.start()
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            greeting = GREETING.validate_json(connection.recv_bytes(LONGEST_GREETING))
            with self._changed:
                if greeting is None:
                    self._watchers.append(connection)
                elif (rank := greeting[0].rank) in self._ranks or not 0 < rank < self.place.world_size:
                    raise ValueError(f"expected a new rank, got {rank}")
                else:
                    self._ranks[rank] = LaunchedRank(*greeting, connection)
                if self._closed:
                    _let_exit(connection)
                self._changed.notify_all()
        except Exception:  # noqa: BLE001 - it is not one of ours, whatever it sent
            connection.close()
        finally:
            timer.cancel()
            end.close()

    def addresses(self, ranks: Sequence[int]) -> list[str]:
        """Return the address of each rank's machine on the network that connects it to rank 0, or rank 0 to others.

        Where a machine is connected to several networks, these addresses name one that all machines share.
        """
        known = self.all()
        others = [rank.connection for rank in known if rank.connection and rank.place.node != self.place.node]
        own = _address_of(others[0], peer=False) if others else self.address
        connections = [known[rank].connection for rank in ranks]
        return [own if connection is None else _address_of(connection, peer=True) for connection in connections]


def _let_exit(connection: Connection) -> None:
    with contextlib.suppress(OSError):
        connection.send(None)


# In the other processes


def _serve(place: Place) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # end without a word
    address, port, key = _rank_0(place)
    connect = partial(Client, (address, port), authkey=key)
    watcher = connect()
    watcher.send_bytes(GREETING.dump_json(None))
    threading.Thread(target=_end_with_program, args=(watcher,), daemon=True).start()
    with connect() as messages, contextlib.suppress(EOFError, ConnectionError):
        messages.send_bytes(GREETING.dump_json((place, socket.gethostname(), _devices())))
        while request := messages.recv():
            join, arguments = request
            join(messages, *arguments)
        return 0
    return 1


def _end_with_program(watcher: Connection) -> None:
    """End this process when the program was lost, or has ended some time ago, even while this rank runs a body."""
    with contextlib.suppress(EOFError, OSError):
        watcher.recv()
        time.sleep(LATE_S)  # a rank whose body ends within this time exits with its own status
    os._exit(1)


def _rank_0(place: Place) -> tuple[str, int, bytes]:
    import ast

    from torch.distributed import DistStoreError

    expected = f"rank {place.rank} on {socket.gethostname()}: expected rank 0 at {place.address}:{place.port}"
    try:
        address, port, key = ast.literal_eval(_store(place).get(_name()).decode())
    except (DistStoreError, RuntimeError) as error:
        raise Error(f"{expected} within {MEETING_S:g} s, got {str(error).splitlines()[0]}") from None
    return address, port, key


def _name() -> str:
    """Key in the store; torchrun starts all processes again after a failure, with the same store."""
    return f"ddplab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _store(place: Place) -> "TCPStore":
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistNetworkError

    opens = place.rank == 0 and not place.has_store
    try:
        if opens:
            return open_store(place, place.port)
        return TCPStore(place.address, place.port, is_master=False, timeout=timedelta(seconds=MEETING_S))
    except (DistNetworkError, OSError) as error:
        expected = f"rank {place.rank} on {socket.gethostname()}: expected {'to open' if opens else 'to reach'}"
        cause = str(error).splitlines()[0]
        raise Error(
            f"{expected} {place.address}:{place.port}: {cause}; set MASTER_ADDR to the host of rank 0, and "
            "MASTER_PORT to a free port there"
        ) from None


def open_store(place: Place, port: int = 0) -> "TCPStore":
    """Open a store on this machine, at any free port without one."""
    from torch._C._distributed_c10d import TCPStore

    listening = socket.create_server((listening_at(place), port))
    at, timeout = (LOOPBACK, listening.getsockname()[1]), timedelta(seconds=MEETING_S)
    return TCPStore(*at, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach())


def _devices() -> int:
    import torch

    return torch.cuda.device_count()


# Addresses


def listening_at(place: Place) -> str:
    """Return the address at which this machine listens: on one node that of the loopback interface, else all."""
    return LOOPBACK if place.on_one_node else ""


def address_for_others(address: str) -> str:
    """Return the address of this machine for processes that reach `address`: that one, if it is this machine's."""
    with socket.socket() as trial, contextlib.suppress(OSError):
        trial.bind((address, 0))
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((address, 9))  # sends nothing
        return str(route.getsockname()[0])


def _address_of(connection: Connection, *, peer: bool) -> str:
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        return str((end.getpeername() if peer else end.getsockname())[0])
