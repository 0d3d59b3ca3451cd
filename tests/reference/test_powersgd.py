"""PowerSGD: its laws, what it sends, and what it keeps."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.comm_hooks.powersgd import PowerSGDState, keep_where, orthogonalize, square
from ddplab.reference.message_sizes import factors_of_gradient, rows_and_columns

from .. import hook_bodies
from ..explore import examples
from ..hook_bodies import train
from ..scenarios import assert_same
from ..strategies import caps_mb, hook_shapes
from . import powersgd_bodies as bodies

BOTH_POOLS = pytest.mark.parametrize("ranks", [2, 4], indirect=True, ids="{} ranks".format)
seeds = st.integers(0, 1000)
modes = st.fixed_dictionaries({"gradient_as_bucket_view": st.booleans(), "bucket_cap_mb": caps_mb()})
power_options = st.fixed_dictionaries(
    {
        "matrix_approximation_rank": st.integers(1, 5),
        "min_compression_rate": st.sampled_from([0, 1, 2]),
        "batch_tensors_with_same_shape": st.booleans(),
        "orthogonalization_epsilon": st.sampled_from([0, 1e-8]),
        "use_error_feedback": st.booleans(),
        "warm_start": st.booleans(),
    }
)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.sampled_from([0, 1e-12]), seeds)
def test_orthogonalize_gives_an_orthonormal_basis_of_the_columns(count, rows, columns, epsilon, seed):
    rank = min(rows, columns)
    stack = torch.randn(count, rows, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis = orthogonalize(stack, epsilon)
    assert torch.allclose(basis.mT @ basis, torch.eye(rank, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(basis @ (basis.mT @ stack), stack, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("epsilon", [0, 1e-8])
def test_columns_of_zeros_stay_finite(dtype, epsilon):
    assert orthogonalize(torch.zeros(2, 4, 2, dtype=dtype), epsilon).isfinite().all()


@given(st.integers(0, 30))
def test_a_square_holds_all_numbers_and_zeros(elements):
    matrix = square(torch.arange(1.0, elements + 1))
    assert matrix.shape[0] == matrix.shape[1]
    assert (matrix.shape[0] - 1) ** 2 < elements or elements == 0
    assert matrix.flatten()[:elements].tolist() == list(range(1, elements + 1))
    assert not matrix.flatten()[elements:].any()


def test_rows_are_the_outermost_dimension_in_memory():
    channels_last = torch.empty(2, 3, 5, 7).to(memory_format=torch.channels_last)
    for tensor in (torch.empty(2, 3, 5, 7), channels_last):
        assert rows_and_columns(tensor.shape, tensor.stride()) == (2, 105)
    assert rows_and_columns((3, 2), torch.empty(2, 3).T.stride()) == (2, 3)


@given(hook_shapes())
def test_without_strides_the_first_dimension_is_the_outermost(shapes):
    for shape in shapes:
        assert rows_and_columns(shape) == rows_and_columns(shape, torch.empty(shape).stride())
    assert rows_and_columns(()) == (1, 1)
    assert rows_and_columns((0, 3)) == (0, 0)


@BOTH_POOLS
@pytest.mark.parametrize("hook", ["power", "batched power"])
@examples(6)
@given(hook_shapes(), modes, seeds, st.booleans())
def test_at_full_rank_powersgd_is_the_average(ranks, hook, shapes, options, seed, batched):
    state = {"matrix_approximation_rank": 64, "min_compression_rate": 0, "batch_tensors_with_same_shape": batched}
    results = train(ranks, ("ours", hook), shapes, seed, options=options, state_options=state)
    for step, averages in enumerate(results[0][0]):
        expected = hook_bodies.mean_gradients(ranks.world_size, shapes, seed, step)
        torch.testing.assert_close(averages, expected, rtol=1e-4, atol=1e-4)


@BOTH_POOLS
@examples(6)
@given(hook_shapes(), modes, seeds, power_options)
def test_gradients_of_low_rank_are_averaged_exactly(ranks, shapes, options, seed, state):
    """Where the columns of all ranks' gradients lie in one space of as many dimensions as P has columns.

    Rounding errors grow with the condition of a random matrix: one of 1,000 examples is off by 1 %. A wrong divisor
    would be off by 20 % or more.
    """
    rank = state["matrix_approximation_rank"]
    results = train(ranks, ("ours", "power"), shapes, seed, options=options, state_options=state, low_rank=rank)
    for step, averages in enumerate(results[0][0]):
        exact = hook_bodies.mean_gradients(ranks.world_size, shapes, seed, step, low_rank=rank)
        for got, expected in zip(averages, exact, strict=True):
            assert (got - expected).norm() <= 0.05 * expected.norm()


@BOTH_POOLS
@examples(6)
@given(hook_shapes(), seeds, power_options)
def test_what_arrives_is_the_average_projected_onto_few_directions(ranks, shapes, seed, options):
    """Algorithm 1: M' = P (P^T M) for orthonormal P, so M' has low rank and is orthogonal to what is missing."""
    state = options | {"use_error_feedback": False}
    results = train(ranks, ("ours", "power"), shapes, seed, state_options=state)
    for step, averages in list(enumerate(results[0][0]))[2:]:
        for got, mean in zip(averages, hook_bodies.mean_gradients(ranks.world_size, shapes, seed, step), strict=True):
            if got.dim() > 1 and got.numel() and not torch.allclose(got, mean, atol=1e-5):
                matrix, missing = (t.view(len(t), -1) for t in (got, mean - got))
                assert torch.linalg.matrix_rank(matrix, rtol=1e-4) <= state["matrix_approximation_rank"]
                assert float((matrix.T @ missing).norm()) <= 1e-3 * (1 + float(mean.norm()) ** 2)


@examples(2)
@given(seeds, st.integers(1, 3))
def test_a_warm_start_finds_the_best_approximation(two_ranks, seed, rank):
    """Subspace iteration on gradients that stay the same ends at the truncated singular value decomposition."""
    shapes = ((8, 6),)
    results = train(
        two_ranks,
        ("ours", "power"),
        shapes,
        seed,
        steps=200,
        same=True,
        state_options={"matrix_approximation_rank": rank, "min_compression_rate": 0, "use_error_feedback": False},
    )
    (mean,) = hook_bodies.mean_gradients(2, shapes, seed, 0)
    u, s, vh = torch.linalg.svd(mean, full_matrices=False)
    best = u[:, :rank] * s[:rank] @ vh[:rank]
    (last,) = results[0][0][-1]
    assert float((mean - last).norm()) <= float((mean - best).norm()) * 1.01 + 1e-5


@BOTH_POOLS
@pytest.mark.parametrize("hook", ["power", "batched power"])
@examples(5)
@given(hook_shapes(), seeds, power_options)
def test_error_feedback_loses_nothing(ranks, hook, shapes, seed, options):
    """The averages that were sent plus the errors that are kept add up to the given gradients."""
    state = options | {"use_error_feedback": True}
    assert max(ranks.run(bodies.kept_errors, hook, shapes, seed, state)) < 1e-4


@examples(10)
@given(hook_shapes(), power_options)
def test_powersgd_sends_the_elements_of_p_and_q_of_what_it_compresses(two_ranks, shapes, options):
    """And all elements of other gradients; `compression_stats` counts both."""
    limits = options["matrix_approximation_rank"], options["min_compression_rate"]
    before = after = 0
    for shape in shapes:
        before += prod(shape)
        after += sum(map(prod, factors_of_gradient(shape, *limits) or [shape]))
    sent, statistics = two_ranks.run(bodies.elements_sent, "power", shapes, options)[0]
    assert sent == after
    assert statistics == (before / after if after else 0, before, after)


def test_batched_powersgd_sends_two_columns_of_a_square_per_rank_of_approximation(two_ranks):
    sent, statistics = two_ranks.run(bodies.elements_sent, "batched power", ((9, 11),), {})[0]
    assert sent == 2 * 2 * 10
    assert statistics == (99 / 40, 99, 40)


def test_the_last_bucket_may_be_skipped(two_ranks):
    assert two_ranks.run(bodies.skips_unused_parameters) == [[True] * 6] * 2


def test_a_failed_iteration_leaves_no_trace(two_ranks):
    """A bucket of the failed iteration must not wait for its second collective any more."""
    shapes = ((6, 6), (6, 6))
    untouched = train(two_ranks, ("ours", "power"), shapes, 0, steps=6, options={"bucket_cap_mb": 1e-6})
    failed = two_ranks.run(bodies.averages_around_a_failure, shapes)
    assert_same(failed, [rank[0] for rank in untouched])


@pytest.mark.parametrize("epsilon", [0, 1e-8])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("scale", [0.0, float("inf")])
def test_powersgd_recovers_from_gradients_of_zeros_and_of_infinity(two_ranks, epsilon, feedback, scale):
    """Also from those of the first iteration that compresses."""
    options = {"orthogonalization_epsilon": epsilon, "use_error_feedback": feedback}
    for bad in (2, 4):
        results = train(
            two_ranks, ("ours", "power"), ((9, 9),), 0, steps=8, same=True, scales={bad: scale}, state_options=options
        )
        (last,) = results[0][0][-1]
        (mean,) = hook_bodies.mean_gradients(2, ((9, 9),), 0, 0)
        assert last.isfinite().all()
        assert float((last * mean).sum()) > 0.1 * float(mean.norm() ** 2)


@pytest.mark.parametrize("finite", [False, True])
def test_what_powersgd_keeps_is_chosen_in_place_without_the_host(finite):
    """On a CPU the host decides instead, to save a pass over memory, so only this test runs the choice here."""
    new, last = [torch.tensor([1.0, float("nan")]), torch.ones(2, 3)], [torch.zeros(2), torch.zeros(2, 3)]
    expected = [one.clone() for one in (new if finite else last)]
    memory = [one.data_ptr() for one in new]
    keep_where(torch.tensor(finite), new, last)
    torch.testing.assert_close(new, expected, rtol=0, atol=0, equal_nan=True)
    assert [one.data_ptr() for one in new] == memory


@pytest.mark.parametrize(("use_error_feedback", "warm_start"), [(True, False), (False, True)])
def test_powersgd_cannot_start_before_the_rebuild(use_error_feedback, warm_start):
    with pytest.raises(ValueError, match="start_powerSGD_iter: expected at least 2"):
        PowerSGDState(None, start_powerSGD_iter=1, use_error_feedback=use_error_feedback, warm_start=warm_start)
    PowerSGDState(None, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False)


# States that are saved


def test_a_saved_state_is_as_large_as_what_it_remembers(two_ranks):
    for saved, remembered in two_ranks.run(bodies.size_when_saved, ((64, 64),) * 6):
        assert saved < remembered + 20_000
