"""A plain test of a data-parallel class, as many projects have it: gradients are close on a toy model.

Two ranks, a multi-layer perceptron, two iterations, compared on rank 0 with one process.
"""

import copy

import torch
from torch import nn

from ddplab.reference.data_parallel import DistributedDataParallel


def gradients_are_close(rank: int, world_size: int) -> None:
    """Train on every rank; on rank 0 compare each gradient with that of the whole batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (ddp, alone)]
    for _ in range(2):
        inputs, targets = torch.randn(8, 10), torch.randn(8, 4)
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs[rank::world_size]), targets[rank::world_size]).backward()
        nn.functional.mse_loss(alone(inputs), targets).backward()
        if rank == 0:
            for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
                assert torch.allclose(mine.grad, expected.grad, rtol=1e-4, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
