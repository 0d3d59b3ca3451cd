"""The wrapper: what construction sends, what forward returns, and `no_sync`."""

from . import module_wrapper_bodies as bodies


def test_what_the_state_dict_does_not_hold_is_synchronised_too(two_ranks):
    assert two_ranks.run(bodies.values_after_construction) == [[1.0, 1.0]] * 2


def test_under_no_sync_nothing_is_averaged_even_after_a_stray_forward_pass(two_ranks):
    assert two_ranks.run(bodies.gradients_after_a_stray_forward) == [[0.0], [1.0]]


def test_forward_returns_what_the_module_returns(two_ranks):
    assert all(two_ranks.run(bodies.outputs_of))


def test_a_module_outlives_its_wrapper(two_ranks):
    assert all(two_ranks.run(bodies.survives_dropping_the_wrapper))


def test_without_init_sync_nothing_is_communicated(two_ranks):
    """Rank 1 constructs alone; its parameters stay its own."""
    assert two_ranks.run(bodies.construct_on_one_rank_only) == [None, [1.0, 1.0]]


def test_with_create_graph_the_gradient_is_averaged_and_its_derivative_is_local(two_ranks):
    for averaged, local in two_ranks.run(bodies.second_derivatives):
        assert averaged
        assert local
