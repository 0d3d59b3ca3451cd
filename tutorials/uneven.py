"""Rank functions of tutorial 7: training with different numbers of batches on each rank."""

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket

from reference.comm_hooks.allreduce import allreduce
from reference.data_parallel import DistributedDataParallel
from reference.join import Join, Joinable, JoinHook

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


def train_plainly(rank: int, _world_size: int, batches: Sequence[int]) -> Trained:
    """Train until the batches of this rank are used up, without Join; ranks with more batches then hang."""
    return _train(rank, batches[rank], join=False, sharded=False)


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


def averages(
    rank: int,
    _world_size: int,
    batches: Sequence[int],
    divide_by_initial_world_size: bool,  # noqa: FBT001
) -> list[float]:
    """The averaged gradient in each iteration of this rank; the gradient of rank r is 2 (r + 1)."""
    model = nn.Linear(1, 1, bias=False)
    ddp = DistributedDataParallel(model)
    seen = []
    with ddp.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for _ in range(batches[rank]):
            model.zero_grad()
            ddp(torch.full((1, 1), 2.0 * (rank + 1))).sum().backward()
            assert model.weight.grad is not None
            seen.append(model.weight.grad.item())
    return seen


def count_iterations(rank: int, _world_size: int, batches: Sequence[int]) -> tuple[int, int]:
    """Number of iterations in which this rank's comm hook ran, and how many of them had no inputs."""
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    seen = []

    def counted(_state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        seen.append(bucket.index())
        return allreduce(None, bucket)

    ddp.register_comm_hook(None, counted)
    with ddp.join():
        for _ in range(batches[rank]):
            ddp(torch.ones(1, 1)).sum().backward()
        own = len(seen)
    return len(seen), len(seen) - own


class Samples(Joinable):
    """Counts the samples of all ranks by an all-reduce in each `add`; ranks without samples match it."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.matched = 0, 0

    def add(self, samples: int) -> None:
        """Add samples of this rank."""
        Join.notify_join_context(self)
        self._add_up(samples)

    def _add_up(self, samples: int) -> None:
        counted = torch.tensor(samples)
        dist.all_reduce(counted)
        self.total += int(counted)

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """The hook that a rank without samples runs while others have samples."""
        samples = self

        class MatchOne(JoinHook):
            def main_hook(self) -> None:
                samples.matched += 1
                samples._add_up(0)

        return MatchOne()

    @property
    def join_device(self) -> torch.device:
        """The device on which Join counts the active ranks."""
        return torch.device("cpu")

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks whose samples are counted."""
        group = dist.group.WORLD
        assert group is not None
        return group


def count_samples(rank: int, _world_size: int, batches: Sequence[int]) -> tuple[int, int]:
    """Number of samples of all ranks, and of all-reduces that this rank only matched."""
    samples = Samples()
    with Join([samples]):
        for _ in range(batches[rank]):
            samples.add(BATCH)
    return samples.total, samples.matched
