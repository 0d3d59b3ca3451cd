"""Post-local SGD: averages over all ranks, and then in a subgroup of them."""

import torch

from ..hook_bodies import given_gradients
from . import post_local_sgd_bodies as bodies

SHAPES = ((4, 3), (3,))


def test_from_some_step_on_gradients_are_averaged_in_the_subgroup(four_ranks):
    for rank, steps in enumerate(four_ranks.run(bodies.averages_in_pairs, SHAPES)):
        for step, averages in enumerate(steps):
            others = range(4) if step < 2 else (rank // 2 * 2, rank // 2 * 2 + 1)
            given = zip(*(given_gradients(other, SHAPES, 0, step) for other in others), strict=True)
            torch.testing.assert_close(averages, [torch.stack(parts).mean(0) for parts in given])
