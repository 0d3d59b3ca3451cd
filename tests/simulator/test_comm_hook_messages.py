"""Messages of comm hooks: the simulator's are those that the real hooks send."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from simulator.schedule.comm_hook_messages import BatchedPowerSGD, CommHook, PowerSGD, named_hook

from ..explore import examples
from ..strategies import caps_mb, hook_shapes, message_shapes
from . import hook_cost_bodies
from .test_schedule import PHASES, assert_predicted

NAMES = {
    "none": "allreduce",
    "noop": "noop",
    "fp16": "fp16",
    "bf16": "bf16",
    "quantize_per_tensor": "per tensor",
    "quantize_per_channel": "per channel",
}
"""A hook's name here: that of the real one in `hook_bodies`."""


@examples(10)
@given(st.integers(2, 30), st.data(), st.sampled_from(["none", "noop"]))
def test_of_sparse_gradients_the_touched_rows_are_gathered(two_ranks, rows, data, name):
    touched = data.draw(st.integers(1, rows))
    settings = {"bucket_cap_mb": 25}
    results = two_ranks.run(hook_cost_bodies.of_embeddings, rows, touched, settings, (NAMES[name], {}))
    assert_predicted(results, settings | {"hook": named_hook(name), "sparse_density": touched / rows}, PHASES[:3])


@pytest.mark.parametrize("name", [name for name in NAMES if "quantize" not in name])
@examples(8)
@given(message_shapes(), st.sampled_from(["float32", "float64"]), caps_mb())
def test_a_hooks_messages_are_what_the_real_hook_sends(two_ranks, name, shapes, dtype, cap):
    _assert_messages(two_ranks, name, shapes, dtype, cap)


@pytest.mark.parametrize("name", ["quantize_per_tensor", "quantize_per_channel"])
@examples(8)
@given(hook_shapes(), st.sampled_from(["float32", "float64"]), caps_mb())
@example(shapes=((0, 3), (600,), ()), dtype="float32", cap=None)
def test_quantised_messages_are_what_the_real_hook_gathers(two_ranks, name, shapes, dtype, cap):
    """Of buckets with elements: the real hooks take no others."""
    _assert_messages(two_ranks, name, shapes, dtype, cap)


def _assert_messages(pool, name, shapes, dtype, cap):
    settings = {"bucket_cap_mb": cap}
    results = pool.run(hook_cost_bodies.of_hook, shapes, dtype, settings, (NAMES[name], {}))
    assert_predicted(results, settings | {"hook": named_hook(name)})


@examples(10)
@given(message_shapes(), caps_mb(), st.integers(1, 3))
def test_a_hook_of_halved_gradients_sends_halves(two_ranks, shapes, cap, rank):
    state = {"matrix_approximation_rank": rank, "min_compression_rate": 2.0}
    settings = {"bucket_cap_mb": cap}
    results = two_ranks.run(hook_cost_bodies.of_hook, shapes, "float32", settings, ("compress(bf16)(power)", state))
    settings["hook"] = named_hook(f"bf16+power_sgd:{rank}")
    assert_predicted(results, settings, (None, None, "steady", "steady"))


@pytest.mark.parametrize(("kind", "real"), [(PowerSGD, "power"), (BatchedPowerSGD, "batched power")])
@examples(25)
@given(message_shapes(), st.sampled_from(["float32", "float64"]), caps_mb(), st.integers(1, 4), st.floats(0.1, 3))
@example(shapes=((6, 5), (0,)), dtype="float32", cap=1e-6, rank=1, rate=0.5)
@example(shapes=((20, 30), (3,), (20, 30)), dtype="float32", cap=1e-6, rank=2, rate=2.0)
def test_powersgd_sends_ps_and_qs_in_turn(two_ranks, kind, real, shapes, dtype, cap, rank, rate):
    """P0, P1, Q0, P2, Q1, ..., each with what is not compressed, as soon as it compresses: in iteration 2."""
    state = {"matrix_approximation_rank": rank, "min_compression_rate": rate}
    settings = {"bucket_cap_mb": cap}
    results = two_ranks.run(hook_cost_bodies.of_hook, shapes, dtype, settings, (real, state))
    assert_predicted(results, settings | {"hook": kind(**state)}, (None, None, "steady", "steady"))
    assert_predicted(results, settings | {"hook": CommHook()}, ("first", "rebuild", None, None))
