"""Rank bodies of test_backward_exceptions.py: exceptions inside backward passes, and re-entrant ones."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reference.data_parallel import DistributedDataParallel

LAYERS = 5


class InterruptionError(Exception):
    """Raised by a hook of the model."""


class Chain(nn.Module):
    """Layers of integers, so that all sums are exact; `at`: the layer whose gradient hook raises, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((2,), float(1 + layer)) for layer in range(LAYERS))
        self.at: int | None = None
        for layer, weight in enumerate(self.weights):
            weight.register_hook(lambda gradient, layer=layer: self._check(layer, gradient))

    def _check(self, layer: int, gradient: Tensor) -> Tensor:
        if layer == self.at:
            raise InterruptionError(f"layer {layer}")
        return gradient

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + weight * x.detach()
        return x


def interrupted_training(
    rank: int, world_size: int, at: int, single_bucket: bool, options: dict[str, Any]
) -> tuple[list[list[float]], list[list[float]]] | str:
    """One good iteration or two, one that an exception ends on all ranks, a good one.

    Returns:
        The last gradients of this rank, and those of one process on the inputs of all ranks; or the message of the
        error that the next forward pass raised.
    """
    torch.manual_seed(0)
    module = Chain()
    cap = 25.0 if single_bucket else 1e-6
    ddp = DistributedDataParallel(module, bucket_cap_mb=cap, **options)
    for step, interrupted in enumerate((False, False, True, False)):
        ddp.zero_grad()
        module.at = at if interrupted else None
        try:
            ddp(inputs(rank, step)).sum().backward()
        except InterruptionError:
            assert interrupted
        except RuntimeError as error:
            assert step == 3, "the error belongs to the forward pass that follows"
            ddp.reducer.detach()
            return str(error)
    ddp.reducer.detach()
    return gradients(module), local_gradients(world_size, 3)


def local_gradients(world_size: int, step: int) -> list[list[float]]:
    """Gradients of one process that averages over the inputs of all ranks."""
    local = Chain()
    for rank in range(world_size):
        (local(inputs(rank, step)).sum() / world_size).backward()
    return gradients(local)


def inputs(rank: int, step: int) -> Tensor:
    return torch.arange(2.0) + 4 * rank + step


def gradients(module: nn.Module) -> list[list[float]]:
    return [parameter.grad.tolist() for parameter in module.parameters()]


def interrupted_under_no_sync(rank: int, world_size: int) -> tuple[list[list[float]], list[list[float]]]:
    """An exception under `no_sync`, then a synchronised iteration; returns its gradients, and the local ones."""
    module = Chain()
    ddp = DistributedDataParallel(module)
    module.at = 0
    with ddp.no_sync():
        try:
            ddp(inputs(rank, 0)).sum().backward()
        except InterruptionError:
            module.at = None
    ddp.zero_grad()
    ddp(inputs(rank, 1)).sum().backward()
    ddp.reducer.detach()
    return gradients(module), local_gradients(world_size, 1)


class CheckpointedTwice(nn.Module):
    """One layer that two re-entrant activation checkpoints share."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layer, x, use_reentrant=True)
        return checkpoint(self.layer, x, use_reentrant=True)


def reentrant_checkpoints(rank: int, _world_size: int, static_graph: bool) -> tuple[str, list[list[float]]]:
    """Two iterations; returns the error's message, empty if there is none, and the gradients."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(CheckpointedTwice(), static_graph=static_graph)
    try:
        for _ in range(2):
            ddp.zero_grad()
            x = torch.full((1, 2), float(rank + 1), requires_grad=True)
            ddp(x).sum().backward()
    except RuntimeError as error:
        return str(error), []
    finally:
        ddp.reducer.detach()
    return "", gradients(ddp.module)


class Mixed(nn.Module):
    """Three layers, of which the middle one may have another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x


def converted_after_wrapping(_rank: int, _world_size: int, options: dict[str, Any]) -> str:
    """Convert the middle layer, which is not the first of its bucket; returns the error's message."""
    ddp = DistributedDataParallel(Mixed(), **options)
    try:
        for step in range(4):
            if step == 2:
                ddp.module.layers[1].double()
            ddp(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)
    finally:
        ddp.reducer.detach()
    return ""
