"""Quantisation: averages are right to half a level."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.comm_hooks.quantization import dequantize, quantize, quantize_per_channel, quantize_per_tensor

from .. import hook_bodies
from ..explore import examples
from ..hook_bodies import train
from ..strategies import caps_mb, hook_shapes

BOTH_POOLS = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids="{} ranks".format)
seeds = st.integers(0, 1000)
modes = st.fixed_dictionaries({"gradient_as_bucket_view": st.booleans(), "bucket_cap_mb": caps_mb()})


@given(st.integers(1, 4), st.integers(1, 40), st.sampled_from([0.0, 1e-30, 1.0, 1e30]), seeds)
def test_quantisation_is_right_to_half_a_level_and_keeps_zeros(channels, elements, size, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(channels, elements, generator=generator) * size
    values[:, 0] = 0
    got = dequantize(quantize(values), (channels, elements))
    levels = (values.amax(1).clamp(min=0) - values.amin(1).clamp(max=0)) / 255
    assert ((got - values).abs() <= levels[:, None] * 0.501).all()
    assert (got[:, 0] == 0).all()


def test_what_is_not_a_number_stays_so():
    values = torch.tensor([[1.0, float("nan")], [1.0, float("inf")], [1.0, 2.0]])
    got = dequantize(quantize(values), (3, 2))
    assert not got[:2].isfinite().all(1).any()
    assert got[2].isfinite().all()


@pytest.mark.parametrize("hook", [quantize_per_tensor, quantize_per_channel])
def test_of_a_bucket_without_elements_nothing_is_sent(hook):
    """There is no process group in this process, so sending would fail."""
    empty = torch.empty(0)
    assert hook(None, SimpleNamespace(buffer=lambda: empty)).wait() is empty


@BOTH_POOLS
@pytest.mark.parametrize("hook", ["per tensor", "per channel"])
@examples(8)
@given(hook_shapes(), modes, seeds)
def test_quantised_averages_are_right_to_half_a_level(ranks, hook, shapes, options, seed):
    results = train(ranks, ("ours", hook), shapes, seed, options=options)
    for step, averages in enumerate(results[0][0]):
        by_rank = [hook_bodies.given_gradients(rank, shapes, seed, step) for rank in range(ranks.world_size)]
        flat = [torch.cat([g.flatten() for g in gradients]) for gradients in by_rank]
        level = max(float(f.max().clamp(min=0) - f.min().clamp(max=0)) if f.numel() else 0.0 for f in flat) / 255
        for got, expected in zip(
            averages, hook_bodies.mean_gradients(ranks.world_size, shapes, seed, step), strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=0, atol=0.51 * level)
