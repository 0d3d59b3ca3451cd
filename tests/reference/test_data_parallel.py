"""Training with our DDP is local training, and torch's DDP is the oracle."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ddplab.conformance.class_under_test import Subject
from ddplab.conformance.local_training import WeakProgramError, check_program
from ddplab.conformance.training_programs import Program, Weight
from reference.launch import RankPool

from . import bodies
from .explore import examples
from .strategies import caps_mb, integer_program, integer_programs, partitions

OURS = Subject("reference.data_parallel:DistributedDataParallel")
BOTH_POOLS = pytest.mark.parametrize("ranks", [2, 4], indirect=True)
widths = st.lists(st.integers(1, 12), min_size=2, max_size=5).map(tuple)
seeds = st.integers(0, 2**31 - 1)
features = st.fixed_dictionaries(
    {},
    optional={
        name: st.booleans()
        for name in (
            "find_unused_parameters",
            "static_graph",
            "gradient_as_bucket_view",
            "batched_grad_copy",
            "skip_all_reduce_unused_params",
            "debug",
        )
    },
)


def assert_equal(got: bodies.Gradients, expected: bodies.Gradients) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


@BOTH_POOLS
@examples(80)
@given(st.data())
def test_gradients_are_exactly_those_of_local_training(ranks, data):
    """Random models, caps, plans, ready orders and features, float32 and float64, three steps with a rebuild.

    The models compute with integers, so a wrong divisor, a parameter left out, or a gradient of the wrong
    iteration cannot hide in a tolerance.
    """
    program = data.draw(integer_programs(ranks.world_size))
    dtypes = [weight.dtype for weight in program.weights]
    arguments = data.draw(
        st.builds(lambda cap: {"bucket_cap_mb": cap}, caps_mb())
        | st.builds(lambda plan: {"plan": plan}, partitions(len(dtypes), dtypes))
        | st.builds(
            lambda caps: {"bucket_cap_mb_list": caps}, st.lists(st.floats(1e-6, 3e-4), min_size=1, max_size=3)
        )
    )
    assert_is_local_training(ranks, program, arguments | data.draw(features))


def assert_is_local_training(ranks: RankPool, program: Program, options: dict[str, Any]) -> None:
    with suppress(WeakProgramError):
        check_program(OURS, replace(program, options=options), ranks)


@examples(25)
@given(st.data(), caps_mb(), st.integers(1, 4), features)
def test_k_passes_under_no_sync_equal_one_large_batch(two_ranks, data, cap, k, features):
    program = data.draw(integer_programs(2, [*["accumulate"] * (k - 1), "train"] * 2))
    assert_is_local_training(two_ranks, program, {"bucket_cap_mb": cap} | features)


@BOTH_POOLS
@pytest.mark.parametrize("wrapper", ["ours", "naive"])
@examples(15)
@example((8, 1, 1, 8, 8), torch.float32, 540, 1.4e-4)  # terms cancel
@given(widths, st.sampled_from([torch.float32, torch.float64]), seeds, st.floats(1e-6, 1e-3))
def test_gradients_of_a_real_model_are_those_of_local_training(ranks, wrapper, widths, dtype, seed, cap):
    """Real-valued, so equal up to the order of summation: some units in the last place of the sums of absolute terms.

    Where terms cancel, the error may be large compared with the gradient itself.
    """
    expected = bodies.train_mlp_locally(widths, dtype, seed, ranks.world_size)
    terms = bodies.mlp_gradient_terms(widths, dtype, seed, ranks.world_size)
    bounds = [64 * torch.finfo(dtype).eps * one for one in terms]
    for gradients in ranks.run(bodies.train_mlp, wrapper, widths, dtype, seed, cap):
        for iteration in gradients:
            for got, want, bound in zip(iteration, expected, bounds, strict=True):
                assert ((got - want).abs() <= bound).all()


@examples(25)
@given(widths, st.sampled_from([torch.float32, torch.float64]), seeds, st.floats(1e-6, 1e-3))
def test_gradients_are_exactly_torchs_on_two_ranks(two_ranks, widths, dtype, seed, cap):
    """A sum of two has one order, so every bit agrees, whatever the layouts."""
    ours = two_ranks.run(bodies.train_mlp, "ours", widths, dtype, seed, cap)
    torchs = two_ranks.run(bodies.train_mlp, "torch", widths, dtype, seed, cap)
    for got, expected in zip(ours, torchs, strict=True):
        assert_equal(got, expected)


@examples(25)
@given(widths, st.sampled_from([torch.float32, torch.float64]), seeds, st.floats(1e-6, 1e-3))
def test_gradients_are_exactly_torchs_on_four_ranks(four_ranks, widths, dtype, seed, cap):
    """Which rank's summand comes first depends on the place in the bucket, so the layouts must be equal too."""
    ours = four_ranks.run(bodies.train_mlp, "ours", widths, dtype, seed, cap)
    torchs = four_ranks.run(bodies.train_mlp, "torch", widths, dtype, seed, cap)
    for got, expected in zip(ours, torchs, strict=True):
        assert_equal(got, expected)


def test_gradients_of_channels_last_weights_keep_their_strides(two_ranks):
    ours = two_ranks.run(bodies.train_channels_last, "ours")
    torchs = two_ranks.run(bodies.train_channels_last, "torch")
    for got, expected in zip(ours, torchs, strict=True):
        assert_equal(got, expected)
        assert [[g.stride() for g in iteration] for iteration in got] == [
            [g.stride() for g in iteration] for iteration in expected
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


def test_a_bucket_that_is_ready_early_waits_for_its_turn(two_ranks):
    """The last parameter used is ready first; the plan launches it last, on the rank where it comes first."""
    program = integer_program([Weight((2,))] * 2, [((0, 1), (1, 0))])
    logs = two_ranks.run(bodies.watch_launches, program, [[0], [1]])
    assert logs == [([1, 0], [0, 1]), ([0, 1], [0, 1])]


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


def test_the_rebuild_follows_rank_0s_ready_order(two_ranks):
    program = integer_program([Weight((4,))] * 3, [((1, 0, 2), (0, 1, 2)), ((0, 2, 1), (1, 2, 0))])
    layouts = two_ranks.run(bodies.watch_rebuild, program, 1e-6)
    assert layouts[0] == layouts[1] == [((0, 1, 2),), ((2,), (0,), (1,))]


@BOTH_POOLS
def test_every_rank_starts_from_rank_0_under_torchs_names(ranks):
    ours = ranks.run(bodies.state_after_construction, "ours")
    torchs = ranks.run(bodies.state_after_construction, "torch")
    for got, expected in zip(ours, torchs, strict=True):
        assert list(got) == list(expected)
        assert all(name.startswith("module.") for name in got)
        for name in got:
            assert torch.equal(got[name], ours[0][name])
            assert torch.equal(got[name], expected[name])


def test_buffers_are_broadcast_when_torch_does_it(two_ranks):
    ours = two_ranks.run(bodies.buffers_after_forward, "ours")
    torchs = two_ranks.run(bodies.buffers_after_forward, "torch")
    for got, expected in zip(ours, torchs, strict=True):
        assert_equal(got, expected)


def test_what_the_state_dict_does_not_hold_is_synchronised_too(two_ranks):
    assert two_ranks.run(bodies.values_after_construction) == [[1.0, 1.0]] * 2


def test_under_no_sync_nothing_is_averaged_even_after_a_stray_forward_pass(two_ranks):
    assert two_ranks.run(bodies.gradients_after_a_stray_forward) == [[0.0], [1.0]]


def test_forward_returns_what_the_module_returns(two_ranks):
    assert all(two_ranks.run(bodies.outputs_of))


def test_a_module_outlives_its_wrapper(two_ranks):
    assert all(two_ranks.run(bodies.survives_dropping_the_wrapper))


def test_without_a_process_group_the_error_says_how_to_get_one():
    from reference.data_parallel import DistributedDataParallel

    with pytest.raises(RuntimeError, match="expected an initialised process group"):
        DistributedDataParallel(torch.nn.Linear(1, 1))
