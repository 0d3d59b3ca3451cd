"""The simplest comm hooks: an average that does not overflow, and none at all."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.comm_hooks.allreduce import average, noop

from ..explore import examples

LARGE = 15.0 * 4096
"""Twice as much is more than half precision holds."""


def average_in_half_precision(rank, _world_size, values):
    """The average of the ranks' values, and whether it is in the memory of this rank's own."""
    flat = torch.full((3,), values[rank], dtype=torch.float16)
    averaged = average(flat, None).wait()
    return averaged.tolist(), averaged.data_ptr() == flat.data_ptr()


@examples(8)
@given(st.tuples(*[st.sampled_from([LARGE, -LARGE, 4096.0, 0.0])] * 2))
def test_an_average_in_half_precision_does_not_overflow_where_the_sum_does(two_ranks, values):
    for averaged, in_place in two_ranks.run(average_in_half_precision, values):
        assert averaged == [sum(values) / 2] * 3
        assert in_place


def test_noop_returns_the_bucket_as_it_is():
    buffer = torch.arange(3.0)
    assert noop(None, SimpleNamespace(buffer=lambda: buffer)).wait() is buffer
    assert buffer.tolist() == [0.0, 1.0, 2.0]
