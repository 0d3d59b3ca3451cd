"""Settings of a rank's process: its cores, its memory, its network."""

import ctypes
import os
import sys
from collections.abc import Sequence

import psutil

LOOPBACK = "127.0.0.1"


def pin(rank: int, world_size: int) -> None:
    """Restrict this process to its rank's share of the cores; does nothing without Linux.

    The scheduler otherwise moves ranks and network threads between cores, at a cost that differs from run to run.
    """
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores_of(rank, world_size, sorted(os.sched_getaffinity(0))))


def cores_of(rank: int, world_size: int, available: Sequence[int]) -> list[int]:
    """Return a rank's share of the available cores.

    More ranks than cores take them in turn. If some cores would get more ranks than others, all ranks get all cores,
    so that the scheduler can share them out evenly.
    """
    if world_size > len(available) and world_size % len(available):
        return list(available)
    return list(available[rank % len(available) :: world_size])


def choose_network(address: str | None) -> None:
    """Make Gloo use the network of an address or, without one, the loopback interface."""
    for name, ends in psutil.net_if_addrs().items():
        if any(end.address == (address or LOOPBACK) for end in ends):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the system between iterations.

    `zero_grad` frees every gradient and the next backward pass allocates them again. By default glibc returns
    such memory or keeps it depending on what was freed before, and each page costs a fault when it is allocated
    again: with 120 MB of gradients the same iteration takes 110 or 165 ms by accident. Only with glibc's mallopt(3).
    """
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_mmap_max, 0)  # every tensor comes from memory that is kept, even those above 32 MiB
