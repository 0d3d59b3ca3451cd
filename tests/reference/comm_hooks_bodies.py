"""Rank bodies of test_comm_hooks.py."""

from typing import Any
from unittest import mock

import torch.distributed as dist

from reference.data_parallel import DistributedDataParallel

from ..hook_bodies import Given, Shapes, given_gradients, register


def bytes_given(rank: int, _world_size: int, hook: str, shapes: Shapes) -> int:
    """Bytes that this rank passes to the collectives of one iteration."""
    given = []

    def count(name: str) -> Any:
        real = getattr(dist, name)

        def counted(*tensors: Any, **arguments: Any) -> Any:
            given.append(tensors[-1].nbytes)
            return real(*tensors, **arguments)

        return mock.patch.object(dist, name, counted)

    ddp = DistributedDataParallel(Given(shapes))
    register(ddp, hook)
    with count("all_reduce"), count("all_gather"):
        ddp(given_gradients(rank, shapes, 0, 0)).backward()
    return sum(given)
