"""Rank bodies of test_logging_data.py."""

import torch
from torch import nn

from reference.data_parallel import DistributedDataParallel

from ..scenarios import mlp

TorchDDP = nn.parallel.DistributedDataParallel


def logging_data(rank: int, _world_size: int, options: dict) -> tuple[dict, dict]:
    both = []
    for wrapper in (DistributedDataParallel, TorchDDP):
        ddp = wrapper(mlp((4, 4, 4), torch.float32, 0), **options)
        for _ in range(6):
            ddp(torch.ones(1, 4)).sum().backward()
        both.append(ddp._get_ddp_logging_data())
    return tuple(both)
