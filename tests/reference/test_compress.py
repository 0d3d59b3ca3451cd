"""Compression to half precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from reference.data_parallel import DistributedDataParallel

from .. import hook_bodies
from ..explore import examples
from ..hook_bodies import train
from ..scenarios import mlp, mlp_batch
from ..strategies import hook_shapes

BOTH_POOLS = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids="{} ranks".format)
seeds = st.integers(0, 1000)


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


def test_bf16_compression_works_with_gloo(two_ranks):
    """Where torch refuses the hook without NCCL."""
    for ours in two_ranks.run(train_compressed):
        assert ours < 0.02
