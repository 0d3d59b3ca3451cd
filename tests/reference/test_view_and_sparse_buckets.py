"""Kinds of buckets: those whose views are the gradients, and those of sparse gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from reference.bucket_copies import CACHE_LINE_BYTES
from reference.view_and_sparse_buckets import MOST_WAITING_BYTES, ViewBucket

from . import view_and_sparse_buckets_bodies as bodies


def test_views_of_the_buckets_are_the_gradients(two_ranks):
    """After the first iteration, whichever way gradients are zeroed; that is the memory saved.

    A bucket may begin up to a cache line into its memory; here there is one bucket.
    """
    for seen in two_ranks.run(bodies.bytes_of_gradients_and_buckets):
        lead_in_bytes = seen["views"] - seen["parameters"]
        assert 0 <= lead_in_bytes < CACHE_LINE_BYTES
        assert seen["copies"] == 2 * seen["parameters"] + lead_in_bytes
        assert seen["views, zeroed in place"] == seen["views"]


@given(st.lists(st.sampled_from([1, 1_000, 40_000, 100_000]), min_size=1, max_size=20))
def test_gradients_that_views_replace_are_freed_early(sizes):
    """While a bucket fills, no more than `MOST_WAITING_BYTES` of gradients take memory beside their views."""
    parameters = [nn.Parameter(torch.zeros(elements)) for elements in sizes]
    bucket = ViewBucket(range(len(sizes)), parameters)
    for slot, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, slot)
        if bucket.put([slot]):
            bucket.pack(2.0)
        assert sum(parameters[i].nbytes for i in bucket.waiting) <= MOST_WAITING_BYTES
    assert all(parameter.grad is view for parameter, view in zip(parameters, bucket.views, strict=True))
    assert all(view.eq(2 * slot).all() for slot, view in enumerate(bucket.views))


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": True}], ids=str)
def test_a_sparse_gradient_is_not_scaled_in_memory_that_a_dense_one_shares(two_ranks, options):
    """Torch divides the values in place, and so the dense gradient, which is divided again."""
    for ours, torchs in two_ranks.run(bodies.sparse_gradients_in_shared_memory, options):
        assert ours == [3.0] * 3
        assert torchs == [1.5] * 3


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("hook", [False, True])
def test_a_module_converted_to_channels_last_after_wrapping_is_averaged(two_ranks, views, hook):
    """`module.to` moves the gradients too, away from the memory of their buckets."""
    assert two_ranks.run(bodies.wrong_after_channels_last, views, hook) == [[[], [2, 3, 4, 5]]] * 2
