"""Rank bodies of test_data_parallel.py: training of small models, and the same on one process."""

import torch
from torch import Tensor, nn

from reference.data_parallel import DistributedDataParallel

from .. import scenarios
from ..scenarios import mlp, mlp_batch

TorchDDP = nn.parallel.DistributedDataParallel
BATCH = 4  # per rank; a power of two, so that means over integers are exact
Gradients = list[list[Tensor]]
"""By iteration, by parameter."""


def train_mlp(
    rank: int, world_size: int, wrapper: str, widths: tuple[int, ...], dtype: torch.dtype, seed: int, cap_mb: float
) -> Gradients:
    """Gradients of three iterations under "ours" or "torch"; no optimiser step in between."""
    module = mlp(widths, dtype, seed + rank)  # another seed on every rank: construction must make the ranks equal
    model = {"ours": DistributedDataParallel, "torch": TorchDDP}[wrapper](module, bucket_cap_mb=cap_mb)
    batch = mlp_batch(widths, dtype, seed, world_size * BATCH).split(BATCH)[rank]
    gradients = []
    for _ in range(3):
        model.zero_grad()
        model(batch).square().mean().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    return gradients


def compare_on_three_ranks(rank: int, _world_size: int) -> list[float]:
    """Largest relative difference to torch's gradients: plain, and as views zeroed in place."""
    differences = []
    for view in (False, True):
        both = []
        for wrapper in (DistributedDataParallel, TorchDDP):
            ddp = wrapper(mlp((8, 8, 8), torch.float32, 0), gradient_as_bucket_view=view)
            steps = scenarios.train(ddp, rank, shape=(3, 8), set_to_none=not view)
            both.append(torch.cat([tensor.flatten() for step in steps for tensor in step]))
        differences.append(float((both[0] - both[1]).abs().max() / both[1].abs().max()))
    return differences
