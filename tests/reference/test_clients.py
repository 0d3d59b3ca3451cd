"""What trainers and libraries do to a wrapper: torch's class is the oracle. `make test-clients` runs real ones."""

import pytest
import torch

from ..scenarios import assert_same, assert_same_pairs
from . import clients_bodies as bodies


def test_groups_made_by_hand_train_as_under_torchs_class(two_ranks):
    """Never registered, beside or without a default group, or written in Python; with a comm hook and without."""
    for seen in two_ranks.run(bodies.groups_by_hand):
        assert_same(seen["ours"], seen["torch"])
        assert_same(seen["ours, hook"], seen["torch, hook"])
        assert seen["ours, logged"] == seen["torch, logged"] == "gloo"
        for name in ("python", "alone"):
            assert_same(seen[name], seen["torch"])
        assert_same(seen["python, hook"], seen["torch, hook"])


@pytest.mark.parametrize("options", [{"bucket_cap_mb_list": [1e-5, 1e-4, 2e-4]}, {"bucket_cap_mb": 1e-4}])
def test_the_last_bucket_may_be_the_small_one(two_ranks, options):
    for ours, torchs in two_ranks.run(bodies.last_bucket_small, options):
        assert ours == torchs
        assert ours["has_rebuilt_buckets"] == 1


STEPS = ("manual_optimisation", "trigger_sync_in_backward", "micro_batches")


@pytest.mark.parametrize(
    ("step", "options"),
    [
        *((step, {"find_unused_parameters": search}) for step in STEPS for search in (False, True)),
        ("manual_optimisation", {"static_graph": True}),
    ],
)
def test_what_trainers_do_gives_the_bits_of_torchs_class(two_ranks, step, options):
    assert_same_pairs(two_ranks.run(bodies.clients_step, step, options))


def test_the_reducers_further_names_do_what_torchs_do(two_ranks):
    for ours, torchs in two_ranks.run(bodies.reducers_names):
        assert_same(ours, torchs)
        assert ours[:2] == [[True, False], [1]]


def test_profiles_name_the_reducers_work_as_torch_does(two_ranks):
    for ours, torchs in two_ranks.run(bodies.profiled_names):
        assert ours == torchs
        assert len(ours) == 3


@pytest.mark.parametrize("how", ["script", "trace"])
def test_modules_of_torchscript_train(two_ranks, how):
    """Nearly equal: the executor of TorchScript fuses operations once it has seen some runs."""
    for ours, torchs in two_ranks.run(bodies.compiled_for_script, how):
        torch.testing.assert_close(ours, torchs)


def test_a_parametrization_after_wrapping_is_an_error_that_names_all_new_parameters(two_ranks):
    for message in two_ranks.run(bodies.parametrized_later):
        for layer in range(2):
            assert f"{layer}.parametrizations.weight.original0" in message
            assert f"{layer}.parametrizations.weight.original1" in message


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("module", "no forward pass of the wrapper waits for, first that of 1.bias (parameter 3, shape"),
        ("two forward passes", "no forward pass of the wrapper waits for, first that of 1.bias (parameter 3, shape"),
        ("backward in forward", "no forward pass of the wrapper waits for, first that of 1.bias (parameter 3, shape"),
        ("no_grad", "a forward pass under no_grad()"),
        ("thawed", "0.weight, 0.bias: frozen when the module was wrapped, trainable now"),
    ],
)
def test_gradients_that_nothing_waits_for_are_a_warning(two_ranks, how, message):
    """Given once. The gradients are those of torch's class, which says nothing."""
    for ((only,), ours), (_, torchs) in two_ranks.run(bodies.left_out, how):
        assert_same(ours, torchs)
        assert message in only
