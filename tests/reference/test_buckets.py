"""Buckets: what is copied out of them."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddplab.reference.buckets import Bucket


@pytest.mark.parametrize(
    ("unused", "without_gradient", "fused"),
    [({7}, None, [3]), ({0, 7}, None, [2]), ({0, 1, 2}, None, []), ({7}, 1, []), ({1}, 1, [2])],
)
def test_gradients_are_copied_out_one_by_one_only_if_one_of_the_bucket_is_missing(unused, without_gradient, fused):
    """Unused parameters of other buckets change nothing; those of this bucket are left out."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for index, parameter in enumerate(parameters):
        parameter.grad = None if index == without_gradient else torch.zeros(2)
    bucket = Bucket(range(3), parameters)
    with torch.no_grad(), mock.patch.object(torch, "_foreach_copy_", wraps=torch._foreach_copy_) as copy:
        bucket.copy_out(torch.ones(6), unused=frozenset(unused))
    assert [len(call.args[0]) for call in copy.call_args_list] == fused
    for index, parameter in enumerate(parameters):
        if index not in unused:
            assert parameter.grad.tolist() == [1.0, 1.0]
        elif parameter.grad is not None:
            assert parameter.grad.tolist() == [0.0, 0.0]


ARRIVED = {
    "plain": lambda: torch.zeros(2, dtype=torch.complex64),
    "conjugate": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.zeros(2, dtype=torch.complex64)),
    "missing": lambda: None,
}


@given(st.lists(st.sampled_from(sorted(ARRIVED)), min_size=1, max_size=4))
def test_averages_reach_gradients_that_are_conjugate_or_negative_views(kinds):
    """The gradients of `weight.conj() * x`, and of a real scalar that is an imaginary part, are such views."""
    parameters = [nn.Parameter(torch.zeros(2, dtype=torch.complex64)) for _ in kinds]
    for parameter, kind in zip(parameters, kinds, strict=True):
        parameter.grad = ARRIVED[kind]()
    averages = torch.arange(2 * len(kinds)) * (1 + 2j)
    with torch.no_grad():
        Bucket(range(len(kinds)), parameters).copy_out(averages)
    assert [parameter.grad.tolist() for parameter in parameters] == averages.reshape(-1, 2).tolist()
