"""Tutorial 4's ranks: what can be watched of the reducer, and how it refuses."""

from collections.abc import Sequence

from torch import nn

from reference.data_parallel import DistributedDataParallel

INPUTS = 8


def plans_that_differ(rank: int, _world_size: int) -> None:
    """Each rank is told another plan."""
    DistributedDataParallel(
        nn.Linear(INPUTS, 1), plan=[["weight"], ["bias"]] if rank == 0 else [["bias"], ["weight"]]
    )


def launches_after(ready: Sequence[int]) -> list[tuple[int, int]]:
    """Each bucket in launch order, with the bucket whose readiness let it go."""
    launched: list[tuple[int, int]] = []
    for place, bucket in enumerate(ready):
        full = set(ready[: place + 1])
        while len(launched) in full:
            launched.append((len(launched), bucket))
    return launched
