"""Predictions with measured costs of comm hooks, and with slow-downs within their bands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, predict
from ddplab.simulator.fabric import Linear, Processor
from ddplab.simulator.fabric.processor_costs import HookCost
from ddplab.simulator.schedule.comm_hook_messages import named_hook

from ..strategies import HOOK_COSTS, iteration, policies, trace_of, traces


@given(st.floats(1, 5), st.floats(0, 2))
def test_the_slow_down_moves_by_its_band_and_never_below_one(slow_down, error):
    processor = Processor(slow_down=slow_down, slow_down_error=error)
    assert processor.slowed(0) == processor
    assert processor.slowed(1).slow_down == pytest.approx(slow_down * (1 + error))
    assert 1 <= processor.slowed(-1).slow_down <= slow_down


FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9)
ONE = iteration(forward_ns=10, ready_ns=(30, 20), backward_end_ns=32, step_ns=5)


def with_hooks(*costs: HookCost) -> Fabric:
    return FABRIC.model_copy(update={"processor": Processor(hooks=costs)})


@given(st.integers(1, 8), st.sampled_from(["fp16", "quantize_per_tensor", "bf16+quantize_per_tensor"]))
def test_what_is_gathered_from_more_ranks_takes_longer_to_decompress(asked, name):
    """All else that a hook computes does not depend on the ranks."""
    cost = HookCost(name=name, compress=Linear(fixed_ns=70), decompress=Linear(fixed_ns=840))
    prediction = predict(trace_of([[ONE]], [400, 400]), with_hooks(cost), world_size=asked, hook=name)
    grown = 840 * asked if "quantize" in name else 840
    assert prediction.breakdown["hook"] == 70 + grown


def test_the_prediction_lists_what_counts_as_free():
    """Hooks that compute nothing, were measured, or have explicit costs are not listed."""
    trace, cost = trace_of([[ONE]], [400, 400]), Linear(fixed_ns=1)
    measured = with_hooks(HookCost(name="power_sgd:1", compress=cost))
    hook_with_costs = named_hook("bf16").model_copy(update={"compress": cost})
    no_costs = "the fabric has no processor costs, so copies, launches and slow-downs count as free"
    for hook in ("none", "noop", "power_sgd", hook_with_costs):
        assert predict(trace, measured, world_size=2, hook=hook).counted_as_free == (no_costs,)
    complete = FABRIC.model_copy(update={"processor": Processor(launch_ns=1)})
    assert predict(trace, complete, world_size=2).counted_as_free == ()
    (sentence,) = predict(trace, complete, world_size=2, hook="fp16").counted_as_free
    assert sentence.startswith("the hook fp16 was not measured")


@given(st.data())
def test_measured_costs_count_like_explicit_ones_which_take_precedence(data):
    trace = data.draw(traces())
    hook = data.draw(policies(tuple(trace.keys))).hook
    parts = {part: getattr(hook, part) for part in HOOK_COSTS}
    parts["decompress"] = parts["decompress"].times(1 / hook.gathered(2))
    cost = HookCost(name=hook.name, **parts)
    other = HookCost(name=hook.name, compress=Linear(fixed_ns=12345))
    explicit = predict(trace, FABRIC, world_size=2, hook=hook)
    if hook.has_costs:
        assert predict(trace, with_hooks(cost), world_size=2, hook=named_hook(hook.name)) == explicit
        assert predict(trace, with_hooks(other), world_size=2, hook=hook) == explicit
