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
    _of_all: ClassVar[Counter[str]] = Counter()  # by group

    def __init__(self, group: dist.ProcessGroup, series: str) -> None:
        self._group = group
        self.series = series
        store = dist.distributed_c10d._get_process_group_store(group)
        self._store = PrefixStore(f"ddplab/order/{series}", store)
        self._store_of_all = PrefixStore(f"ddplab/all_launches/{group.group_name}", store)
        self._rank = dist.get_rank(group)
        self._warned = False

    @property
    def launches(self) -> int:
        """Number of launches so far, of the module and its copies."""
        return self._launches[self.series]

    def launching(self, bucket: int, size_bytes: int, iteration: int) -> int:
        """Write the launch into the store before its collective is issued, which may never return.

        Raises LaunchOrderError if another rank has launched a bucket of another size or module at this place.
        """
        self._compare(f"{self.series} {bucket} {size_bytes}", iteration)
        self._launches[self.series] += 1
        self._store.set(f"{self._rank}/{self.launches}", f"bucket {bucket} ({size_bytes} bytes)")
        self._store.set(f"{self._rank}/last", str(self.launches))
        if self.launches > KEPT:
            self._store.delete_key(f"{self._rank}/{self.launches - KEPT}")
        return self.launches

    def _compare(self, what: str, iteration: int) -> None:
        self._of_all[self._group.group_name] += 1
        number = self._of_all[self._group.group_name]
        self._store_of_all.set(f"{self._rank}/{number}", f"{what} {iteration}")
        if number > KEPT:
            self._store_of_all.delete_key(f"{self._rank}/{number - KEPT}")
        for rank in set(range(self._group.size())) - {self._rank}:
            if not self._store_of_all.check([key := f"{rank}/{number}"]):
                continue
            theirs, _, their_iteration = self._store_of_all.get(key).decode().rpartition(" ")
            message = (
                f"rank {self._rank}: launch {number} of this rank is {_in_words(what)} in iteration {iteration}, "
                f"that of rank {rank} {_in_words(theirs)} in iteration {their_iteration}: they do not belong together"
            )
            if theirs != what:
                raise LaunchOrderError(self._rank, message)
            if their_iteration != str(iteration) and not self._warned:
                self._warned = True
                warnings.warn(f"{message}, unless one rank ran further forward passes", stacklevel=2)

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


def _in_words(what: str) -> str:
    series, bucket, size_bytes = what.rsplit(" ", 2)
    return f"bucket {bucket} ({size_bytes} bytes) of module {series}"
