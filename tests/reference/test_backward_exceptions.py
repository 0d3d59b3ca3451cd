"""Errors that end backward passes: of re-entrant ones, and of modules converted between two of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddplab.reference.data_parallel import DistributedDataParallel

from ..scenarios import assert_same, gradients


class Checkpointed(nn.Module):
    """One layer that re-entrant activation checkpoints share."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(2, 2), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def reentrant_checkpoints(rank: int, _world_size: int, times: int, static_graph: bool) -> tuple[str, list]:
    """Two iterations; returns the error's message, empty if there is none, and the gradients."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Checkpointed(times), static_graph=static_graph)
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


def test_a_layer_in_two_reentrant_checkpoints_is_an_error_without_a_static_graph(two_ranks):
    """The first checkpoint alone makes every gradient ready: averages made then would miss the second one."""
    for message, _ in two_ranks.run(reentrant_checkpoints, 2, False):
        assert "Expected to mark a variable ready only once. layer." in message
        assert "re-entrant backward passes" in message
        assert "static_graph=True" in message


@pytest.mark.parametrize(("times", "static_graph"), [(1, False), (2, True)])
def test_a_layer_in_a_reentrant_checkpoint_is_averaged(two_ranks, times, static_graph):
    (first, ours), (second, theirs) = two_ranks.run(reentrant_checkpoints, times, static_graph)
    assert (first, second) == ("", "")
    assert_same(ours, theirs)


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


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_layer_converted_after_wrapping_is_named_wherever_it_is_in_its_bucket(two_ranks, options):
    for message in two_ranks.run(converted_after_wrapping, options):
        assert "layers.1." in message
        assert "Convert the module before it is wrapped, not after." in message
