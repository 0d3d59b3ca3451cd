"""Virtual links: a launcher that runs each rank of a program in a network namespace, on a link of a given rate.

`python -m validation.virtual_links 4 10gbit -m ddplab validate --model resnet18` runs the program on 4 ranks, which
are connected by links of 10 Gbit/s; with the rate `10gbit,2:5gbit`, they are in nodes of 2, each with an uplink of
5 Gbit/s. The program finds its ranks as under torchrun.

Each rank is connected to a bridge by a virtual Ethernet pair, like a machine to a switch. With uplinks, the ranks of
a node share a bridge, and each of these bridges is connected to one in the middle. A token-bucket filter (tc-tbf(8))
at both ends of a pair limits both directions. The namespaces have no names: the kernel removes them when the last
process that holds them open exits, so nothing is left behind, even if the launcher is killed. Linux only; needs root.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ddplab.cli.shared_options import bits_per_s
from ddplab.reference.errors import Error

if TYPE_CHECKING:
    from pyroute2 import IPRoute

DEVICE = "wire"
"""Name of the network interface that connects a rank to the others."""

MAX_RANKS = 250
"""The ranks have the addresses 10.0.0.1 to 10.0.0.250, which exist only inside the namespaces."""

SLOWEST, FASTEST = 1e3, 34e9
"""Range of rates, in bits per second: the kernel's message has 32 bits for the rate and for the time of a burst."""
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


class LinkError(Error, OSError):
    """Network namespaces or virtual links are not possible on this machine or for this user."""


class Uplinks(NamedTuple):
    """Links between nodes.

    Attributes:
        ranks_per_node: Ranks 0 to `ranks_per_node` - 1 are in the first node, and so on; the last may have fewer.
        rate: Rate of each node's uplink in each direction, in bits per second.
    """

    ranks_per_node: int
    rate: float


class Links(contextlib.AbstractContextManager["Links"]):
    """A network namespace for each rank, and one for the bridges; use as a context manager, or call `close`.

    Each rank's link has this rate in each direction, in bits per second. Without `uplinks` all ranks are in one node.

    Raises:
        LinkError: Virtual links are not possible on this machine or for this user; the message names the cause.
    """

    def __init__(self, world_size: int, rate: float, uplinks: Uplinks | None = None) -> None:
        if world_size > MAX_RANKS:
            raise LinkError(f"links: expected at most {MAX_RANKS} ranks, got {world_size}")
        self._open: list[int] = []
        try:
            with ThreadPoolExecutor(1) as thread:  # `_enter_new_namespace` moves it
                thread.submit(self._make, world_size, rate, uplinks).result()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the namespaces; the kernel removes each when its last process exits."""
        while self._open:
            os.close(self._open.pop())

    def namespace(self, rank: int) -> str:
        """Path of a rank's namespace, for `enter`."""
        return f"/proc/{os.getpid()}/fd/{self._open[1 + rank]}"

    def _make(self, world_size: int, rate: float, uplinks: Uplinks | None) -> None:
        """Make all namespaces, and what is in them. A socket stays in the namespace in which it was opened."""
        try:
            from pyroute2 import IPRoute, NetlinkError
        except ImportError:
            raise LinkError(_needs("pyroute2 is missing")) from None
        try:
            self._open.append(_enter_new_namespace())
            with IPRoute() as hub:
                hub.link("add", ifname="hub", kind="bridge", state="up")
                if uplinks is not None:
                    for node in range(-(-world_size // uplinks.ranks_per_node)):
                        bridge = f"node{node}"
                        hub.link("add", ifname=bridge, kind="bridge", state="up")
                        _connect(hub, f"{bridge}up", {"ifname": f"{bridge}down"})
                        _switch_on(hub, f"{bridge}up", uplinks.rate, bridge=bridge)
                        _switch_on(hub, f"{bridge}down", uplinks.rate, bridge="hub")
                for rank in range(world_size):
                    self._open.append(_enter_new_namespace())
                    with IPRoute() as own:
                        _connect(hub, f"rank{rank}", {"ifname": DEVICE, "net_ns_fd": self._open[-1]})
                        bridge = "hub" if uplinks is None else f"node{rank // uplinks.ranks_per_node}"
                        _switch_on(hub, f"rank{rank}", rate, bridge=bridge)
                        _switch_on(own, DEVICE, rate, address=f"10.0.0.{rank + 1}")
                        own.link("set", ifname="lo", state="up")
        except NetlinkError as error:
            raise LinkError(_needs(f"the kernel refuses a link: {error}")) from None


def enter(namespace: str) -> None:
    """Move this thread, and all threads that it starts from now on, into a namespace, a path from `Links.namespace`.

    Raises:
        LinkError: The user has no permission to do so.
    """
    held = os.open(namespace, os.O_RDONLY)
    try:
        _call("setns", held, CLONE_NEWNET)
    finally:
        os.close(held)


def _enter_new_namespace() -> int:
    """Move this thread into a new namespace; return its file descriptor."""
    _call("unshare", CLONE_NEWNET)
    try:
        made = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    except OSError as error:
        raise LinkError(_needs(f"{error.filename}: {error.strerror}")) from None
    for name, value in TCP_SETTINGS.items():
        with contextlib.suppress(OSError):  # not compiled into this kernel, or not permitted in a container
            Path("/proc/sys/net/ipv4", name).write_text(value)
    return made


def _call(name: str, *arguments: int) -> None:
    """Make a Linux system call through the C library."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise LinkError(_needs(f"the system call {name} is missing"))
    if function(*arguments):
        raise LinkError(_needs(f"{name}: {os.strerror(ctypes.get_errno())}"))


def _connect(hub: "IPRoute", port: str, peer: dict[str, object]) -> None:
    hub.link("add", ifname=port, kind="veth", mtu=MTU_BYTES, peer=peer | {"mtu": MTU_BYTES})


def _switch_on(own: "IPRoute", device: str, rate: float, *, bridge: str = "", address: str = "") -> None:
    """Join a device to a bridge or give it an address, switch it on, and limit its rate."""
    if not SLOWEST <= rate <= FASTEST:
        raise LinkError(f"links: expected rates from 1 kbit/s to 34 Gbit/s, got {rate / 1e6:g} Mbit/s")
    (index,) = own.link_lookup(ifname=device)
    if bridge:
        own.link("set", index=index, master=own.link_lookup(ifname=bridge)[0])
    if address:
        own.addr("add", index=index, address=address, prefixlen=24)
    own.link("set", index=index, state="up")
    burst = max(LEAST_BURST_BYTES, round(rate / 8 * BURST_S))
    own.tc("add", "tbf", index=index, rate=round(rate / 8), burst=burst, limit=QUEUE_BYTES)


def _needs(problem: str) -> str:
    """Error message: the requirements of virtual links, and the problem."""
    return f"links of a given rate: expected Linux, root and pyroute2 (pip install pyroute2); {problem}"


# The launcher


def read_rates(text: str) -> tuple[float, Uplinks | None]:
    """Parse the rates of links and uplinks, such as `10gbit` and `10gbit,2:5gbit`, in bits per second.

    Raises:
        ValueError: The text has another form.
    """
    inside, _, uplinks = text.partition(",")
    ranks, _, uplink_rate = uplinks.partition(":")
    if not uplinks:
        return bits_per_s(inside), None
    if not (ranks.isdecimal() and int(ranks) > 0):
        raise ValueError(f"link rate: expected K:RATE after the comma, such as 4:1gbit, got {uplinks!r}")
    return bits_per_s(inside), Uplinks(int(ranks), bits_per_s(uplink_rate))


def run_linked(words: Sequence[object], world_size: int, rate: float, uplinks: Uplinks | None = None) -> int:
    """Run `python WORDS...` as every rank of a program; return the exit status of rank 0, which prints and writes.

    All ranks count as ranks of one machine, which they are: they share its cores and its clock.
    """
    with Links(world_size, rate, uplinks) as links:
        ranks = []
        for rank in range(world_size):
            place = {"TORCHELASTIC_RUN_ID": "links", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
            place |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 29500, "GLOO_SOCKET_IFNAME": DEVICE}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, *map(str, words)],
                    env=os.environ | {name: str(value) for name, value in place.items()},
                    preexec_fn=partial(enter, links.namespace(rank)),
                )
            )
        try:
            return ranks[0].wait()
        finally:
            for process in ranks:
                process.kill()
                process.wait()


if __name__ == "__main__":
    try:
        sys.exit(run_linked(sys.argv[3:], int(sys.argv[1]), *read_rates(sys.argv[2])))
    except (IndexError, ValueError, LinkError) as error:
        sys.exit(f"{error}\nusage: python -m validation.virtual_links RANKS RATE[,K:RATE] WORDS OF PYTHON...")
