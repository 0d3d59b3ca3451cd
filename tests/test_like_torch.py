"""Torch's DDP is the oracle: the same script sees the same bits under our class."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import bodies, scenarios
from .explore import examples
from .strategies import caps_mb, scripts

modes = st.fixed_dictionaries(
    {"gradient_as_bucket_view": st.booleans(), "batched_grad_copy": st.booleans(), "bucket_cap_mb": caps_mb()}
)
seeds = st.integers(0, 2**31 - 1)


@pytest.mark.parametrize("case", scenarios.CASES)
def test_a_script_sees_the_same_as_under_torchs_class(two_ranks, case):
    for ours, torchs in two_ranks.run(bodies.run_scenario, case):
        bodies.assert_same(ours, torchs)


@examples(60)
@given(scripts(2, any_use=True), modes, seeds)
def test_any_parameters_may_be_used_in_any_step_with_find_unused_parameters(two_ranks, script, mode, seed):
    """Used by one rank or none, under no_sync or not, gradients kept, zeroed or None before."""
    sizes, steps = script
    options = mode | {"find_unused_parameters": True}
    for ours, torchs in two_ranks.run(bodies.run_random_script, sizes, seed, steps, options):
        bodies.assert_same(ours, torchs)


@examples(60)
@given(scripts(2, any_use=False), modes, st.booleans(), seeds)
def test_any_order_of_steps_is_as_under_torchs_class(two_ranks, script, mode, static, seed):
    sizes, steps = script
    if static:
        steps = [scenarios.Step(step.used, True, step.zero, step.optimize) for step in steps]
    options = mode | {"static_graph": static}
    for ours, torchs in two_ranks.run(bodies.run_random_script, sizes, seed, steps, options):
        bodies.assert_same(ours, torchs)
