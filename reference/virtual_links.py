"""Virtual links: each rank of one machine runs in its own network namespace, on a link of a given rate.

Each rank is connected to a bridge by a virtual Ethernet pair, like a machine to a switch. With uplinks, the ranks of
a node share a bridge, and each of these bridges is connected to one in the middle. A token-bucket filter (tc-tbf(8))
at both ends of a pair limits both directions. The namespaces have no names: the kernel removes them when the last
process that holds them open exits, so nothing is left behind, even if the launcher is killed. Linux only; needs root
and the commands ip, tc and nsenter.
"""

import contextlib
import ctypes
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import NamedTuple, Self

from .errors import LinkError

DEVICE = "wire"
"""Name of the network interface that connects a rank to the others."""

MAX_RANKS = 250
"""The ranks have the addresses 10.0.0.1 to 10.0.0.250, which exist only inside the namespaces."""

BURST_S = 0.0005
"""Burst that may exceed the rate, as seconds at that rate; short compared with the all-reduce of a large bucket."""
MTU_BYTES = 9000
"""Jumbo frames, as in data centres: with 1500 bytes, the kernel would spend several times as long on packets."""
LEAST_BURST_BYTES = 2 * MTU_BYTES
TCP_SETTINGS = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
"""A link's rate is fixed, so TCP need not look for it: neither by reducing its rate from time to time, as BBR does,
nor after a pause, as between two iterations."""
QUEUE_BYTES = 64 * 2**20
"""Length of the filter's queue: with it, no packet was lost with the ranks and rates tried, as in a network with flow
control. Several links feed one uplink, whose queue would overflow if it were short."""

CLONE_NEWNET = 0x40000000
FACTORS = {None: 1e9, "": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
"""Bits per second of each unit, by its first letter; None: a number without a unit, in Gbit/s."""


def bits_per_s(text: str) -> float:
    """Parse a rate such as `1gbit`, `500mbit` or `2.5Gbit/s`; a number without a unit is in Gbit/s.

    Raises:
        ValueError: The text is not a rate, or the rate is not above 0.
    """
    match = re.fullmatch(r"(\d*\.?\d+)\s*(?:([kmg]?)(?:bits?/s|bits?|bps))?", text.strip().lower())
    rate = float(match[1]) * FACTORS[match[2]] if match else 0.0
    if rate <= 0:
        raise ValueError(f"link rate: expected a rate above 0, such as 1gbit, 500mbit or 2.5 (Gbit/s), got {text!r}")
    return rate


class Uplinks(NamedTuple):
    """Links between nodes.

    Attributes:
        ranks_per_node: Ranks 0 to `ranks_per_node` - 1 are in the first node, and so on; the last may have fewer.
        rate: Rate of each node's uplink in each direction, in bits per second.
    """

    ranks_per_node: int
    rate: float


class Links:
    """A network namespace for each rank, and one for the bridges; use as a context manager, or call `close`.

    Args:
        world_size: Number of ranks.
        rate: Rate of each rank's link in each direction, in bits per second.
        uplinks: Links between nodes. None: all ranks are in one node.

    Raises:
        LinkError: Virtual links are not possible on this machine or for this user; the message names the cause.
    """

    def __init__(self, world_size: int, rate: float, uplinks: Uplinks | None = None) -> None:
        if world_size > MAX_RANKS:
            raise LinkError(f"links: expected at most {MAX_RANKS} ranks, got {world_size}")
        self._open: list[int] = []
        try:
            hub = self._namespace()
            _add_bridge(hub, "hub")
            per_node = world_size if uplinks is None else uplinks.ranks_per_node
            if uplinks is not None:
                for node in range(-(-world_size // per_node)):
                    _add_node(hub, f"node{node}", uplinks.rate)
            bridges = ["hub" if uplinks is None else f"node{rank // per_node}" for rank in range(world_size)]
            self._ranks = [self._connect(hub, rank, rate, bridge) for rank, bridge in enumerate(bridges)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the namespaces; the kernel removes each when its last process exits."""
        while self._open:
            os.close(self._open.pop())

    def namespace(self, rank: int) -> str:
        """Path of a rank's namespace, for `enter`."""
        return _path(self._ranks[rank])

    def _namespace(self) -> int:
        made = _new_namespace()
        self._open.append(made)
        return made

    def _connect(self, hub: int, rank: int, rate: float, bridge: str) -> int:
        own, port = self._namespace(), f"rank{rank}"
        _run(
            hub, f"ip link add {port} mtu {MTU_BYTES} type veth peer name {DEVICE} mtu {MTU_BYTES} netns {_path(own)}"
        )
        _run(hub, f"ip link set {port} master {bridge} up")
        _run(own, f"ip address add 10.0.0.{rank + 1}/24 dev {DEVICE}")
        _run(own, f"ip link set {DEVICE} up")
        _run(own, "ip link set lo up")
        _limit(hub, port, rate)
        _limit(own, DEVICE, rate)
        return own


def enter(namespace: str) -> None:
    """Move this thread, and all threads that it starts from now on, into a namespace.

    Args:
        namespace: Path from `Links.namespace`.

    Raises:
        LinkError: The user has no permission to do so.
    """
    held = os.open(namespace, os.O_RDONLY)
    try:
        _call("setns", held, CLONE_NEWNET)
    finally:
        os.close(held)


def _new_namespace() -> int:
    """Make a namespace and return its file descriptor; runs in its own thread, which unshare(2) moves."""
    made: list[int | LinkError] = []

    def make() -> None:
        try:
            _call("unshare", CLONE_NEWNET)
            own = Path("/proc/self/task") / str(threading.get_native_id())
            made.append(os.open(own / "ns/net", os.O_RDONLY))
            for name, value in TCP_SETTINGS.items():
                with contextlib.suppress(OSError):  # not compiled into this kernel, or not permitted in a container
                    Path("/proc/sys/net/ipv4", name).write_text(value)
        except LinkError as error:
            made.append(error)
        except OSError as error:
            made.append(LinkError(_needs(f"{error.filename}: {error.strerror}")))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], LinkError):
        raise made[0]
    return made[0]


def _call(name: str, *arguments: int) -> None:
    """Make a Linux system call through the C library."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise LinkError(_needs(f"the system call {name} is missing"))
    if function(*arguments):
        raise LinkError(_needs(f"{name}: {os.strerror(ctypes.get_errno())}"))


def _add_bridge(hub: int, bridge: str) -> None:
    _run(hub, f"ip link add {bridge} type bridge")
    _run(hub, f"ip link set {bridge} up")


def _add_node(hub: int, bridge: str, rate: float) -> None:
    """Add the bridge of a node, and its uplink to the bridge in the middle."""
    _add_bridge(hub, bridge)
    up, down = f"{bridge}up", f"{bridge}down"
    _run(hub, f"ip link add {up} mtu {MTU_BYTES} type veth peer name {down} mtu {MTU_BYTES}")
    for device, master in ((up, bridge), (down, "hub")):
        _run(hub, f"ip link set {device} master {master} up")
        _limit(hub, device, rate)


def _limit(namespace: int, device: str, rate: float) -> None:
    burst = max(LEAST_BURST_BYTES, round(rate / 8 * BURST_S))
    _run(namespace, f"tc qdisc add dev {device} root tbf rate {rate:.0f}bit burst {burst} limit {QUEUE_BYTES}")


def _run(namespace: int, command: str) -> None:
    words = ["nsenter", f"--net={_path(namespace)}", *command.split()]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        raise LinkError(_needs("nsenter is missing")) from None
    if done.returncode:
        error = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[0]
        raise LinkError(_needs(f"`{command}` failed: {error}"))


def _path(descriptor: int) -> str:
    """A path under which other threads of this process, and its children, open the same file."""
    return str(Path("/proc") / str(os.getpid()) / "fd" / str(descriptor))


def _needs(problem: str) -> str:
    """Error message: the requirements of virtual links, and the problem."""
    return (
        "links of a given rate: expected Linux, root, and the commands ip, tc and nsenter (Debian: apt-get install "
        f"iproute2 util-linux); {problem}. Without --link-rate ranks use the loopback interface"
    )
