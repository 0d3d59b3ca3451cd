"""The local search keeps plans valid and never makes them worse."""

from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.bucketing import check_partition
from ddplab.simulator.tuning.plan_times import partition_costs
from ddplab.simulator.tuning.tune import as_layout, improve
from tests.explore import examples
from tests.strategies import partitions

from .tuning_cases import fabrics, plan_times, small_models


@examples(20)
@given(small_models(), fabrics(), st.integers(0, 30), st.data())
def test_the_result_is_a_partition_and_at_least_as_good(trace, fabric, evaluations, data):
    costs = partition_costs(plan_times(trace, fabric))
    plan = as_layout(data.draw(partitions(len(costs.order))))
    asked = []

    def value_ns(one):
        asked.append(one)
        return costs.value_ns(one)

    improved = improve(plan, costs, value_ns, evaluations)
    check_partition(improved, len(costs.order))
    assert costs.value_ns(improved) <= costs.value_ns(plan)
    assert len(asked) <= evaluations + 1
