"""Broadcasts of tensors in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from .. import scenarios
from ..explore import examples
from . import broadcast_bodies as bodies


@examples(20)
@given(
    st.lists(st.sampled_from(list(scenarios.ODD_BUFFERS)), min_size=1, max_size=5),
    st.integers(0, 2),
    st.sampled_from([1, 100, 10**6]),
)
def test_tensors_of_any_layout_are_sent_from_any_rank_of_a_group(four_ranks, kinds, source, piece_bytes):
    """Expanded and conjugate ones too: torch's class raises for the former and leaves the latter as they are."""
    for seen in four_ranks.run(bodies.broadcast_odd_tensors, kinds, source, piece_bytes):
        assert all(got == sent for got, sent in seen)
