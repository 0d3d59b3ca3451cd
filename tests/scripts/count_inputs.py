"""Counts the inputs of two ranks, of which the second has one more: each iteration is an all-reduce."""

from typing import Any

import torch
import torch.distributed as dist

from reference.join import Join, Joinable, JoinHook
from reference.launch import run_ranks

INPUTS = 5


class CounterJoinHook(JoinHook):
    def __init__(self, counter: "Counter", *, sync_max_count: bool) -> None:
        super().__init__()
        self.counter = counter
        self.sync_max_count = sync_max_count

    def main_hook(self) -> None:
        """Match the all-reduce of the ranks that still count."""
        dist.all_reduce(torch.zeros(1))

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take the count of a rank that saw all iterations."""
        if self.sync_max_count:
            source = torch.tensor([dist.get_rank() if is_last_joiner else -1])
            dist.all_reduce(source, op=dist.ReduceOp.MAX)
            self.counter.max_count.copy_(self.counter.count)
            dist.broadcast(self.counter.max_count, src=int(source.item()))


class Counter(Joinable):
    """Counts over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.max_count = torch.zeros(1), torch.zeros(1)

    def __call__(self) -> None:
        Join.notify_join_context(self)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        self.count += ones

    def join_hook(self, **kwargs: Any) -> CounterJoinHook:
        return CounterJoinHook(self, sync_max_count=kwargs.get("sync_max_count", False))

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD


def count_inputs(rank: int, _world_size: int) -> list[str]:
    counter = Counter()
    with Join([counter], sync_max_count=True):
        for _ in range(INPUTS + rank):
            counter()
    return [
        f"{int(counter.count.item())} inputs processed before rank {rank} joined!",
        f"{int(counter.max_count.item())} inputs processed across all ranks!",
    ]


if __name__ == "__main__":
    for lines in run_ranks(count_inputs, 2, timeout_s=60):
        print("\n".join(lines))
