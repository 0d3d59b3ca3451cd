"""Buffers: sent when torch sends them, and never in the way of a backward pass."""

from . import buffers_bodies as bodies


def test_buffers_that_stay_local_may_differ(two_ranks):
    """With broadcast_buffers=False nothing is ever done with them."""
    assert all(two_ranks.run(bodies.local_buffers))
