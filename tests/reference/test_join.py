"""Join: ranks that run out of inputs at different times, with torch's class under torch's Join as the oracle."""

from functools import partial

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from ..explore import examples
from ..scenarios import assert_same
from ..strategies import caps_mb
from ..torch_options import taken
from . import join_bodies

BOTH_POOLS = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids="{} ranks".format)

inputs_by_rank = st.tuples(*[st.integers(0, 5)] * 4)
arguments = st.fixed_dictionaries(
    {
        "accumulate": st.sampled_from([(), (1,), (0, 2), (0, 1, 2)]),
        "hook": st.sampled_from([None, "allreduce", "bf16", "per channel", "power"]),
        "order": st.sampled_from([None, "before", "after"]),
        "join": st.fixed_dictionaries({"divide_by_initial_world_size": st.booleans()}),
    }
)
kinds = st.one_of(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(["plain", "buffers"]),
            "options": st.fixed_dictionaries(
                taken(
                    {
                        "bucket_cap_mb": caps_mb(),
                        "gradient_as_bucket_view": st.booleans(),
                        "forward_sync_buffers": st.booleans(),
                    }
                )
            ),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("branches"),
            "accumulate": st.just(()),
            "options": st.fixed_dictionaries({"bucket_cap_mb": caps_mb(), "find_unused_parameters": st.just(True)}),
        }
    ),
)


def without_none(steps):
    """Zeros for gradients of None: torch's class makes them where a rank has joined and nobody used the parameter."""
    return [[torch.zeros(()) if g is None or not g.any() else g for g in step] for step in steps]


@BOTH_POOLS
@examples(12)
@given(inputs_by_rank, arguments, kinds)
@example((5, 6, 5, 6), {}, {})
@example((0, 5, 1, 5), {}, {"options": {"bucket_cap_mb": 1e-4}})  # the rebuild, while two ranks have joined
@example((0, 0, 0, 0), {}, {})
def test_uneven_inputs_are_as_under_torchs_class(ranks, inputs, arguments, kind):
    """With unused parameters torch's class has other results in one run of 50; ours always has the same ones."""
    uneven = partial(join_bodies.uneven_inputs, **(arguments | kind))
    first = ranks.run(uneven, inputs)
    results = first
    for _ in range(3 if kind.get("kind") == "branches" else 0):
        if all(same(without_none(ours), without_none(torchs)) for ours, torchs in results):
            break
        results = ranks.run(uneven, inputs)
        for (ours, _), (before, _) in zip(results, first, strict=True):
            assert_same(ours, before)
    for ours, torchs in results:
        assert_same(without_none(ours), without_none(torchs))
    for ours, _ in results:
        assert_same(ours[-3], results[0][0][-3])  # the model of a rank that had inputs to the end


def same(got, expected) -> bool:
    try:
        assert_same(got, expected)
    except AssertionError:
        return False
    return True


def test_what_nobody_used_keeps_its_gradient_when_a_rank_has_joined(two_ranks):
    """Torch's class takes the joined rank's last iteration for its answer, and averages zeros."""
    search = {"find_unused_parameters": True}
    uneven = partial(join_bodies.uneven_inputs, kind="branches", options=search)
    (_, _), (ours, _) = two_ranks.run(uneven, (1, 2))
    first, a, b = ours[1][:2], ours[1][2:4], ours[1][4:6]  # the second step uses b alone
    assert a == [None, None]
    assert all(gradient.any() for gradient in [*first, *b])


@BOTH_POOLS
@pytest.mark.parametrize("inputs", [(5, 6, 5, 6), (3, 1, 4, 1), (2, 2, 2, 2)])
def test_torchs_sharded_optimizer_joins_with_our_module(ranks, inputs):
    (first, _), *_ = results = ranks.run(join_bodies.with_sharded_optimizer, inputs)
    for ours, torchs in results:
        assert_same(ours, torchs)
        assert_same(ours, first)


@pytest.mark.parametrize("inputs", [(2, 4), (3, 3), (0, 1)])
def test_ranks_stop_with_the_first_where_that_is_wanted(two_ranks, inputs):
    for ours, torchs in two_ranks.run(join_bodies.early_termination, inputs):
        assert ours == torchs
        assert ("exhausted" in ours) == (inputs[0] != inputs[1])


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("inputs", [(1, 4), (4, 1), (0, 3), (3, 3)])
def test_evaluation_and_buffer_hooks_are_shadowed(two_ranks, inputs, after):
    """Torch's class shadows neither evaluation nor a hook after forward."""
    first, second = two_ranks.run(join_bodies.with_a_buffer_hook, inputs, after)
    assert_same(first, second)


def test_a_hook_counts_the_iterations_that_it_shadows(two_ranks):
    first, second = two_ranks.run(join_bodies.compressed_without_inputs)
    assert first == second
    assert first[0] == 5
    assert first[1] > 1


@pytest.mark.parametrize("used", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("inputs", [(2, 2), (1, 3), (3, 1)])
def test_sparse_gradients_are_averaged_with_ranks_that_have_none(two_ranks, inputs, used):
    """Because a rank did not use the embedding, or has no inputs: its part then has no rows."""
    results = two_ranks.run(join_bodies.sparse_gradients, inputs, used, {"find_unused_parameters": True})
    for step in range(max(inputs)):
        expected = torch.zeros(6, 3)
        for rank in range(2):
            if used[rank] and step < inputs[rank]:
                expected[: 1 + rank] += (1 + rank) / 2
        for rank in range(2):
            if step < inputs[rank]:
                assert_same(results[rank][step], expected if expected.any() else None)


def test_forward_under_join_waits_for_no_collective_of_its_own(two_ranks):
    assert two_ranks.run(join_bodies.items_read_under_join) == [0, 0]


@examples(15)
@given(
    st.lists(st.tuples(*[st.integers(0, 4)] * 2), min_size=1, max_size=3).map(tuple),
    st.booleans(),
    st.sampled_from([None, "static_graph", "find_unused_parameters", "gradient_as_bucket_view"]),
    st.sampled_from([25, 1e-4]),
)
@example(((0, 1), (3, 3)), False, "static_graph", 25)  # one rank has seen a ready order, the other not
@example(((1, 4), (1, 4)), True, "static_graph", 25)  # and one still waits for a backward pass
def test_epochs_in_which_all_ranks_leave_out_a_backward_pass_are_averaged(two_ranks, inputs, skips, option, cap):
    skips = skips and all(map(all, inputs))  # a rank without inputs cannot leave one out
    options = {"bucket_cap_mb": cap} | ({option: True} if option else {})
    for steps in two_ranks.run(partial(join_bodies.epochs, inputs=inputs, skips=skips, options=options)):
        for averages, expected in steps:
            torch.testing.assert_close(averages, expected)
