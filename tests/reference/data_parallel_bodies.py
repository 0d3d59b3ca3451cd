"""Rank bodies of test_data_parallel.py: training of small models, and the same on one process."""

import torch
from torch import Tensor

from ..scenarios import CLASSES, Wrap, mlp, mlp_batch, on_both_classes, train

BATCH = 4  # per rank; a power of two, so that means over integers are exact
Gradients = list[list[Tensor]]
"""By iteration, by parameter."""


def train_mlp(
    rank: int, world_size: int, wrapper: str, widths: tuple[int, ...], dtype: torch.dtype, seed: int, cap_mb: float
) -> Gradients:
    """Gradients of three iterations under "ours" or "torch"; no optimiser step in between."""
    module = mlp(widths, dtype, seed + rank)  # another seed on every rank: construction must make the ranks equal
    model = CLASSES[wrapper](module, bucket_cap_mb=cap_mb)
    batch = mlp_batch(widths, dtype, seed, world_size * BATCH).split(BATCH)[rank]
    gradients = []
    for _ in range(3):
        model.zero_grad()
        model(batch).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    return gradients


@on_both_classes
def on_three_ranks(wrap: Wrap, rank: int, view: bool) -> Tensor:
    """Gradients and parameters of all steps in one tensor; if gradients are views, they are zeroed in place."""
    ddp = wrap(mlp((8, 8, 8), torch.float32, 0), gradient_as_bucket_view=view)
    steps = train(ddp, rank, shape=(3, 8), set_to_none=not view)
    return torch.cat([tensor.flatten() for step in steps for tensor in step])
