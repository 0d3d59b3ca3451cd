"""Buckets: what is copied out of them."""

from unittest import mock

import pytest
import torch
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
