"""Slow-downs and costs of hooks that are fitted to reference runs."""

from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.validation.fitted_slow_downs import (
    Reference,
    fitted,
    reference_runs,
    with_hook_costs,
    with_slow_downs,
)
from ddplab.validation.validation_report import Configuration, Measurement, SpeedCheck, policy_of, predict_one
from reference.bucketing import MIB
from simulator import Fabric
from simulator.fabric import Linear, Processor
from simulator.fabric.processor_costs import HookCost
from simulator.schedule.schedule import buckets_of
from simulator.workload.compute_times import recorded_model

from ..strategies import iteration, trace_of, traces

# The reference run


@given(traces(), st.floats(1e-5, 1e-3))
def test_reference_runs_have_buckets_that_no_target_has(trace, cap_mb):
    targets = [Configuration(cap) for cap in (cap_mb, 1e-5, 1e-4, float("inf"))]
    model = recorded_model(trace, unused_allowed=True)
    taken = [buckets_of(policy_of(target), model) for target in targets]
    plans = [buckets_of(policy_of(run), model) for run in reference_runs(trace, targets)]
    assert not [plan for plan in plans if plan in taken or len(plan) < 2]
    assert all(len(many) >= 2 * len(few) for few, many in pairwise(plans))


GRADIENTS = 24
EVEN = trace_of(
    [[iteration(10**7, tuple(10**7 + 2_000_000 * (GRADIENTS - n) for n in range(GRADIENTS)), 6 * 10**7, 0)]],
    [MIB] * GRADIENTS,
)
"""Gradients 2 ms apart, whose all-reduces take 1 ms each."""
SLOWED = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9).model_copy(
    update={"processor": Processor(slow_down=1.5)}
)


@given(st.floats(0, 4), st.floats(-0.05, 0.05))
def test_slow_downs_are_fitted_to_the_reference_runs_on_average(factor, noise):
    """One run was measured too long and the other too short by as much."""
    runs = reference_runs(EVEN, [Configuration(1.0), Configuration(25.0)])
    truth = with_slow_downs(SLOWED, factor)
    measured = {
        run: Reference((predict_one(EVEN, truth, run, 2).iteration_ns / (1 + error),) * 3, SpeedCheck(1, 1))
        for run, error in zip(runs, (noise, -noise), strict=True)
    }
    fabric = fitted(partial(with_slow_downs, SLOWED), EVEN, 2, measured)
    for cap_mb in (1.0, 3.0, 25.0):
        found, right = (predict_one(EVEN, one, Configuration(cap_mb), 2).iteration_ns for one in (fabric, truth))
        assert found == pytest.approx(right, rel=0.02)


@given(st.floats(0, 4))
def test_a_comm_hook_is_fitted_to_its_reference_run(factor):
    hook = HookCost(name="fp16", compress=Linear(ns_per_byte=1), decompress=Linear(fixed_ns=1000))
    fabric = SLOWED.model_copy(update={"processor": Processor(hooks=(hook,))})
    run = Configuration(1.0, hook="fp16")
    measured_ns = predict_one(EVEN, with_hook_costs(fabric, "fp16", factor), run, 2).iteration_ns
    measured = {run: Reference((measured_ns,) * 3, SpeedCheck(1, 1))}
    found = fitted(partial(with_hook_costs, fabric, "fp16"), EVEN, 2, measured)
    assert predict_one(EVEN, found, run, 2).iteration_ns == pytest.approx(measured_ns, rel=0.01)


def test_turns_of_the_reference_run_are_compared_at_the_usual_speed():
    turns = [Measurement((ns,), SpeedCheck(ns // 2, ns // 2)) for ns in (100, 110, 90)]
    assert Reference.of(turns) == Reference((pytest.approx(100),) * 3, SpeedCheck(50, 50))
