"""Functions of tutorial 4: an error of the reducer, and its launch order as a pure function."""

from collections.abc import Sequence

from torch import nn

from reference.data_parallel import DistributedDataParallel

INPUTS = 8


def plans_that_differ(rank: int, _world_size: int) -> None:
    """Construct with a different plan on each rank, which raises on all of them."""
    DistributedDataParallel(
        nn.Linear(INPUTS, 1), plan=[["weight"], ["bias"]] if rank == 0 else [["bias"], ["weight"]]
    )


def launches_after(ready: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs of a launched bucket and the bucket that became ready just before, in launch order.

    Args:
        ready: Bucket indices in ready order.
    """
    launched: list[tuple[int, int]] = []
    for place, bucket in enumerate(ready):
        full = set(ready[: place + 1])
        while len(launched) in full:
            launched.append((len(launched), bucket))
    return launched
