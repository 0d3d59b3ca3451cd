"""Ranks under a launcher: torchrun, srun or mpirun has started one process for each rank, on one or more nodes.

The process of rank 0 runs the program. Each other process is an *agent*: it starts a process when rank 0 asks it to,
and ends it. So `launch.RankPool` has the same ranks as on one machine, only elsewhere: a rank that hangs or is lost
can be ended and replaced, and a pool may have some of the ranks.

The agents find rank 0 at the launcher's master address. They connect to it by TCP, and so does each process that they
start. Connections are authenticated by a key that rank 0 puts into the store at that address.
"""

import contextlib
import os
import queue
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from .errors import Error
from .fork_server import Surroundings, ctrl_c_blocked, process_context, start_server

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

Result = TypeVar("Result")

MEETING_S = 300.0
"""How long processes wait for each other at the start; those of slow file systems import torch for minutes."""
LATE_S = 30.0
"""How long rank 0 stays at its end for processes that have not found it yet."""
END_S = 5.0
"""How long to wait for the end of a process on another node."""
PIPES = 3
"""Connections of each process: for messages, for its stack, and for its standard error."""


class Place(NamedTuple):
    """Place of this process among those that a launcher has started.

    Attributes:
        rank: Rank of the process.
        world_size: Number of processes.
        local_rank: Number of the process on its node.
        node: Name of the node, different for each; not always that of the machine.
        address: Where rank 0 is, or the launcher's store.
        port: Port of the store there.
        has_store: Whether the launcher has a store at that port. False: rank 0 opens it.
    """

    rank: int
    world_size: int
    local_rank: int
    node: str
    address: str
    port: int
    has_store: bool


def launched(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that a launcher has given this process; None if no launcher started it.

    A step of Slurm or MPI with a single task counts as none: interactive shells are such steps.

    Raises:
        Error: The launcher gave no address at which the processes could meet.
    """
    port = environment.get("MASTER_PORT")

    def place(rank: str, size: str, local_rank: str, node: str, address: str, default_port: int) -> Place:
        numbers = (int(environment[name]) for name in (rank, size, local_rank))
        has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Place(*numbers, node, address, int(port or default_port), has_store)  # type: ignore[call-arg,arg-type]

    if "TORCHELASTIC_RUN_ID" in environment:
        node = environment.get("GROUP_RANK", "0")
        return place("RANK", "WORLD_SIZE", "LOCAL_RANK", node, environment["MASTER_ADDR"], 29500)
    if "SLURM_STEP_ID" in environment and int(environment.get("SLURM_NTASKS", 1)) > 1:
        # The script of sbatch has all of these variables but SLURM_STEP_ID.
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "")
        address = environment.get("MASTER_ADDR") or first_host(hosts)
        own_port = 20_000 + int(environment.get("SLURM_JOB_ID", 0)) % 10_000  # two jobs may share a node
        names = "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"
        return place(*names, environment.get("SLURM_NODEID", "0"), address, own_port)
    if int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1:
        on_one_node = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == environment["OMPI_COMM_WORLD_SIZE"]
        address = environment.get("MASTER_ADDR") or ("127.0.0.1" if on_one_node else "")
        if not address:
            expected = "expected MASTER_ADDR, the host of rank 0, with mpirun on several nodes, got none"
            raise Error(f"mpirun: {expected}; add `-x MASTER_ADDR=HOST -x MASTER_PORT=29500`")
        names = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
        return place(*names, socket.gethostname(), address, 29500)
    return None


def first_host(nodes: str) -> str:
    """Return the first host of a list of Slurm's, such as `gpu[003-006,9],login1`.

    Raises:
        Error: The list is empty.
    """
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise Error(f"srun: expected a list of nodes in SLURM_STEP_NODELIST, got {nodes!r}; set MASTER_ADDR")
    return "".join(part or "" for part in match.groups())


def on_rank_0(main: Callable[[], Result]) -> Result:
    """Run a program: without a launcher in this process, with one in the process of rank 0.

    Every other process serves rank 0, and exits when the program has ended.

    Raises:
        SystemExit: In every other process, with status 0; with status 1 if rank 0 was lost.
        Error: The processes did not find each other.
    """
    place = launched()
    if place is None:
        return main()
    if place.rank:
        raise SystemExit(_serve(place))
    global _agents
    with Agents(place) as _agents:
        try:
            return main()
        finally:
            _agents = None


def agents() -> "Agents | None":
    """Return the agents in the process of rank 0 within `on_rank_0`; None elsewhere and without a launcher."""
    return _agents


_agents: "Agents | None" = None


class Process(Protocol):
    """What rank 0 does with a process, here or elsewhere."""

    @property
    def exitcode(self) -> int | None:
        """Exit status; None: it runs, or its node was lost."""

    def kill(self) -> None:
        """End the process at once."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""

    def signal(self, number: int) -> None:
        """Send it a signal."""


class ProcessHere:
    """A process of this machine."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self.kill, self.join = process.kill, process.join

    @property
    def exitcode(self) -> int | None:
        """Exit status; None: it runs."""
        return self._process.exitcode

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process.pid is not None  # it was started
        os.kill(self._process.pid, number)


def start_here(target: Callable[..., None], name: str, **arguments: Any) -> tuple[Process, list[Connection]]:
    """Start a process of this machine, which runs `target(pipes, surroundings, **arguments)`.

    Returns:
        The process, and our ends of its `PIPES`, of which only the first is for both directions.
    """
    pipes = [process_context().Pipe(duplex=number == 0) for number in range(PIPES)]
    ours, theirs = zip(*pipes, strict=True)
    return ProcessHere(_start(target, name, theirs, arguments)), list(ours)


def _start(
    target: Callable[..., None], name: str, pipes: Sequence[Connection], arguments: Mapping[str, Any]
) -> BaseProcess:
    surroundings = Surroundings()
    process = process_context().Process(target=target, args=(pipes, surroundings), kwargs=arguments, name=name)
    with ctrl_c_blocked():
        process.start()
    surroundings.close()
    for pipe in pipes:
        pipe.close()  # so that it ends when the process exits
    return process


# On rank 0


class Agent(NamedTuple):
    """What rank 0 knows of a process that the launcher has started, itself included.

    Attributes:
        place: Its place.
        host: Name of its machine.
        devices: Number of CUDA devices that it sees.
        control: What reaches it. None: it is this process.
    """

    place: Place
    host: str
    devices: int
    control: "Control | None"


class Control:
    """Requests to an agent, and its answers, one after the other.

    Attributes:
        connection: The connection to it.
        lost: Whether it has left a request without an answer; it then gets no others.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lost = False

    def call(self, *request: Any, timeout_s: float) -> Any:
        """Send a request to the agent, and return its answer; None if the agent is lost."""
        if not self.lost:
            with contextlib.suppress(EOFError, OSError):
                self.connection.send(request)
                if self.connection.poll(timeout_s):
                    return self.connection.recv()
            self.lost = True
        return None

    def exit(self) -> None:
        """Let the agent exit."""
        with contextlib.suppress(OSError):
            self.connection.send(("exit",))


class Agents(contextlib.AbstractContextManager["Agents"]):
    """The processes that the launcher has started, as rank 0 has them; at the end, all others exit.

    Raises:
        Error: The port of the store is taken.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._key = secrets.token_bytes(32)
        self._listener = Listener(("", 0), backlog=place.world_size * PIPES, authkey=self._key)
        self._agents = {0: Agent(place, socket.gethostname(), _devices(), None)}
        self._opened: dict[int, queue.Queue[Connection]] = {rank: queue.Queue() for rank in range(place.world_size)}
        self._changed = threading.Condition()
        self._closed = False
        self.address = address_for_others(place.address)
        """Address of this machine for the others."""
        threading.Thread(target=self._accept, daemon=True, name="agents").start()
        self._store = _store(place)
        self._store.set(_name(), repr((self.address, self._listener.address[1], self._key)))

    def __exit__(self, *_error: object) -> None:
        """Let every agent exit, also one that connects later."""
        with self._changed:
            self._closed = True
            for agent in self._agents.values():
                if agent.control is not None:
                    agent.control.exit()
        self._wait_for_all(LATE_S)

    def all(self) -> list[Agent]:
        """Return the processes by rank, this one first; wait until all of them have connected.

        Raises:
            Error: Some did not connect in time.
        """
        if missing := self._wait_for_all(MEETING_S):
            ranks = f"rank {missing[0]}" + (f" and {len(missing) - 1} others" if missing[1:] else "")
            raise Error(f"{ranks} did not connect to rank 0 at {self.address} within {MEETING_S:g} s")
        return [self._agents[rank] for rank in range(self.place.world_size)]

    def _wait_for_all(self, timeout_s: float) -> list[int]:
        """Return the ranks that have not connected in this time."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._agents) == self.place.world_size, timeout_s)
            return [rank for rank in range(self.place.world_size) if rank not in self._agents]

    def start(
        self, rank: int, target: Callable[..., None], name: str, **arguments: Any
    ) -> tuple[Process, list[Connection]]:
        """Start a process with one of the agents, as `start_here` does.

        Raises:
            Error: The agent was lost, or cannot start it.
        """
        agent = self.all()[rank]
        if agent.control is None:
            return start_here(target, name, **arguments)
        remote = RemoteProcess(agent.control)
        answer = agent.control.call("start", target, name, arguments, timeout_s=MEETING_S)
        if agent.control.lost or answer is not None:
            cause = "its node or its process was lost" if agent.control.lost else answer
            raise Error(f"rank {rank} on {agent.host} cannot start: {cause}")
        return remote, [self._opened[rank].get() for _ in range(PIPES)]

    def _accept(self) -> None:
        """Accept connections: the first one of each rank is that of its agent, then `PIPES` for each process."""
        while not self._closed or len(self._agents) < self.place.world_size:
            try:
                connection = self._listener.accept()
                greeting = connection.recv()
            except Exception:  # noqa: BLE001 - not one of ours, or one that was lost at once
                continue
            if isinstance(greeting, int):
                self._opened[greeting].put(connection)
                continue
            with self._changed:
                place, host, devices = greeting
                control = Control(connection)
                self._agents[place.rank] = Agent(place, host, devices, control)
                if self._closed:
                    control.exit()
                self._changed.notify_all()

    def addresses(self, ranks: Sequence[int]) -> list[str]:
        """Return the address of each rank's machine on the network that connects it to rank 0, or rank 0 to others.

        Where a machine is connected to several networks, these addresses name one that all machines share.
        """
        known = self.all()
        others = [agent.control for agent in known if agent.control and agent.place.node != self.place.node]
        own = _address_of(others[0], peer=False) if others else self.address
        controls = [known[rank].control for rank in ranks]
        return [own if control is None else _address_of(control, peer=True) for control in controls]


class RemoteProcess:
    """A process that an agent has started; each agent has one at a time."""

    def __init__(self, control: Control) -> None:
        self._control = control

    @property
    def exitcode(self) -> int | None:
        """Exit status; None: it runs, or its node was lost."""
        status: int | None = self._control.call("exitcode", timeout_s=END_S)
        return status

    def kill(self) -> None:
        """End the process at once."""
        self._control.call("kill", timeout_s=END_S)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, at most `END_S`."""
        self._control.call("join", min(timeout or END_S, END_S), timeout_s=2 * END_S)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._control.call("signal", number, timeout_s=END_S)


# In the other processes


def _serve(place: Place) -> int:
    """Start and end processes as rank 0 asks; return the exit status of this process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # end without a word, and with it the process that was started
    start_server()
    address, port, key = _rank_0(place)
    connect = partial(Client, (address, port), authkey=key)
    with connect() as control:
        control.send((place, socket.gethostname(), _devices()))
        agent = _Started(place.rank, connect)
        while True:
            answer: Any
            try:
                word, *arguments = control.recv()
                if word == "exit":
                    return 0
                answer = getattr(agent, word)(*arguments)
            except (EOFError, ConnectionError):
                agent.kill()  # otherwise Python waits for its end
                return 1
            except Exception as error:  # noqa: BLE001 - rank 0 reports it
                answer = f"{type(error).__name__}: {error}"
            control.send(answer)


class _Started:
    """The process that an agent has started, with the methods that rank 0 may call."""

    def __init__(self, rank: int, connect: Callable[[], Connection]) -> None:
        self._rank, self._connect = rank, connect
        self._process: ProcessHere | None = None

    def start(self, target: Callable[..., None], name: str, arguments: Mapping[str, Any]) -> None:
        self.kill()
        pipes = []
        for _ in range(PIPES):
            pipes.append(self._connect())
            pipes[-1].send(self._rank)
        self._process = ProcessHere(_start(target, name, pipes, arguments))

    def exitcode(self) -> int | None:
        return None if self._process is None else self._process.exitcode

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def join(self, timeout: float) -> None:
        if self._process is not None:
            self._process.join(timeout)

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.signal(number)


def _rank_0(place: Place) -> tuple[str, int, bytes]:
    """Return the address, port and key of rank 0."""
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
        return TCPStore(
            place.address,
            place.port,
            is_master=opens,
            timeout=timedelta(seconds=MEETING_S),
            wait_for_workers=False,
        )
    except DistNetworkError as error:
        expected = f"rank {place.rank} on {socket.gethostname()}: expected {'to open' if opens else 'to reach'}"
        cause = str(error).splitlines()[0]
        raise Error(
            f"{expected} {place.address}:{place.port}: {cause}; set MASTER_ADDR to the host of rank 0, and "
            "MASTER_PORT to a free port there"
        ) from None


def _devices() -> int:
    import torch

    return torch.cuda.device_count()


# Addresses


def address_for_others(address: str) -> str:
    """Return the address of this machine for processes that reach `address`: that one, if it is this machine's."""
    with socket.socket() as trial, contextlib.suppress(OSError):
        trial.bind((address, 0))
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((address, 9))  # sends nothing
        return str(route.getsockname()[0])


def _address_of(control: Control, *, peer: bool) -> str:
    with socket.socket(fileno=os.dup(control.connection.fileno())) as end:
        return str((end.getpeername() if peer else end.getsockname())[0])
