"""The interface of comm hooks: what a hook may return, what it leaves behind, copies, and states that are saved."""

import pytest
import torch

from ddplab.reference.launch import RankPool

from .. import hook_bodies, misuse
from ..scenarios import assert_same, assert_same_pairs
from . import interface_bodies as bodies


@pytest.mark.parametrize(
    ("hook", "how"),
    [
        *((hook, how) for hook in ("allreduce", "fp16", "power", "builtin") for how in ("deepcopy", "torch.save")),
        ("compress(bf16)(power)", "deepcopy"),  # cannot be pickled
    ],
)
def test_a_copy_of_a_module_keeps_its_comm_hook(two_ranks, hook, how):
    """With a state of its own; a process group as the state is that of the copy. Torch's class drops the hook."""
    for twin, original, logged in two_ranks.run(bodies.copies_under_a_hook, hook, how):
        assert_same(twin, original)
        assert logged


@pytest.mark.parametrize("how", ["raises", "a future with an error", "a future with something else"])
def test_a_hook_that_failed_keeps_nothing_alive(two_ranks, how):
    """The exception inside a future once held the frame that had waited for the future, and so the reducer."""
    assert two_ranks.run(bodies.freed_after_a_failure, how) == [True, True]


def test_a_hook_may_return_any_view(two_ranks):
    """Torch's class reads the memory of some as another view's."""
    expected = hook_bodies.mean_gradients(2, ((3, 2), (4,)), 0, 0)
    for seen in two_ranks.run(bodies.sliced_results):
        torch.testing.assert_close(seen, [expected] * len(seen), rtol=2**-10, atol=0)


def test_a_hook_sees_sparse_gradients(two_ranks):
    assert two_ranks.run(bodies.sparse_gradients_seen) == [[True]] * 2


RESUMED = [("power", {}), ("power", {"warm_start": False, "batch_tensors_with_same_shape": True})]


def test_training_goes_on_in_new_processes_as_if_it_had_never_stopped(two_ranks, tmp_path):
    """Wherever it stops: before compression starts, just then, and later."""
    stops = (1, 2, 3, 6)
    whole = {}
    cases = [(f"{number}", *case) for number, case in enumerate(RESUMED)]
    for name, *case in cases:
        for stop in (*stops, 9):
            (tmp_path / f"{name}-{stop}").mkdir()
            whole[name] = two_ranks.run(bodies.train_and_save, str(tmp_path / f"{name}-{stop}"), 0, stop, *case)
    with RankPool(2, timeout_s=60) as new_ranks:
        for name, *case in cases:
            for stop in stops:
                resumed = new_ranks.run(bodies.train_and_save, str(tmp_path / f"{name}-{stop}"), stop, 9, *case)
                assert_same(resumed, whole[name])


def test_process_groups_are_not_saved_and_loading_says_which_they_were(two_ranks):
    for rank, (none, everyone, part) in enumerate(two_ranks.run(bodies.saved_with_a_group)):
        assert none == everyone == []
        assert f"process_group is None now. Its ranks were [{rank}]" in part[0]


def test_built_in_hooks_are_torchs(two_ranks):
    assert_same_pairs(two_ranks.run(bodies.builtin_hooks))


@pytest.mark.parametrize("hook", [*hook_bodies.OURS, "mixed precision"])
def test_no_callback_of_a_future_holds_a_process_group(two_ranks, hook):
    """Gloo's thread may free a callback last; a group that it then frees too ends the process."""
    assert two_ranks.run(bodies.callbacks_that_hold_a_group, hook) == [[], []]


def test_a_hook_sees_gradients_in_the_memory_format_of_their_parameters(two_ranks):
    """In torch the elements of a channels-last gradient are in another order than its gradient's."""
    assert two_ranks.run(bodies.gradients_that_a_hook_sees) == [[(True, True), (False, False)]] * 2


def test_a_comm_hook_that_raises_on_one_rank_is_named_there_and_by_those_that_wait(two_ranks):
    waiting, raising = two_ranks.run(misuse.message, "comm_hook_raises_on_one_rank")
    hook = "comm hook comm_hook_raises_on_one_rank.<locals>.hook ("
    assert f"RuntimeError: rank 1, bucket 1: {hook}" in raising
    assert raising.endswith("it raised OverflowError: too steep")
    assert f"RuntimeError: rank 0, bucket 1: {hook}" in waiting
    assert "its future holds RuntimeError" in waiting
