"""The reducer: buckets are launched in one order on every rank, and are rebuilt once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.conformance.training_programs import Weight

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


@pytest.mark.parametrize("options", list(filter(takes, CAPS)), ids=str)
def test_buckets_are_torchs_in_every_iteration(two_ranks, options):
    """The layout, and the moment of the rebuild."""
    if options.get("bucket_cap_mb") == 0 and not takes(["forward_sync_buffers"]):
        pytest.skip("the class of torch 2.11 raises AssertionError for a cap of 0")
    for ours, torchs in two_ranks.run(bodies.layouts_by_iteration, options):
        assert ours == torchs


def test_a_gradient_is_sampled_when_its_bucket_is_full(two_ranks):
    """Torch copies it when it arrives, so that a later hook of the same pass cannot change what is sent."""
    for ours, torchs in two_ranks.run(bodies.gradients_changed_by_a_later_hook):
        assert ours == [3.0]  # the average of 2 * 1 and 2 * 2
        assert torchs == [1.5]
