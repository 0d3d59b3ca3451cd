"""Unused parameters: gradients that stay None, and static graphs."""

import pytest

from . import unused_parameters_bodies as bodies


def test_gradients_dropped_after_no_sync_count_as_unused(two_ranks):
    """Torch raises an internal error; here the averages are over what is there, and None stays None."""
    assert two_ranks.run(bodies.drop_accumulated_gradients) == [["6.0", "None"]] * 2


@pytest.mark.parametrize("structure", ["dataclass", "set", "iterator"])
def test_a_static_graph_behind_any_structure_is_averaged(two_ranks, structure):
    """Torch's sink has nothing to pass on, so the gradients stay local."""
    for rank, (ours, torchs) in enumerate(two_ranks.run(bodies.static_graph_behind, structure, False)):
        assert ours == [1.5] * 6
        assert torchs == [1.0 + rank] * 6


def test_a_deep_copy_of_a_trained_static_graph_is_averaged(two_ranks):
    """Torch's copy takes the first iteration for done, so its gradients stay local."""
    for rank, (ours, torchs) in enumerate(two_ranks.run(bodies.static_graph_behind, "tensor", True)):
        assert ours == [1.5] * 6
        assert torchs == [1.5] * 3 + [1.0 + rank] * 3
