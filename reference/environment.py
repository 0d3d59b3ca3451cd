"""Environment: what a rank's process settles before it joins the others, its network and its memory."""

import ctypes
import os
import socket
import sys

from .links import DEVICE, enter


def choose_network(namespace: str | None) -> None:
    """Let Gloo use the rank's virtual link; or the loopback interface: ranks that share a machine need no other."""
    if namespace is not None:
        enter(namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        return
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):
        if loopback in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def keep_freed_memory() -> None:
    """Tell glibc not to give memory back to the system between iterations.

    `zero_grad` frees every gradient and the next backward pass allocates them again. By default glibc returns
    such memory or keeps it depending on what was freed before, and every page that comes back costs a fault:
    with 120 MB of gradients the same iteration takes 110 or 165 ms by accident. (mallopt(3); elsewhere: no-op)
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_mmap_threshold, 32 * 2**20)  # the largest that glibc takes
