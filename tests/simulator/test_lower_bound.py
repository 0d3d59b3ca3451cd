"""No buckets, in any order and of any sizes, are faster than the bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator import Fabric, Policy, tune
from ddplab.simulator.fabric import Linear, Processor
from ddplab.simulator.inputs_with_default_costs import complete
from ddplab.simulator.tuning.lower_bound import lower_bound_ns
from ddplab.simulator.tuning.plan_times import PlanTimes, partition_costs
from ddplab.simulator.tuning.tune import as_layout
from tests.explore import examples
from tests.strategies import emulations, iteration, partitions, trace_of

from .tuning_cases import contiguous_partitions, fabrics, plan_times, small_models


@examples(20)
@given(
    small_models(parameters=5, ranks=2, one_order=False),
    st.sampled_from([1.0, 1.2, 2.5]).flatmap(lambda slow_down: fabrics(slow_down=slow_down)),
    st.sampled_from([None, "parameters", "buckets"]),
    st.data(),
)
def test_no_buckets_are_faster(trace, fabric, zero, data):
    times = plan_times(trace, fabric, policy=Policy(zero=zero))
    bound_ns = lower_bound_ns(partition_costs(times))
    for _ in range(4):
        plan = as_layout(data.draw(partitions(len(trace.sizes_bytes))))
        assert bound_ns <= times.value_ns(plan)
    for plan in contiguous_partitions(times.recorded.ready_order):
        assert bound_ns <= times.value_ns(plan)


@examples(20)
@given(emulations(), st.sampled_from(["median", "mean", "p95", "worst_case"]), st.data())
def test_no_buckets_are_faster_under_any_settings(asked, objective, data):
    """Comm hooks, unused and sparse gradients, two collectives at a time, stragglers, traces with communication."""
    varied = {"grouping": data.draw(st.sampled_from(["buckets", "fusion"]))}
    policy = asked.policy.model_copy(update={"plan": None, "phase": "steady", "order": "ready"} | varied)
    kinds = [(one.dtype, one.name if one.sparse else "") for one in asked.trace.workload.parameters]
    plan = as_layout(data.draw(partitions(len(kinds), tuple(map(str, kinds)))))
    how = {"variation": asked.variation, "stragglers": asked.stragglers, "assume": False}
    times = PlanTimes(complete(asked.trace, asked.fabric, policy=policy, **how), asked.world_size, objective)
    assert lower_bound_ns(partition_costs(times)) <= times.value_ns(plan)


@examples(20)
@given(
    st.lists(st.tuples(st.sampled_from([4, 400]), st.integers(0, 40)), min_size=1, max_size=2),
    st.integers(0, 60),
    st.sampled_from(["none", "quantize_per_tensor", "quantize_per_channel"]),
)
def test_a_late_gradient_without_elements_sends_nothing_and_delays_no_collective(gradients, late_ns, hook):
    sizes, ready = zip((0, late_ns), *gradients, strict=True)
    trace = trace_of([[iteration(0, ready, max(ready), 0)]], sizes)
    fabric = Fabric.from_table([(2, 0, 22), (2, 10**6, 22 + 10**6)])
    times = plan_times(trace, fabric, policy=Policy(hook=hook, broadcast_buffers=False))
    bound_ns = lower_bound_ns(partition_costs(times))
    assert all(
        bound_ns <= times.value_ns(as_layout(one)) for one in contiguous_partitions(times.recorded.ready_order)
    )


@examples(20)
@given(st.lists(st.sampled_from([0, 4, 40]), min_size=1, max_size=3), st.integers(0, 2), st.booleans())
def test_gradients_that_no_rank_has_send_nothing_in_a_bucket_of_their_own(sizes, first_used, known):
    """All-reduces of such buckets are skipped, so that perhaps none is left."""
    ready = tuple(None if index < first_used else 0 for index in range(len(sizes)))
    trace = trace_of([[iteration(0, ready, 0, 0)]], sizes)
    fabric = Fabric.from_table([(2, 0, 30), (2, 10**6, 30 + 10**6)])
    hook = "none" if known else "quantize_per_tensor"
    options = {"find_unused_parameters": True, "static_graph": True, "skip_all_reduce_unused_params": True}
    times = plan_times(trace, fabric, policy=Policy(hook=hook, broadcast_buffers=False, **options))
    plans = contiguous_partitions(range(len(sizes)))
    assert lower_bound_ns(partition_costs(times)) <= min(times.value_ns(as_layout(one)) for one in plans)


@examples(10)
@given(st.integers(0, 60), st.sampled_from([1.5, 3.0]))
def test_a_recording_of_unknown_buckets_contains_their_slow_downs(copy_ns, slow_down):
    """Any buckets count as the recorded ones, so no copy is slowed down. Two dtypes are in two buckets."""
    trace = trace_of([[iteration(0, (0, 2), 2, 0)]], [24, 24])
    first, second = trace.workload.parameters
    parameters = (first, second.model_copy(update={"dtype": "uint8"}))
    workload = trace.workload.model_copy(update={"source": "torch", "parameters": parameters})
    fabric = Fabric.from_table([(2, 0, 30), (2, 10**6, 30)])
    processor = Processor(copy_out=Linear(fixed_ns=copy_ns), slow_down=slow_down)
    fabric = fabric.model_copy(update={"processor": processor})
    times = plan_times(trace.model_copy(update={"workload": workload}), fabric)
    assert times.recorded.layout is None
    plans = (((0,), (1,)), ((1,), (0,)))
    assert lower_bound_ns(partition_costs(times)) <= min(map(times.value_ns, plans))


@pytest.mark.parametrize("zero", [None, "parameters", "buckets"])
def test_where_a_bucket_costs_a_line_and_gradients_are_small_the_bound_is_reached(zero):
    """100 equal gradients, one every 100 ns; a bucket costs 1000 ns and 2 ns a byte, so the network limits.

    With ZeRO, updated parameters are broadcast after the step, whatever the buckets are.
    """
    count, size = 100, 100
    ready = tuple(100 * (count - index) for index in range(count))
    trace = trace_of([[iteration(0, ready, 100 * count, 0)]], [size] * count)
    fabric = Fabric.from_table([(2, 0, 1000), (2, 10**6, 1000 + 2 * 10**6)])
    fabric = fabric.with_processor(launch_ns=10)
    costs = partition_costs(plan_times(trace, fabric, policy=Policy(zero=zero)))

    plan = tune(trace, fabric, world_size=2, zero=zero)
    assert plan.iteration_ns >= plan.lower_bound_ns >= 0.97 * plan.iteration_ns
    assert plan.lower_bound_ns == lower_bound_ns(costs)
