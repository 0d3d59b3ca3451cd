"""Checked launch order (`debug=True`): after a failed collective, names the rank that launched something else.

The ranks are compared when waiting for a collective raises, as with Gloo. With NCCL the host does not wait. After a
hang or an asynchronous error its watchdog ends the process; torch's flight recorder has the launches of each rank.
"""

from collections import Counter
from typing import ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

KEPT = 256
"""Number of launches of each rank that the store keeps."""


def new_series(group: dist.ProcessGroup) -> str:
    """A name for the launches of a module that all ranks of `group` are constructing; the same on every rank.

    Copies and pickles of the module keep the name. If copies got names of their own, a copy made on a single
    rank would shift the names of all modules constructed afterwards on that rank.
    """
    _constructed[group.group_name] += 1
    return f"{group.group_name}/{_constructed[group.group_name]}"


_constructed: Counter[str] = Counter()  # modules by group; ranks construct the modules of a group in the same order


class CheckedLaunchOrder:
    """Writes every launch, numbered, into the process group's store, and compares the ranks after a failure.

    A module and its copies share one numbering, the `series`, so a copy that is never trained changes nothing.
    """

    _launches: ClassVar[Counter[str]] = Counter()  # by series

    def __init__(self, group: dist.ProcessGroup, series: str) -> None:
        self._group = group
        self.series = series
        self._store = PrefixStore(f"ddplab/order/{series}", dist.distributed_c10d._get_process_group_store(group))
        self._rank = dist.get_rank(group)

    @property
    def launches(self) -> int:
        """Number of launches so far, of the module and its copies."""
        return self._launches[self.series]

    def launching(self, bucket: int, size_bytes: int) -> int:
        """Write the launch into the store before its collective is issued, which may never return."""
        self._launches[self.series] += 1
        self._store.set(f"{self._rank}/{self.launches}", f"bucket {bucket} ({size_bytes} bytes)")
        self._store.set(f"{self._rank}/last", str(self.launches))
        if self.launches > KEPT:
            self._store.delete_key(f"{self._rank}/{self.launches - KEPT}")
        return self.launches

    def explain(self, launch: int) -> str:
        """Describe which ranks launched something else, or nothing, as launch number `launch`."""
        mine = self._read(self._rank, launch)
        lines = [f"rank {self._rank} waited for launch {launch}, {mine}"]
        for rank in range(dist.get_world_size(self._group)):
            last = int(self._store.get(f"{rank}/last")) if self._store.check([f"{rank}/last"]) else 0
            if last < launch:
                before = f"its last was launch {last}, {self._read(rank, last)}" if last else "it launched none"
                lines.append(f"rank {rank} left the order: it never came to launch {launch}; {before}")
            elif (theirs := self._read(rank, launch)) not in (None, mine):
                lines.append(f"rank {rank} left the order: its launch {launch} was {theirs}")
        if len(lines) == 1:
            lines.append("all ranks launched the same: a rank or the network was too slow, or a rank ended")
        return "; ".join(lines)

    def _read(self, rank: int, launch: int) -> str | None:
        key = f"{rank}/{launch}"
        return self._store.get(key).decode() if self._store.check([key]) else None
