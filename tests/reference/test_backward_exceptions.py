"""Exceptions inside backward passes, re-entrant backward passes, and modules converted between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..explore import examples
from . import backward_exceptions_bodies as bodies

OPTIONS = st.fixed_dictionaries(
    {"find_unused_parameters": st.booleans(), "static_graph": st.booleans(), "gradient_as_bucket_view": st.booleans()}
)


@examples(15)
@given(st.integers(0, bodies.LAYERS - 1), st.booleans(), OPTIONS)
def test_after_an_exception_in_backward_training_goes_on_or_an_error_names_it(two_ranks, at, single_bucket, options):
    """Never with gradients that are not averages, and never with an error about parameters that were not used."""
    for result in two_ranks.run(bodies.interrupted_training, at, single_bucket, options):
        if isinstance(result, str):
            assert "an exception ended the last backward pass (raised outside of the reducer" in result
            assert not single_bucket
        else:
            ours, local = result
            assert ours == local


def test_an_exception_between_two_launches_is_named_by_the_next_forward_pass(two_ranks):
    for result in two_ranks.run(bodies.interrupted_training, 0, False, {}):
        assert "after 4 of 5 buckets had been launched" in result
        assert "wrap the module again on every rank" in result


def test_one_rank_alone_always_trains_on():
    from reference.launch import RankPool

    with RankPool(1, timeout_s=60) as pool:
        for at in range(bodies.LAYERS):
            ((ours, local),) = pool.run(bodies.interrupted_training, at, False, {})
            assert ours == local


def test_an_exception_under_no_sync_leaves_nothing_behind(two_ranks):
    for ours, local in two_ranks.run(bodies.interrupted_under_no_sync):
        assert ours == local


def test_a_layer_in_two_reentrant_checkpoints_is_an_error_without_a_static_graph(two_ranks):
    """The first checkpoint alone makes every gradient ready: averages made then would miss the second one."""
    for message, _ in two_ranks.run(bodies.reentrant_checkpoints, False):
        assert "Expected to mark a variable ready only once. layer." in message
        assert "re-entrant backward passes" in message
        assert "static_graph=True" in message
    (first, ours), (second, theirs) = two_ranks.run(bodies.reentrant_checkpoints, True)
    assert (first, second) == ("", "")
    assert ours == theirs


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_layer_converted_after_wrapping_is_named_wherever_it_is_in_its_bucket(two_ranks, options):
    for message in two_ranks.run(bodies.converted_after_wrapping, options):
        assert "layers.1." in message
        assert "Convert the module before it is wrapped, not after." in message
