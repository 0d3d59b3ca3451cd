"""Rank bodies of test_compress.py."""

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from reference.data_parallel import DistributedDataParallel

from ..scenarios import mlp, mlp_batch


def train_compressed(rank: int, _world_size: int) -> float:
    """Largest relative difference between gradients averaged in bfloat16 and in float32."""
    gradients = []
    for hook in (None, default_hooks.bf16_compress_hook):
        ddp = DistributedDataParallel(mlp((4, 4), torch.float32, 0))
        if hook is not None:
            ddp.register_comm_hook(None, hook)
        ddp(mlp_batch((4,), torch.float32, rank, 3)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
    exact, compressed = gradients
    return float((exact - compressed).abs().max() / exact.abs().max())
