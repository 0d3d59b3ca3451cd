"""Buffers: sent when torch sends them, and never in the way of a backward pass."""

from ..scenarios import assert_same
from . import buffers_bodies as bodies


def test_buffers_are_broadcast_when_torch_does_it(two_ranks):
    ours = two_ranks.run(bodies.buffers_after_forward, "ours")
    torchs = two_ranks.run(bodies.buffers_after_forward, "torch")
    for got, expected in zip(ours, torchs, strict=True):
        assert_same(got, expected)


def test_buffers_that_stay_local_may_differ(two_ranks):
    """With broadcast_buffers=False nothing is ever done with them."""
    assert all(two_ranks.run(bodies.local_buffers))


def test_buffers_of_a_forward_pass_do_not_spoil_an_earlier_backward_pass(two_ranks):
    """A broadcast overwrites buffers that the graph of the pass before has saved."""
    assert all(two_ranks.run(bodies.backward_after_the_next_forward))
