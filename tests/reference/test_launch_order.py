"""The checked launch order: a rank is named if, and only if, it leaves the order."""

from hypothesis import example, given
from hypothesis import strategies as st

from .. import misuse
from ..explore import examples


def test_a_rank_that_leaves_the_order_is_named_by_those_that_wait(two_ranks):
    """The fourth launch never comes from rank 1; each launch is numbered."""
    said = two_ranks.run(misuse.message, "rank_that_leaves_the_order")[0]
    assert "rank 0 waited for launch 4, bucket 0 (12 bytes)" in said
    assert "rank 1 left the order: it never came to launch 4; its last was launch 3, bucket 0 (12 bytes)" in said


@examples(10)
@given(
    st.lists(
        st.tuples(st.just("copy"), st.integers(-1, 1))
        | st.tuples(st.just("train"), st.integers(0, 3))
        | st.just(("construct", 0)),
        max_size=6,
    )
)
@example([("copy", 0), ("construct", 0)])
def test_a_rank_that_keeps_the_order_is_never_named_whatever_one_rank_copies(two_ranks, steps):
    """A copy on one rank alone once renumbered the modules constructed after it, on that rank alone."""
    for explanations in two_ranks.run(misuse.explained_launches, steps):
        assert all("all ranks launched the same" in explanation for explanation in explanations)
