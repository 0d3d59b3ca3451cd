"""Buffers: sent when torch sends them, and never in the way of a backward pass."""

import warnings

import torch
from torch import nn

from ddplab.reference.data_parallel import DistributedDataParallel


def local_buffers(rank: int, _world_size: int) -> bool:
    module = nn.Linear(1, 1)
    module.register_buffer("own", torch.full((1 + rank,), float(rank)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ddp = DistributedDataParallel(module, broadcast_buffers=False)
    ddp(torch.ones(1, 1)).sum().backward()
    return bool((module.own == rank).all())


def test_buffers_that_stay_local_may_differ(two_ranks):
    """With broadcast_buffers=False nothing is ever done with them."""
    assert all(two_ranks.run(local_buffers))
