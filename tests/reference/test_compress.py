"""Compression to half precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from .. import hook_bodies
from ..explore import examples
from ..hook_bodies import train
from ..strategies import hook_shapes

BOTH_POOLS = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids="{} ranks".format)
seeds = st.integers(0, 1000)


@BOTH_POOLS
@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2**-9), ("bf16", 2**-6)])
@examples(6)
@given(hook_shapes(), seeds)
def test_compression_rounds(ranks, hook, tolerance, shapes, seed):
    """By at most the relative spacing of half precision at the largest intermediate number."""
    results = train(ranks, ("ours", hook), shapes, seed, steps=2)
    for step, averages in enumerate(results[0][0]):
        exact = hook_bodies.mean_gradients(ranks.world_size, shapes, seed, step)
        for got, expected in zip(averages, exact, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=4 * tolerance)
