"""Rank bodies of test_lanes.py: training that is recorded in lanes."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from reference.data_parallel import DistributedDataParallel
from tutorials.lanes import Lane, recorded

GRADIENT_BYTES = 16


def lane_under_join(rank: int, _world_size: int, batches: tuple[int, ...]) -> Lane:
    """The lane of a rank that trains under Join; without batches it has shadows only."""
    ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False))
    with recorded() as lane, ddp.join():
        _iterate(ddp, lane, batches[rank])
    dist.barrier()
    return lane


def lane_without_join(rank: int, _world_size: int, batches: tuple[int, ...]) -> tuple[Lane, str]:
    """The lane of a rank whose all-reduces fail after two seconds without a match, and the error."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    ddp = DistributedDataParallel(nn.Linear(4, 1, bias=False), process_group=group)
    dist.barrier()
    with recorded() as lane:
        try:
            _iterate(ddp, lane, batches[rank])
        except RuntimeError as error:
            return lane, str(error)
    return lane, ""


def _iterate(ddp: nn.Module, lane: Lane, batches: int) -> None:
    for _ in range(batches):
        with lane.iteration():
            ddp(torch.ones(1, 4)).sum().backward()
