"""Rank functions of tutorial 7: training with different numbers of batches on each rank."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from reference.data_parallel import DistributedDataParallel
from reference.join import Join

INPUTS, BATCH = 4, 8


class Trained(NamedTuple):
    """Result of the training on one rank.

    Attributes:
        batches: Number of batches that the rank trained on.
        parameters: Parameters at the end.
        updated: Number of parameters for which this rank keeps optimiser state.
    """

    batches: int
    parameters: list[Tensor]
    updated: int


def train_joined(rank: int, _world_size: int, batches: Sequence[int], sharded: bool) -> Trained:  # noqa: FBT001
    """Train with Join; `sharded`: with torch's `ZeroRedundancyOptimizer`, which divides its state among the ranks."""
    return _train(rank, batches[rank], join=True, sharded=sharded)


def train_with_zeros(rank: int, _world_size: int, batches: Sequence[int]) -> Trained:
    """Train without Join; a rank whose batches are used up continues with gradients of zero."""
    return _train(rank, batches[rank], join=False, sharded=False, zeros=max(batches) - batches[rank])


def _train(rank: int, batches: int, *, join: bool, sharded: bool, zeros: int = 0) -> Trained:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = _optimizer(ddp, sharded=sharded)
    joined: list[Any] = [ddp, optimizer] if sharded else [ddp]
    context: AbstractContextManager[Any] = Join(joined) if join else nullcontext()
    trained = 0
    with context:
        for step in range(batches + zeros):
            inputs = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.zero_grad(set_to_none=False)
            counts = step < batches
            (counts * (ddp(inputs) - inputs.sum(1, keepdim=True)).square().mean()).backward()
            optimizer.step()
            trained += counts
    parameters = [parameter.detach() for parameter in ddp.parameters()]
    inner = optimizer.optim if sharded else optimizer
    return Trained(trained, parameters, sum(len(group["params"]) for group in inner.param_groups))


def _optimizer(ddp: nn.Module, *, sharded: bool) -> Any:
    if not sharded:
        return torch.optim.Adam(ddp.parameters(), lr=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations, on import
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
