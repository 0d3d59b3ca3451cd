"""Rank bodies of test_post_local_sgd.py."""

import torch.distributed as dist
from torch import Tensor

from ..hook_bodies import Shapes, averages


def averages_in_pairs(rank: int, world_size: int, shapes: Shapes) -> list[list[Tensor]]:
    """Averages by step, from the second step on with one other rank."""
    subgroup, _ = dist.new_subgroups(2)
    options = {"subgroup": subgroup, "start_localSGD_iter": 2, "post_local_gradient_allreduce": True}
    return averages(rank, world_size, ("ours", "local"), "ours", shapes, 0, state_options=options)[0]
