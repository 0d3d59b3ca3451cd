"""Links: ranks of one machine in network namespaces of their own, joined by virtual links of a given rate.

Every rank has a virtual Ethernet pair to a bridge, as to a switch; a token-bucket filter (tc-tbf(8)) at either end
limits both directions. The namespaces have no names: they last as long as a process holds them open, so nothing is
left behind, however the launcher ends. Linux only; needs root and the commands ip, tc and nsenter.
"""

import ctypes
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Self

from .errors import LinkError

DEVICE = "wire"
"""The interface by which a rank reaches the others."""

MAX_RANKS = 250
"""Addresses are 10.0.0.1 to 10.0.0.250, within the namespaces only."""

BURST_S = 0.0005
"""What may pass at once, in seconds of the rate: half a millisecond is little beside any bucket."""
LEAST_BURST_BYTES = 64 * 1024
"""One segment as the kernel hands it over; smaller bursts would cut it up."""
QUEUE_S = 0.05
"""What may wait in the filter, in seconds of the rate; TCP backs off beyond."""

CLONE_NEWNET = 0x40000000
FACTORS = {None: 1e9, "": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
"""By a unit's first letter; a number alone counts Gbit/s."""


def bits_per_s(text: str) -> float:
    """A rate: `1gbit`, `500mbit`, `2.5Gbit/s`; a number alone is in Gbit/s.

    Raises:
        ValueError: It is something else, or not above 0.
    """
    match = re.fullmatch(r"(\d*\.?\d+)\s*(?:([kmg]?)(?:bits?/s|bits?|bps))?", text.strip().lower())
    rate = float(match[1]) * FACTORS[match[2]] if match else 0.0
    if rate <= 0:
        raise ValueError(f"link rate: expected such as 1gbit, 500mbit or 2.5 (Gbit/s), above 0; got {text!r}")
    return rate


class Links:
    """One namespace a rank, and a bridge between them in another; use as a context manager, or call `close`.

    Args:
        world_size: Number of ranks.
        rate: Of each rank's link, bits a second each way.

    Raises:
        LinkError: This machine or this user cannot have any; the message tells why and what to do.
    """

    def __init__(self, world_size: int, rate: float) -> None:
        if world_size > MAX_RANKS:
            raise LinkError(f"links: expected at most {MAX_RANKS} ranks, got {world_size}")
        self._open: list[int] = []
        try:
            hub = self._namespace()
            _run(hub, "ip link add hub type bridge")
            _run(hub, "ip link set hub up")
            self._ranks = [self._connect(hub, rank, rate) for rank in range(world_size)]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the namespaces; they end when the last rank has left them."""
        while self._open:
            os.close(self._open.pop())

    def namespace(self, rank: int) -> str:
        """Where a rank's namespace can be opened, by `enter`."""
        return _path(self._ranks[rank])

    def _namespace(self) -> int:
        made = _new_namespace()
        self._open.append(made)
        return made

    def _connect(self, hub: int, rank: int, rate: float) -> int:
        own, port = self._namespace(), f"rank{rank}"
        _run(hub, f"ip link add {port} type veth peer name {DEVICE} netns {_path(own)}")
        _run(hub, f"ip link set {port} master hub up")
        _run(own, f"ip address add 10.0.0.{rank + 1}/24 dev {DEVICE}")
        _run(own, f"ip link set {DEVICE} up")
        _run(own, "ip link set lo up")
        _limit(hub, port, rate)
        _limit(own, DEVICE, rate)
        return own


def enter(namespace: str) -> None:
    """Move this thread, and all threads that it starts from now on, into a namespace.

    Raises:
        LinkError: It may not.
    """
    held = os.open(namespace, os.O_RDONLY)
    try:
        _call("setns", held, CLONE_NEWNET)
    finally:
        os.close(held)


def _new_namespace() -> int:
    """Its file descriptor. A namespace belongs to a thread, so one is started that ends at once."""
    made: list[int | LinkError] = []

    def make() -> None:
        try:
            _call("unshare", CLONE_NEWNET)
            made.append(os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY))
        except LinkError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], LinkError):
        raise made[0]
    return made[0]


def _call(name: str, *arguments: int) -> None:
    """A system call of Linux's by way of the C library."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise LinkError(_needs(f"{name} is not there"))
    if function(*arguments):
        raise LinkError(_needs(f"{name}: {os.strerror(ctypes.get_errno())}"))


def _limit(namespace: int, device: str, rate: float) -> None:
    burst = max(LEAST_BURST_BYTES, round(rate / 8 * BURST_S))
    queue = burst + round(rate / 8 * QUEUE_S)
    _run(namespace, f"tc qdisc add dev {device} root tbf rate {rate:.0f}bit burst {burst} limit {queue}")


def _run(namespace: int, command: str) -> None:
    words = ["nsenter", f"--net={_path(namespace)}", *command.split()]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    except FileNotFoundError:
        raise LinkError(_needs("nsenter is not there")) from None
    if done.returncode:
        said = (done.stderr.splitlines() or ["nothing"])[0]
        raise LinkError(_needs(f"`{command}` said: {said}"))


def _path(descriptor: int) -> str:
    """By which this process's other threads, and its children, open the same file."""
    return str(Path("/proc") / str(os.getpid()) / "fd" / str(descriptor))


def _needs(seen: str) -> str:
    return (
        "links of a given rate: expected Linux, root, and the commands ip, tc and nsenter (Debian: apt-get install "
        f"iproute2 util-linux); {seen}. Without --link-rate ranks use the loopback interface"
    )
