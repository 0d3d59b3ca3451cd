"""Checked launch order (`debug=True`): names the rank that launched something else.

Each launch is compared with what other ranks have launched at its place among all launches of the group, because
collectives of equal size that cross would add up what does not belong together. The ranks are also compared when
waiting for a collective raises, as with Gloo. With NCCL the host does not wait. After a
hang or an asynchronous error its watchdog ends the process; torch's flight recorder has the launches of each rank.
"""

import warnings
from collections import Counter
from typing import ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..errors import LaunchOrderError

KEPT = 256
"""Number of launches of each rank that the store keeps."""
_constructed: Counter[str] = Counter()  # modules by group; ranks construct the modules of a group in the same order


def new_series(group: dist.ProcessGroup) -> str:
    """A name for the launches of a module that all ranks of `group` are constructing; the same on every rank.

    Copies and pickles of the module keep the name. If copies got names of their own, a copy made on a single
    rank would shift the names of all modules constructed afterwards on that rank.
    """
    _constructed[group.group_name] += 1
    return f"{group.group_name}/{_constructed[group.group_name]}"


class CheckedLaunchOrder:
    """Writes every launch, numbered, into the process group's store, and compares the ranks.

    All modules of the group share one numbering. A module and its copies share a name, the `series`, so a copy that
    is never trained changes nothing.
    """

    _launches: ClassVar[Counter[str]] = Counter()  # by group

    def __init__(self, group: dist.ProcessGroup, series: str) -> None:
        self._group = group
        self.series = series
        store = dist.distributed_c10d._get_process_group_store(group)
        self._store = PrefixStore(f"ddplab/launches/{group.group_name}", store)
        self._rank = dist.get_rank(group)
        self._warned = False

    def launching(self, bucket: int, size_bytes: int, iteration: int) -> int:
        """Write the launch into the store before its collective is issued, which may never return.

        Returns its number. Raises LaunchOrderError if another rank's bucket at this place has another size or module.
        """
        name = self._group.group_name
        self._launches[name] += 1
        number, what = self._launches[name], f"bucket {bucket} ({size_bytes} bytes) of module {self.series}"
        self._store.set(f"{self._rank}/{number}", f"{what} in iteration {iteration}")
        self._store.set(f"{self._rank}/last", str(number))
        if number > KEPT:
            self._store.delete_key(f"{self._rank}/{number - KEPT}")
        for rank in set(range(self._group.size())) - {self._rank}:
            if not (theirs := self._read(rank, number)):
                continue
            message = (
                f"rank {self._rank}: launch {number} of this rank is {what} in iteration {iteration}, "
                f"that of rank {rank} {theirs}: they do not belong together"
            )
            if not theirs.startswith(f"{what} in iteration "):
                raise LaunchOrderError(self._rank, message)
            if not theirs.endswith(f" {iteration}") and not self._warned:
                self._warned = True
                warnings.warn(f"{message}, unless one rank ran further forward passes", stacklevel=2)
        return number

    def explain(self, launch: int) -> str:
        """Describe which ranks launched something else, or nothing, as launch number `launch`."""
        mine = self._bucket(self._rank, launch)
        lines = [f"rank {self._rank} waited for launch {launch}, {mine}"]
        for rank in range(dist.get_world_size(self._group)):
            last = int(self._read(rank, "last") or 0)
            if last < launch:
                before = f"its last was launch {last}, {self._bucket(rank, last)}" if last else "it launched none"
                lines.append(f"rank {rank} left the order: it never came to launch {launch}; {before}")
            elif (theirs := self._bucket(rank, launch)) not in ("", mine):
                lines.append(f"rank {rank} left the order: its launch {launch} was {theirs}")
        if len(lines) == 1:
            lines.append("all ranks launched the same: a rank or the network was too slow, or a rank ended")
        return "; ".join(lines)

    def _bucket(self, rank: int, launch: int) -> str:
        return self._read(rank, launch).partition(" of module ")[0]

    def _read(self, rank: int, launch: int | str) -> str:
        """What a rank has written; empty: nothing."""
        key = f"{rank}/{launch}"
        return self._store.get(key).decode() if self._store.check([key]) else ""
