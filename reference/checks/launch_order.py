"""Checked launch order (`debug=True`): names the rank that launched something else when a collective times out."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

KEPT = 256
"""Launches a rank remembers in the store."""


class LaunchOrder:
    """Notified of every launch. This class trusts the order and costs nothing."""

    def launching(self, bucket: int, size_bytes: int) -> None:
        """A bucket's collective is about to be issued."""

    def explain(self, launch: int) -> str:
        """What is known about the collective that was launched as number `launch` and failed; empty: nothing."""
        return ""

    @property
    def launches(self) -> int:
        """Launches so far."""
        return 0


@dataclass(frozen=True)
class Launch:
    """What a rank says of one launch."""

    bucket: int
    size_bytes: int

    def __str__(self) -> str:
        return f"bucket {self.bucket} ({self.size_bytes} bytes)"

    def encode(self) -> str:
        """As the store keeps it."""
        return f"{self.bucket} {self.size_bytes}"

    @classmethod
    def decode(cls, text: bytes) -> "Launch":
        """The inverse of `encode`."""
        return cls(*map(int, text.split()))


class CheckedLaunchOrder(LaunchOrder):
    """Every rank writes its launches into the group's store, numbered; after a failure they are compared.

    Args:
        group: The ranks.
    """

    _created: ClassVar[Counter[str]] = Counter()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        # Ranks create their reducers of a group in the same order, so counting tells them apart.
        self._created[group.group_name] += 1
        prefix = f"ddplab/order/{self._created[group.group_name]}"
        self._store = PrefixStore(prefix, dist.distributed_c10d._get_process_group_store(group))
        self._rank = dist.get_rank(group)
        self._launches = 0

    @property
    def launches(self) -> int:
        """Launches so far."""
        return self._launches

    def launching(self, bucket: int, size_bytes: int) -> None:
        """Write it down before it is issued: it may never return."""
        self._launches += 1
        self._store.set(f"{self._rank}/{self._launches}", Launch(bucket, size_bytes).encode())
        self._store.set(f"{self._rank}/last", str(self._launches))
        if self._launches > KEPT:
            self._store.delete_key(f"{self._rank}/{self._launches - KEPT}")

    def explain(self, launch: int) -> str:
        """Which ranks did something else, or nothing, as launch number `launch`."""
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
            lines.append("all ranks launched the same: a rank or the network was too slow, or died")
        return "; ".join(lines)

    def _read(self, rank: int, launch: int) -> Launch | None:
        key = f"{rank}/{launch}"
        return Launch.decode(self._store.get(key)) if self._store.check([key]) else None
