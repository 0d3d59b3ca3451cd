"""Plan times equal those of `predict`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, predict
from ddplab.simulator.fabric import Processor, Timing
from ddplab.simulator.inputs_with_default_costs import complete
from ddplab.simulator.tuning.plan_times import PlanTimes, with_plan
from ddplab.simulator.tuning.tune import as_layout
from tests.explore import examples
from tests.strategies import emulations, iteration, partitions, trace_of

from .tuning_cases import plan_times


@examples(20)
@given(emulations(), st.sampled_from(["median", "mean"]), st.data())
def test_the_objective_is_that_of_predict(asked, objective, data):
    policy = asked.policy.model_copy(update={"plan": None, "phase": "steady"})
    kinds = tuple(f"{one.dtype} {one.name if one.sparse else ''}" for one in asked.trace.workload.parameters)
    plan = as_layout(data.draw(partitions(len(kinds), kinds)))
    how = {"variation": asked.variation, "stragglers": asked.stragglers}
    inputs = complete(asked.trace, asked.fabric, policy=policy, **how)
    predicted = predict(
        asked.trace, asked.fabric, world_size=asked.world_size, policy=with_plan(inputs, plan).policy, **how
    )
    expected = predicted.iteration_ns if objective == "median" else predicted.mean_ns
    # replays round the ends of slowed steps, so the iteration in the middle may be another one of equal length
    assert PlanTimes(inputs, asked.world_size, objective).value_ns(plan) == pytest.approx(expected, abs=1)


def test_two_iterations_of_which_neither_is_slower_in_every_moment_are_not_ordered():
    """One has the longer backward pass, the other the longer step: which one is the median depends on the buckets."""
    trace = trace_of([[iteration(0, (5,), 5, 9), iteration(0, (8,), 8, 7)]], [10])
    times = plan_times(trace, Fabric.from_table([(2, 10, 3)]))
    assert times.deciding_cycles == [0, 1]
    assert not times.is_ordered


def test_the_worst_case_has_costs_at_the_upper_ends_of_their_bands():
    trace = trace_of([[iteration(0, (10,), 10, 0)]], [100])
    table = (Timing(world_size=2, size_bytes=100, ns=1000, spread=0.5),)
    fabric = Fabric(all_reduce=table, processor=Processor(launch_ns=100, launch_error=1.0))
    assert plan_times(trace, fabric).value_ns(((0,),)) == 10 + 100 + 1000
    assert plan_times(trace, fabric, "worst_case").value_ns(((0,),)) == 10 + 200 + 1500
