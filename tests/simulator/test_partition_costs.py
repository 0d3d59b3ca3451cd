"""The recurrence gives the iterations of the engines, and is never above them."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ddplab.simulator.schedule.policy import Policy
from ddplab.simulator.tuning.plan_times import partition_costs
from tests.explore import examples
from tests.strategies import partitions

from .tuning_cases import fabrics, plan_times, small_models


@examples(25)
@given(small_models(ranks=2, cycles=2), fabrics(), st.data())
def test_the_recurrence_is_the_iteration_of_contiguous_buckets(trace, fabric, data):
    costs = partition_costs(plan_times(trace, fabric))
    edges = sorted(data.draw(st.sets(st.integers(1, max(1, len(costs.order) - 1)))))
    edges = [0, *(edge for edge in edges if edge < len(costs.order)), len(costs.order)]
    plan = tuple(costs.order[start:end] for start, end in pairwise(edges))
    assert costs.recurrence_ns(plan).tolist() == costs.times.cycles_ns(plan).tolist()


@examples(25)
@given(
    small_models(ranks=2, one_order=False), st.sampled_from([1.0, 1.3, 2.5]).flatmap(lambda s: fabrics(slow_down=s)),
    st.sampled_from(["buckets", "fusion"]), st.data(),
)  # fmt: skip
def test_the_recurrence_is_at_most_the_iteration_of_any_buckets(trace, fabric, grouping, data):
    costs = partition_costs(plan_times(trace, fabric, policy=Policy(grouping=grouping)))
    plan = tuple(map(tuple, data.draw(partitions(len(costs.order)))))
    assert costs.recurrence_ns(plan)[0] <= costs.times.cycles_ns(plan)[0] + len(plan)
