"""Models that the command line is told to use."""

import torch
from torch import nn


def tiny() -> tuple[nn.Module, object]:
    """A model that trains in a millisecond, with buffers."""
    module = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
    batch = torch.randn(4, 64)
    return module, lambda model: model(batch).square().mean()


def telling() -> tuple[nn.Module, object]:
    """Says on the command's standard output that a rank computes, once."""
    module, loss_fn = tiny()
    told: list[bool] = []

    def loss(model: nn.Module) -> torch.Tensor:
        if not told:
            told.append(True)
            print("computing", flush=True)
        return loss_fn(model)

    return module, loss


def not_a_pair() -> nn.Module:
    """Forgets the loss."""
    return nn.Linear(1, 1)


def loss_is_a_number() -> tuple[nn.Module, object]:
    """Returns what a script prints."""
    module, loss_fn = tiny()
    return module, lambda model: loss_fn(model).item()


def needs_a_batch(batch: int) -> tuple[nn.Module, object]:
    """Has no default."""
    return tiny()


not_callable = 7
