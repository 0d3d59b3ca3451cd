"""No gradient stays local in silence: each program gets averages, or hears why it does not."""

import pytest

from ddplab.reference.errors import RankError

from . import local_gradients_bodies as bodies

OPTIONS = tuple(bodies.OPTIONS)


def assert_trains(seen):
    for one in seen:
        assert not one.error
        assert one.right
        assert not one.warned


def assert_warned_of(seen, *words):
    """One warning on each rank, which names it."""
    for rank, one in enumerate(seen):
        assert not one.error
        assert len(one.warned) == 1, one.warned
        assert one.warned[0].startswith(f"rank {rank}: ")
        assert all(word in one.warned[0] for word in words)


def assert_raises(seen, *words):
    for rank, one in enumerate(seen):
        assert f"rank {rank}: " in one.error
        assert all(word in one.error for word in words)


@pytest.mark.parametrize("how", ["mixed precision", "comm hook"])
@pytest.mark.parametrize("option", ["plain", "views"])
def test_averages_in_low_precision_reach_a_rank_without_a_gradient(two_ranks, option, how):
    assert_trains(two_ranks.run(bodies.absent_in_low_precision, option, how))


def test_sparse_averages_in_low_precision_reach_a_rank_without_a_gradient(two_ranks):
    assert_trains(two_ranks.run(bodies.absent_sparse))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_module_may_be_wrapped_in_inference_mode(two_ranks, option):
    """Torch's class raises in the first backward pass."""
    assert_trains(two_ranks.run(bodies.wrapped_in_inference_mode, option))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_wrapper_may_live_no_longer_than_its_graph(two_ranks, option):
    """Under torch's class gradients stay local; ours warned that backward ran inside of no_sync()."""
    assert_trains(two_ranks.run(bodies.wrapped_for_one_step, option))


@pytest.mark.parametrize("option", ["plain", "views"])
def test_after_a_batch_that_was_skipped_the_next_takes_another_branch_and_memory_is_free(two_ranks, option):
    seen = two_ranks.run(bodies.batch_skipped, option)
    assert_trains([one for one, _ in seen])
    assert [alive for _, alive in seen] == [0, 0]


@pytest.mark.parametrize("option", ["plain", "views", "small buckets"])
def test_a_pass_under_no_sync_that_reaches_a_synchronized_output_is_averaged(two_ranks, option):
    assert_trains(two_ranks.run(bodies.sum_of_synchronized_and_not, option))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_forward_pass_beside_a_backward_pass_in_another_thread_raises(two_ranks, option):
    assert_raises(two_ranks.run(bodies.forward_beside_backward, option), "another thread")


@pytest.mark.parametrize("option", OPTIONS)
def test_functional_transforms_see_the_module(two_ranks, option):
    seen = two_ranks.run(bodies.functional_transforms, option)
    assert_trains([one for one, _ in seen])
    assert [equal for _, equal in seen] == [True, True]


@pytest.mark.parametrize("option", OPTIONS)
def test_a_loss_of_functional_derivatives_is_averaged(two_ranks, option):
    assert_trains(two_ranks.run(bodies.physics_informed, option))


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_mixed_precision_a_checkpointed_method_may_use_its_own_parameter(two_ranks, reentrant):
    assert_trains(two_ranks.run(bodies.checkpointed_method, reentrant))


def test_in_mixed_precision_the_module_and_its_copy_compute_in_full_precision(two_ranks):
    assert_trains(two_ranks.run(bodies.module_in_full_precision))


@pytest.mark.parametrize("option", OPTIONS)
def test_the_default_device_may_be_another(two_ranks, option):
    assert_trains(two_ranks.run(bodies.on_another_default_device, option))


WHEN = {"step": "after a backward pass that left gradients out", "clip": "between two backward passes"}


@pytest.mark.parametrize("what", WHEN)
@pytest.mark.parametrize("option", ["plain", "views", "small buckets"])
def test_what_happens_between_two_backward_passes_of_one_forward_pass_is_a_warning(two_ranks, option, what):
    assert_warned_of(two_ranks.run(bodies.step_between, option, what), "heads.0.", WHEN[what])


@pytest.mark.parametrize("option", ["plain", "views", "small buckets"])
def test_two_backward_passes_of_one_forward_pass_are_no_warning(two_ranks, option):
    assert all(not one.error and not one.warned for one in two_ranks.run(bodies.step_between, option, "nothing"))


@pytest.mark.parametrize("option", ["plain", "views", "small buckets"])
def test_a_step_without_averages_names_the_cause_and_no_other(two_ranks, option):
    removed = two_ranks.run(bodies.steps_without_averages, option, "parametrization removed")
    assert_raises(removed, "0.parametrizations.weight.original", "was converted and converted back")
    assert all(not one.warned for one in removed)
    for why, when in (("output not in the loss", WHEN["step"]), ("not finalized", "before finalize_backward()")):
        assert_warned_of(two_ranks.run(bodies.steps_without_averages, option, why), f"stepped {when} and used")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("what", ["step and remove", "remove"])
def test_a_gradient_that_a_hook_has_removed_is_an_error(two_ranks, option, what):
    assert_raises(two_ranks.run(bodies.optimizer_in_a_hook, option, what), "arrived and was then set to None")


@pytest.mark.parametrize("option", OPTIONS)
def test_an_optimizer_that_steps_in_a_hook_is_a_warning(two_ranks, option):
    assert_warned_of(two_ranks.run(bodies.optimizer_in_a_hook, option, "step"), "during the backward pass")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("what", ["head", "module", "converted"])
def test_a_layer_that_was_replaced_after_wrapping_is_an_error(two_ranks, option, what):
    assert_raises(two_ranks.run(bodies.layer_changed, option, what), "heads.1.weight", "other parameters than those")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("what", "name"), [("append", "heads.2"), ("beside", "head")])
def test_a_layer_that_was_added_after_wrapping_is_a_warning(two_ranks, option, what, name):
    assert_warned_of(two_ranks.run(bodies.layer_changed, option, what), f"{name}.weight, {name}.bias: added after")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("inside", [False, True])
def test_a_layer_that_was_added_in_a_wrapper_of_its_own_is_no_warning(two_ranks, option, inside):
    assert_trains(two_ranks.run(bodies.wrapper_beside, option, inside))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("how", ["kept", "accumulating", "in turn", "shallow copy"])
def test_gradients_that_another_wrapper_averages_are_no_warning(two_ranks, option, how):
    assert_trains(two_ranks.run(bodies.trained_in_turn, option, how))


@pytest.mark.parametrize("option", ["plain", "views", "static", "small buckets"])
def test_gradients_that_another_wrapper_averages_behind_a_hidden_output_are_no_warning(two_ranks, option):
    assert_trains(two_ranks.run(bodies.trained_in_turn, option, "hidden"))


def test_a_static_graph_may_have_a_function_that_accumulates_gradients_itself(two_ranks):
    assert_trains(two_ranks.run(bodies.gradients_from_inside_a_function))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_layer_that_was_added_frozen_and_is_trained_later_is_a_warning(two_ranks, option):
    words = "heads.2.weight, heads.2.bias: frozen when"
    assert_warned_of(two_ranks.run(bodies.layer_changed, option, "frozen, then not"), words)


@pytest.mark.parametrize("what", ["frozen", "teacher"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_layer_that_gets_no_gradient_may_be_added(two_ranks, option, what):
    assert_trains(two_ranks.run(bodies.layer_changed, option, what))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_functional_call_may_have_other_parameters(two_ranks, option, frozen):
    assert_trains(two_ranks.run(bodies.swapped_for_a_call, option, frozen))


@pytest.mark.parametrize("option", OPTIONS)
def test_parameters_may_change_after_gradients_of_the_inputs(two_ranks, option):
    assert_trains(two_ranks.run(bodies.probe_then_changed_parameters, option))


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_of_torch_func_that_were_assigned_are_a_warning(two_ranks, option):
    assert_warned_of(two_ranks.run(bodies.functional_gradients_assigned, option), "weight", "has not averaged")


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_that_were_assigned_are_a_warning(two_ranks, option):
    assert_warned_of(two_ranks.run(bodies.assigned_gradients, option, "assigned"), "trunk.weight", "autograd.grad")


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_of_inputs_are_no_warning(two_ranks, option):
    assert_trains(two_ranks.run(bodies.assigned_gradients, option, "of inputs"))


@pytest.mark.parametrize("option", ["plain", "views", "small buckets"])
def test_a_static_graph_may_have_an_output_that_the_loss_ignores(two_ranks, option):
    assert_trains(two_ranks.run(bodies.ignored_output_of_a_static_graph, option))


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_reentrant_checkpoint_of_the_wrapper_beside_another_forward_pass_raises(two_ranks, option, order):
    assert_raises(two_ranks.run(bodies.checkpoint_of_the_wrapper, option, order), "inside a backward pass")


@pytest.mark.parametrize("option", bodies.COMPILED)
def test_a_step_that_is_compiled_as_a_whole_is_averaged(two_ranks, option):
    assert_trains(two_ranks.run(bodies.compiled_steps, option))


@pytest.mark.parametrize("where", ["after", "in a hook"])
@pytest.mark.parametrize("option", OPTIONS)
def test_the_script_may_end_a_backward_pass_itself(two_ranks, option, where):
    assert_trains(two_ranks.run(bodies.manual_finalization, option, where))


@pytest.mark.parametrize("option", OPTIONS)
def test_a_backward_pass_that_the_script_does_not_end_or_ends_twice_is_an_error(two_ranks, option):
    assert_raises(two_ranks.run(bodies.manual_finalization, option, "never"), "Call finalize_backward()")
    for one in two_ranks.run(bodies.manual_finalization, option, "twice"):
        assert "finalize_backward: expected" in one.error


@pytest.mark.parametrize("option", ["plain", "views", "small buckets"])
def test_micro_batches_in_flight_have_a_supported_way(two_ranks, option):
    assert_trains(two_ranks.run(bodies.micro_batches_in_flight, option))


@pytest.mark.parametrize("option", OPTIONS)
def test_buckets_have_memory_in_backward_passes_only_if_asked(two_ranks, option):
    seen = two_ranks.run(bodies.buckets_without_memory, option)
    assert_trains([one for one, _ in seen])
    for _, sizes in seen:
        assert all(size > 0 for size in sizes) if option == "views" else sizes == [0] * 4


def test_collectives_of_equal_size_that_cross_are_named_with_debug(two_ranks):
    with pytest.raises(RankError, match=r"rank \d: launch \d+ of .* bucket 0 .*: they do not belong together"):
        two_ranks.run(bodies.crossed)


def test_a_batch_that_one_rank_leaves_out_is_a_warning_with_debug(two_ranks):
    seen = two_ranks.run(bodies.batch_left_out)
    assert not any(one.error for one in seen)
    warned = [warning for one in seen for warning in one.warned]
    assert any("in iteration 3, that of rank 0" in one or "in iteration 2, that of rank 1" in one for one in warned)


def test_views_whose_data_the_script_has_replaced_are_averaged(two_ranks):
    assert_trains(two_ranks.run(bodies.gradients_with_other_data))


@pytest.mark.parametrize("option", ["plain", "views", "small buckets"])
def test_what_was_used_under_no_sync_only_is_averaged(two_ranks, option):
    assert_trains(two_ranks.run(bodies.used_under_no_sync_only, option))
