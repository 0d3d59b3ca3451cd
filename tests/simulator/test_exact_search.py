"""The exact search finds what trying every contiguous partition finds."""

from hypothesis import given
from hypothesis import strategies as st

from simulator.tuning.exact_search import Segments, _undominated, best_cut
from simulator.tuning.partition_costs import partition_costs
from tests.explore import examples

from .tuning_cases import contiguous_partitions, fabrics, plan_times, small_models


@examples(30)
@given(small_models(parameters=6), fabrics(), st.booleans())
def test_with_constant_speeds_the_cut_is_the_best_of_all_partitions(trace, fabric, starts_from_best):
    times = plan_times(trace, fabric)
    costs = partition_costs(times)
    assert costs.is_exact or len(set(trace.ranks[0].iterations[0].ready_ns)) < len(trace.sizes_bytes)
    shortest = min(map(times.value_ns, contiguous_partitions(costs.order)))
    known_ns = shortest if starts_from_best else 10**9
    cut = best_cut(costs, Segments(costs), known_ns)
    assert cut is not None
    assert cut.is_complete
    assert cut.recurrence_ns == shortest == times.value_ns(tuple(map(tuple, cut.buckets)))


@examples(20)
@given(small_models(parameters=5), fabrics(slow_down=1.7))
def test_with_slow_downs_no_partition_is_below_the_cut_by_the_recurrence(trace, fabric):
    """The recurrence is then a lower bound of the replay, so the least recurrence is one for all partitions."""
    times = plan_times(trace, fabric)
    costs = partition_costs(times)
    cut = best_cut(costs, Segments(costs), 10**9)
    assert cut is not None
    every = list(contiguous_partitions(costs.order))
    grid_ns = 1 + 1e-6 * cut.recurrence_ns
    assert cut.recurrence_ns <= min(costs.value_ns(plan) for plan in every) + grid_ns * len(costs.order)
    assert cut.recurrence_ns <= min(map(times.value_ns, every)) + grid_ns * len(costs.order) + 1


def test_a_limit_on_the_bytes_of_a_bucket_holds():
    from tests.strategies import iteration, trace_of

    trace = trace_of([[iteration(0, (10, 20, 30), 40, 0)]], [100, 100, 100])
    from simulator import Fabric

    costs = partition_costs(plan_times(trace, Fabric.from_table([(2, 1, 1000), (2, 300, 1000)])))
    segments = Segments(costs)
    assert best_cut(costs, segments, 10**9).buckets == [[0, 1, 2]]
    limited = best_cut(costs, segments, 10**9, most_bytes=200)
    assert sorted(map(len, limited.buckets)) == [1, 2]


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=80))
def test_kept_columns_are_those_that_no_other_column_dominates(rows):
    import numpy as np

    kept = [rows[place] for place in _undominated(np.array(rows, float).T)]
    minimal = {row for row in rows if not any(other != row and all(map(int.__le__, other, row)) for other in rows)}
    assert sorted(kept) == sorted(minimal)
