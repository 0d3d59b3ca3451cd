"""The reducer: buckets are launched in one order on every rank, and are rebuilt once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ..explore import examples
from ..strategies import caps_mb, integer_program, integer_programs, partitions
from ..torch_options import takes
from . import reducer_bodies as bodies

BOTH_POOLS = pytest.mark.parametrize("ranks", [2, 4], indirect=True)
CAPS = [
    {},
    {"bucket_cap_mb": 0.0002},
    {"bucket_cap_mb_list": [0.0001, 0.0003]},
    {"bucket_cap_mb": 0},
    {"bucket_cap_mb": 0, "find_unused_parameters": True},
    {"bucket_cap_mb_list": []},
    {"bucket_cap_mb_list": [0, 0.0003]},
    {"bucket_cap_mb": 0.0002, "find_unused_parameters": True},
    {"bucket_cap_mb_list": [0.0001, 0.0003], "find_unused_parameters": True},
    {"bucket_cap_mb": 0.0002, "static_graph": True},
    {"bucket_cap_mb": 0.0002, "static_graph": True, "find_unused_parameters": True},
    {"bucket_cap_mb": 0.0002, "gradient_as_bucket_view": True},
]


@BOTH_POOLS
@examples(25)
@given(st.data())
def test_launch_order_is_bucket_order_on_every_rank(ranks, data):
    program = data.draw(integer_programs(ranks.world_size))
    dtypes = [weight.dtype for weight in program.weights]
    plan = data.draw(partitions(len(dtypes), dtypes))
    for ready, launched in ranks.run(bodies.watch_launches, program, plan):
        assert launched == list(range(len(plan)))
        assert sorted(ready) == launched


@examples(20)
@given(integer_programs(2, ["train"] * 4), caps_mb())
def test_buckets_are_rebuilt_once_and_alike_on_every_rank(two_ranks, program, cap):
    """The ready order differs every time."""
    turned = [tuple(one[number % len(one) :] + one[: number % len(one)] for one in step.used)
              for number, step in enumerate(program.steps)]  # fmt: skip
    program = integer_program(program.weights, turned, seed=program.seed)
    first, second = two_ranks.run(bodies.watch_rebuild, program, cap)
    assert first == second
    assert first[1] == first[2] == first[3]


@pytest.mark.parametrize("options", list(filter(takes, CAPS)), ids=str)
def test_buckets_are_torchs_in_every_iteration(two_ranks, options):
    """The layout, and the moment of the rebuild."""
    if options.get("bucket_cap_mb") == 0 and not takes(["forward_sync_buffers"]):
        pytest.skip("the class of torch 2.11 raises AssertionError for a cap of 0")
    for ours, torchs in two_ranks.run(bodies.layouts_by_iteration, options):
        assert ours == torchs


@pytest.mark.parametrize("change", ["double", "drop", "replace"])
@pytest.mark.parametrize("views", [False, True])
def test_a_gradient_that_changes_before_its_bucket_is_full_raises(two_ranks, change, views):
    """Torch copies it when it arrives, so that a later hook of the same pass cannot change what is sent."""
    for message in two_ranks.run(bodies.gradients_changed_by_a_later_hook, change, views):
        what = "arrived and was then set to None" if change == "drop" else "was changed or replaced"
        assert f"the gradient of 1.weight (parameter 1, shape (1, 1)) in bucket 0 {what}" in message


def test_a_view_that_the_script_replaces_after_it_was_packed_raises(two_ranks):
    """As under torch's class; in any iteration."""
    for message in two_ranks.run(bodies.view_replaced_later):
        assert "the gradient of 1.weight (parameter 1, shape (1, 1)) is not the expected DDP bucket view" in message


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_a_parameter_in_two_wrappers_is_averaged_twice_or_refused(two_ranks, options):
    for message, gradients, once in two_ranks.run(bodies.parameter_in_two_wrappers, options):
        if "gradient_as_bucket_view" in options:
            assert "is not the expected DDP bucket view" in message
        else:
            assert message is None
            assert gradients == once


def test_gradients_of_another_dtype_from_some_iteration_on_raise(two_ranks):
    for message in two_ranks.run(bodies.dtype_of_one_gradient_changes):
        assert "expected the gradient of 0.weight (parameter 0, shape (2, 2))" in message
        assert "got a torch.float32 tensor" in message


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize(("used", "option"), [(0, "find_unused_parameters"), (0, "static_graph"), (2, "init_sync")])
def test_gradients_that_share_memory_keep_their_averages(two_ranks, used, option, views):
    """Torch's class copies one average over the other."""
    options = {option: True, "gradient_as_bucket_view": views}
    for found, expected in two_ranks.run(bodies.gradients_in_one_memory, used, options):
        assert found == expected


@pytest.mark.parametrize("views", [False, True])
def test_a_gradient_in_the_memory_of_one_that_became_a_view_is_not_copied(two_ranks, views):
    """It was taken for shared memory, and from then on an MLP with views took a third longer."""
    for ours, torchs in two_ranks.run(bodies.clones, views):
        assert ours == torchs


@pytest.mark.parametrize("beside", [True, False])
def test_a_forward_pass_inside_a_backward_pass_that_averages_raises(two_ranks, beside):
    """A checkpoint of the wrapper: beside another forward pass of it, torch raises too; alone it trains."""
    for message in two_ranks.run(bodies.wrapper_in_a_checkpoint, beside):
        assert ("forward pass runs inside a backward pass" in message) == beside


def test_a_forward_pass_in_a_hook_while_buckets_are_sent_raises(two_ranks):
    for message in two_ranks.run(bodies.forward_in_a_hook):
        assert "forward pass runs inside a backward pass" in message


def test_views_that_share_their_version_are_not_taken_for_changed_gradients(two_ranks):
    assert two_ranks.run(bodies.views_of_a_tiny_bucket) == [[0.5, 1.0, 1.5]] * 2
