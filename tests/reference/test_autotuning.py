"""Autotuning: buckets are those of the tuner on all ranks, once, and no gradient changes."""

from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.autotuning import Autotune, TunedBuckets

from ..explore import examples
from ..strategies import caps_mb, integer_programs, partitions
from . import autotuning_bodies as bodies
from . import join_bodies
from .test_data_parallel import assert_is_local_training

BOTH_POOLS = pytest.mark.parametrize("ranks", [2, 4], indirect=True)
options = st.fixed_dictionaries(
    {},
    optional={
        "bucket_cap_mb": caps_mb(),
        "static_graph": st.booleans(),
        "gradient_as_bucket_view": st.booleans(),
        "batched_grad_copy": st.booleans(),
        "debug": st.booleans(),
    },
)


def assert_same(mine: list, theirs: list) -> None:
    """Gradients by iteration, bit for bit; None where there is none."""
    for a, b in zip(chain(*mine), chain(*theirs), strict=True):
        assert a is b is None or torch.equal(a, b)


def dtypes_of(program) -> tuple[str, ...]:
    return tuple(weight.dtype for weight in program.weights)


@BOTH_POOLS
@examples(15)
@given(st.data())
def test_buckets_become_those_of_the_tuner_and_no_gradient_changes(ranks, data):
    """Random models, partitions and features; ranks differ in how many passes they run under no_sync."""
    iterations, after = data.draw(st.integers(1, 3)), 2
    chosen = data.draw(options) | {"local_passes": data.draw(st.integers(0, 1))}
    before = (3 if chosen.get("static_graph") else 2) + iterations
    program = data.draw(integer_programs(ranks.world_size, ["train"] * (before + after)))
    tuned = data.draw(partitions(len(program.weights), dtypes_of(program)))
    without = ranks.run(partial(bodies.train, **chosen), program, None)
    with_it = ranks.run(partial(bodies.train, **chosen), program, Autotune(bodies.Answers(tuned), iterations))
    for rank, (one, other) in enumerate(zip(with_it, without, strict=True)):
        assert_same(one.gradients, other.gradients)
        assert one.layouts[:-after] == other.layouts[:-after]
        assert one.layouts[-after:] == [tuple(map(tuple, tuned))] * after
        assert len(one.traces) == (rank == 0)
        is_new = one.layouts[-1] != other.layouts[-1]
        expected = {"autotune_iteration_time": 50, "autotune_default_iteration_time": 70}
        assert one.logged == {"autotuned": is_new, **expected}
        assert len(one.lines) == (rank == 0)


@examples(25)
@given(st.data(), options)
def test_tuned_training_is_local_training(two_ranks, data, options):
    """With an optimiser: the fourth or fifth of six iterations is the first one with the tuner's buckets."""
    program = data.draw(integer_programs(2, ["train"] * 6))
    tuned = data.draw(partitions(len(program.weights), dtypes_of(program)))
    autotune = Autotune(bodies.Answers(tuned), iterations=1)
    assert_is_local_training(two_ranks, program, options | {"autotune": autotune})


@examples(8)
@given(st.data())
def test_a_comm_hook_gets_the_tuners_buckets_and_averages_the_same(two_ranks, data):
    program = data.draw(integer_programs(2, ["train"] * 5))
    tuned = data.draw(partitions(len(program.weights), dtypes_of(program)))
    without = two_ranks.run(bodies.train_with_hook, program, None)
    with_it = two_ranks.run(bodies.train_with_hook, program, Autotune(bodies.Answers(tuned), 1))
    for mine, theirs in zip(with_it, without, strict=True):
        assert_same(mine, theirs)


MIXED = "TypeError: expected TunedBuckets or None from the tuner, got "
WRONG = {
    "raises": (ArithmeticError("no luck"), "ArithmeticError: no luck"),
    "nothing like buckets": ("[[0]]", MIXED + "str"),
    "no buckets": (TunedBuckets(5, 1, 1), "TypeError: "),
    "empty": ([], "ValueError: the tuner's buckets: parameters "),
    "an empty bucket": ([[]], "ValueError: the tuner's buckets: bucket 0 is empty"),
    "unknown": ([[-1]], "ValueError: the tuner's buckets: expected parameter indices 0 to "),
    "no time": (TunedBuckets([[0]], None, 1), ""),
}


@BOTH_POOLS
@pytest.mark.parametrize("wrong", WRONG)
@examples(4)
@given(st.data())
def test_if_the_tuner_fails_all_ranks_keep_their_buckets_and_training_goes_on(ranks, wrong, data):
    answer, expected = WRONG[wrong]
    program = data.draw(integer_programs(ranks.world_size, ["train"] * 5))
    without = ranks.run(bodies.train, program, None)
    with_it = ranks.run(bodies.train, program, Autotune(bodies.Answers(answer), 1))
    for rank, (one, other) in enumerate(zip(with_it, without, strict=True)):
        assert_same(one.gradients, other.gradients)
        assert one.layouts == other.layouts
        assert one.logged["autotuned"] == 0
        assert one.logged["autotune_error"].startswith(expected)
        assert one.logged == with_it[0].logged
        assert one.lines == [
            f"WARNING autotune: the {len(one.layouts[-1])} buckets stay, because tuning failed: "
            + one.logged["autotune_error"]
        ] * (rank == 0)


def test_buckets_that_cannot_be_one_buffer_are_refused_and_others_are_taken(two_ranks):
    """Parameters 0 (sparse), 1 and 2 (float32), 3 and 4 (float64)."""
    untuned = two_ranks.run(bodies.train_words, None)
    for answer, error in (
        ([[4], [3], [1, 2], [0]], ""),
        ([[3, 4], [1, 2, 0]], "bucket 1 holds embedding.weight, whose gradients are sparse"),
        ([[0], [1], [2, 3], [4]], "bucket 2 mixes dtypes or devices"),
    ):
        for (every, layout, why), (expected, before, _) in zip(
            two_ranks.run(bodies.train_words, answer), untuned, strict=True
        ):
            assert_same(every, expected)
            assert layout == (before if error else tuple(map(tuple, answer)))
            assert error in why
            assert bool(error) == bool(why)


@examples(40)
@given(
    st.tuples(st.integers(0, 7), st.integers(0, 7)),
    st.integers(1, 3),
    st.sampled_from(["plain", "buffers"]),
    st.booleans(),
)
def test_ranks_that_run_out_of_inputs_tune_with_the_others(two_ranks, inputs, iterations, kind, initial):
    """A sum of two has one order, so all values are the same to the bit, whatever the buckets."""
    arguments = {"kind": kind, "join": {"divide_by_initial_world_size": initial}}
    count = 4 if kind == "plain" else 6
    tuned = Autotune(bodies.Answers([[index] for index in range(count)]), iterations)
    without = two_ranks.run(partial(join_bodies.train, **arguments), "ours", inputs)
    with_it = two_ranks.run(partial(join_bodies.train, **arguments, options={"autotune": tuned}), "ours", inputs)
    for mine, theirs in zip(with_it, without, strict=True):
        assert mine[-1] == theirs[-1]
        assert_same(mine[:-1], theirs[:-1])


@pytest.mark.parametrize("iterations", [1, 3])
def test_nothing_of_the_tuning_remains(two_ranks, iterations):
    """Neither after it nor of a module that is dropped while it is recorded, which frees its process group."""
    for during, after, is_left in two_ranks.run(bodies.what_remains, iterations):
        assert during == [True] * 4
        assert after == [False] * 4
        assert not is_left


def test_copies_made_while_recording_are_not_recorded_and_tune_themselves(two_ranks):
    for found in two_ranks.run(bodies.copies_made_while_recording):
        assert [free for free, _, _ in found] == [False, True, True]
        assert all((layout, average) == (((1,), (0,)), [0.5, 0.5]) for _, layout, average in found)


@pytest.mark.parametrize("train", [bodies.train_compiled, bodies.freeze_when_the_recording_starts])
def test_modules_that_are_compiled_or_frozen_for_a_while_are_tuned(two_ranks, train):
    for logged, layout, average in two_ranks.run(train):
        assert logged["autotuned"] == 1
        assert layout == ((1,), (0,))
        assert average == [0.5, 0.5]


def test_in_a_new_process_group_the_buckets_are_tuned_again(two_ranks):
    for rank, (calls, layouts, averages) in enumerate(two_ranks.run(bodies.tune_again_in_a_new_group)):
        assert calls == (2 if rank == 0 else 0)
        assert layouts[1:] == [((1,), (0,))] * 2
        assert averages == [[0.5, 0.5]] * 3


@pytest.mark.parametrize("iterations", [1, 4])
def test_the_tuner_gets_a_recording_of_all_ranks(two_ranks, iterations):
    (trace, logged), (_, others) = two_ranks.run(bodies.recorded, iterations)
    assert trace.workload.source == "ddplab"
    assert trace.layouts == (((1,), (0,)),)
    assert [rank.rank for rank in trace.ranks] == [0, 1]
    for rank in trace.ranks:
        assert len(rank.iterations) == iterations
        assert all(one.optimizer_end_ns is not None and None not in one.ready_ns for one in rank.iterations)
    for data in (logged, others):
        assert data["rebuilt_per_bucket_param_indices"] == "1 0"
        assert (data["autotuned"], data["autotune_default_iteration_time"]) == (1, 70)


REFUSED = [
    ({"plan": [[0, 1, 2, 3]]}, None, "ValueError: autotune: expected no plan"),
    ({"find_unused_parameters": True}, None, "ValueError: autotune: expected find_unused_parameters=False or"),
    ({"delay": True}, None, "ValueError: autotune: expected every parameter in a bucket"),
    ({"autotune": True}, None, "TypeError: autotune: expected an object such as ddplab.autotune(fabric), got True"),
    ({}, 1, "RuntimeError: autotune: expected the same on all ranks; the number of iterations to record is None on"),
    ({"find_unused_parameters": True, "static_graph": True}, None, ""),
]


@pytest.mark.parametrize(("options", "only_rank", "expected"), REFUSED)
def test_what_cannot_be_tuned_is_refused_on_all_ranks(two_ranks, options, only_rank, expected):
    errors = two_ranks.run(bodies.refused, options, only_rank)
    assert errors[0] == errors[1]
    assert errors[0].startswith(expected)
    assert bool(errors[0]) == bool(expected)


def test_there_must_be_an_iteration_to_record():
    with pytest.raises(ValueError, match="at least one iteration to record, got 0"):
        Autotune(bodies.Answers(None), iterations=0)
    assert replace(Autotune(bodies.Answers(None)), iterations=1).iterations == 1
