"""Post-local SGD: averages over all ranks, and then in a subgroup of them."""

import torch
import torch.distributed as dist
from torch import Tensor

from ..hook_bodies import Shapes, averages, given_gradients

SHAPES = ((4, 3), (3,))


def averages_in_pairs(rank: int, world_size: int, shapes: Shapes) -> list[list[Tensor]]:
    """Averages by step, from the second step on with one other rank."""
    subgroup, _ = dist.new_subgroups(2)
    options = {"subgroup": subgroup, "start_localSGD_iter": 2, "post_local_gradient_allreduce": True}
    return averages(rank, world_size, ("ours", "local"), "ours", shapes, 0, state_options=options)[0]


def test_from_some_step_on_gradients_are_averaged_in_the_subgroup(four_ranks):
    for rank, steps in enumerate(four_ranks.run(averages_in_pairs, SHAPES)):
        for step, found in enumerate(steps):
            others = range(4) if step < 2 else (rank // 2 * 2, rank // 2 * 2 + 1)
            given = zip(*(given_gradients(other, SHAPES, 0, step) for other in others), strict=True)
            torch.testing.assert_close(found, [torch.stack(parts).mean(0) for parts in given])
