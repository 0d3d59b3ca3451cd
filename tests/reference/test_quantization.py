"""Quantisation: numbers are right to half a level."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.comm_hooks.quantization import dequantize, quantize, quantize_per_channel, quantize_per_tensor


@given(st.integers(1, 4), st.integers(1, 40), st.sampled_from([0.0, 1e-30, 1.0, 1e30]), st.integers(0, 1000))
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
