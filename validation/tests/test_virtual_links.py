"""Virtual links: ranks in network namespaces of their own, at a given rate, of which nothing is left afterwards."""

import ast
import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ddplab.reference.launch import RankPool
from ddplab.reference.ranks.launcher import on_rank_0
from validation import virtual_links
from validation.virtual_links import DEVICE, LinkError, Links, Uplinks, read_rates, run_linked

ELEMENTS = 100_000
LAUNCHER = """
import os, sys
from validation.virtual_links import Links
links = Links(2, 1e9)
print(*[os.stat(links.namespace(rank)).st_ino for rank in range(2)], flush=True)
sys.stdin.read()
"""


def links_are_permitted() -> bool:
    """Whether this machine and this user can have any."""
    try:
        Links(1, 1e9).close()
    except LinkError:
        return False
    return True


# Only the kernel makes namespaces and links, for root on Linux alone: nothing could stand in for it.
NEEDS_LINKS = pytest.mark.skipif(not links_are_permitted(), reason="virtual links need Linux and root")


def reduce_and_look(rank: int, world_size: int) -> tuple[float, list[str], int, set[str]]:
    """The sum, this rank's interfaces, the bytes it sent, and what limits it."""
    total = torch.full([ELEMENTS], float(rank + 1))
    dist.all_reduce(total)
    dist.barrier()  # no rank has still to send
    from pyroute2 import IPRoute  # on Linux only

    with IPRoute() as own:
        sent = {link.get("ifname"): link.get("stats64")["tx_bytes"] for link in own.get_links()}
    return float(total[-1]), sorted(sent), sent[DEVICE], set(rates())


def rates() -> dict[str, float]:
    """Bytes per second of each limited device in this thread's namespace."""
    from pyroute2 import IPRoute

    with IPRoute() as own:
        names = {link["index"]: link.get("ifname") for link in own.get_links()}
        limits = [one for one in own.get_qdiscs() if one.get("kind") == "tbf"]
    return {names[one["index"]]: one.get("options").get("TCA_TBF_PARMS")["rate"] for one in limits}


def main(path: str) -> None:
    """The program of the test below: rank 0 writes what all ranks see."""

    def look() -> None:
        with RankPool(int(os.environ["WORLD_SIZE"]), timeout_s=60) as pool:
            Path(path).write_text(repr(pool.run(reduce_and_look)))

    on_rank_0(look)


@NEEDS_LINKS
@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(2, None), (3, 2)])
def test_ranks_reach_each_other_by_their_links_and_by_nothing_else(tmp_path, world_size, ranks_per_node):
    """A ring sends 2 (n - 1) / n of the message from each rank."""
    program = f"from {__name__} import main; main({str(tmp_path / 'seen')!r})"
    uplinks = None if ranks_per_node is None else Uplinks(ranks_per_node, 1e9)
    assert not run_linked(["-c", program], world_size, 1e9, uplinks)
    for total, devices, sent, limited in ast.literal_eval((tmp_path / "seen").read_text()):
        assert total == world_size * (world_size + 1) / 2
        assert devices == ["lo", DEVICE]
        assert sent >= 4 * ELEMENTS * 2 * (world_size - 1) // world_size
        assert limited == {DEVICE}


@NEEDS_LINKS
@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(3, 2), (4, 1), (2, 4)])
def test_links_and_uplinks_have_their_rates(world_size, ranks_per_node):
    with Links(world_size, 1e9, Uplinks(ranks_per_node, 2e8)) as links:
        hub = f"/proc/{os.getpid()}/fd/{links._open[0]}"
        with ThreadPoolExecutor(1, initializer=virtual_links.enter, initargs=(hub,)) as thread:
            found = thread.submit(rates).result()
    nodes = -(-world_size // ranks_per_node)
    expected = {f"node{node}{end}": 2e8 / 8 for node in range(nodes) for end in ("up", "down")}
    assert found == expected | {f"rank{rank}": 1e9 / 8 for rank in range(world_size)}


def namespaces(process: str = "[0-9]*") -> set[int]:
    """Network namespaces that this process, "self", or any of this machine is in or holds open, by inode."""
    found = set()
    for one in [*Path("/proc").glob(f"{process}/ns/net"), *Path("/proc").glob(f"{process}/fd/*")]:
        with contextlib.suppress(OSError):  # its process has ended
            if os.readlink(one).startswith("net:"):
                found.add(one.stat().st_ino)
    return found


@NEEDS_LINKS
def test_nothing_is_left_of_links_that_were_closed():
    before = namespaces()
    with Links(2, 1e9) as made:
        inside = {os.stat(made.namespace(rank)).st_ino for rank in range(2)}
        assert inside <= namespaces() - before
    assert not inside & namespaces()


@NEEDS_LINKS
def test_nothing_is_left_of_a_launcher_that_was_killed():
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with launcher:
        assert launcher.stdout is not None
        inside = set(map(int, launcher.stdout.readline().split()))
        assert len(inside & namespaces()) == 2
        launcher.send_signal(signal.SIGKILL)
        launcher.wait(timeout=30)
    assert not inside & namespaces()


# What goes wrong


@pytest.mark.parametrize("text", ["fast", "1gbit,2", "1gbit,:1gbit", "1gbit,0:1gbit", "1gbit,2:fast"])
def test_a_text_without_rates_is_refused(text):
    assert read_rates("10gbit,2:500mbit") == (1e10, Uplinks(2, 5e8))
    with pytest.raises(ValueError, match=r"^link rate: expected"):
        read_rates(text)


def test_too_many_ranks_are_refused():
    with pytest.raises(LinkError, match=r"^links: expected at most 250 ranks, got 251$"):
        Links(251, 1e9)


@NEEDS_LINKS
@pytest.mark.parametrize(("rate", "got"), [(1, "1e-06 Mbit/s"), (1e11, "100000 Mbit/s")])
def test_rates_that_no_link_can_have_are_refused(rate, got):
    with pytest.raises(LinkError, match=f"^links: expected rates from 1 kbit/s to 34 Gbit/s, got {got}$"):
        Links(2, rate)


def test_a_namespace_that_cannot_be_opened_is_reported_in_one_line():
    problem = OSError(24, "Too many open files", "/proc/self/ns/net")
    with (
        mock.patch.object(virtual_links, "_call"),  # so that this thread stays where it is
        mock.patch.object(os, "open", side_effect=problem),
        pytest.raises(LinkError, match=r"; /proc/self/ns/net: Too many open files$"),
    ):
        Links(2, 1e9)


NOT_PERMITTED = LinkError(virtual_links._needs("unshare: not permitted"))


@NEEDS_LINKS
@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (mock.patch.object(virtual_links, "_enter_new_namespace", side_effect=NOT_PERMITTED),
         "unshare: not permitted"),
        (mock.patch.dict(sys.modules, pyroute2=None), "pyroute2 is missing"),
        (
            mock.patch.object(virtual_links, "MTU_BYTES", 1),
            "the kernel refuses a link: .*22, 'Invalid argument'",
        ),
    ],
    ids=["not root", "no pyroute2", "kernel refuses"],
)  # fmt: skip
def test_missing_packages_and_permissions_are_reported_in_one_line(patch, message):
    before = namespaces("self")
    with patch, pytest.raises(LinkError, match=message) as caught:
        Links(2, 1e9)
    assert "pip install pyroute2" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert namespaces("self") == before
