"""Errors that end backward passes: of re-entrant ones, and of modules converted between two of them."""

import pytest

from ..scenarios import assert_same
from . import backward_exceptions_bodies as bodies


def test_a_layer_in_two_reentrant_checkpoints_is_an_error_without_a_static_graph(two_ranks):
    """The first checkpoint alone makes every gradient ready: averages made then would miss the second one."""
    for message, _ in two_ranks.run(bodies.reentrant_checkpoints, 2, False):
        assert "Expected to mark a variable ready only once. layer." in message
        assert "re-entrant backward passes" in message
        assert "static_graph=True" in message


@pytest.mark.parametrize(("times", "static_graph"), [(1, False), (2, True)])
def test_a_layer_in_a_reentrant_checkpoint_is_averaged(two_ranks, times, static_graph):
    (first, ours), (second, theirs) = two_ranks.run(bodies.reentrant_checkpoints, times, static_graph)
    assert (first, second) == ("", "")
    assert_same(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_layer_converted_after_wrapping_is_named_wherever_it_is_in_its_bucket(two_ranks, options):
    for message in two_ranks.run(bodies.converted_after_wrapping, options):
        assert "layers.1." in message
        assert "Convert the module before it is wrapped, not after." in message
