"""Step costs: packing, launches, copies and searches are charged once, on the ranks that spend them."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab import emulate
from ddplab.reference.trace import BucketTimes
from ddplab.simulator import predict, sweep
from ddplab.simulator.fabric import Fabric, Linear, Processor
from ddplab.simulator.prediction import COMPUTATION
from ddplab.simulator.schedule.comm_hook_messages import CommHook, named_hook

from ..explore import examples
from ..strategies import any_predictions, iteration, partitions, trace_of, traces
from .changed_traces import with_iterations, with_workload
from .span_lines import ALIKE, fabric, lines_of

FREE = Fabric.from_alpha_beta(alpha_ns=0, bytes_per_s=1e18)
FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9, concurrency=2)


def test_a_gradient_alone_in_its_bucket_is_not_copied_where_the_reducer_sends_it_in_place():
    costs = fabric(8, processor=Processor(pack=Linear(fixed_ns=1), copy_out=Linear(fixed_ns=3)))
    in_place = {"grouping": "fusion"}
    free = fabric(8, processor=Processor())
    assert lines_of([ALIKE], [[1], [0]], costs, **in_place) == lines_of([ALIKE], [[1], [0]], free)
    assert lines_of([ALIKE], [[1, 0]], costs, **in_place) == lines_of([ALIKE], [[1, 0]], costs)


@examples(20)
@given(any_predictions(world_sizes=st.just(1)))
def test_one_rank_trains_locally_and_pays_only_its_own_processor(asked):
    """Copies, launches, what a hook computes; nothing waits."""
    engine_input = asked.predict().timeline.engine_input
    assert asked.predict().timeline.iteration_ns == engine_input.duration_ns.sum()
    assert asked.predict().breakdown["exposed_comm"] == asked.predict().breakdown["stragglers"] == 0
    policy = asked.policy.model_copy(update={"hook": CommHook()})
    bare = replace(asked, fabric=FREE, policy=policy, stragglers=()).predict()
    steps = bare.timeline.engine_input.schedule.steps
    local = [place for place, step in enumerate(steps) if step.kind in COMPUTATION]
    assert bare.iteration_ns == bare.compute_ns
    assert bare.timeline.iteration_ns == bare.timeline.engine_input.duration_ns[:, local].sum()


def test_a_rank_that_has_joined_sends_zeros_through_the_hook():
    """Which compresses and launches them; it neither packs nor copies out."""
    processor = Processor(pack=Linear(fixed_ns=3), copy_out=Linear(fixed_ns=3), launch_ns=5)
    costs = FREE.model_copy(update={"processor": processor})
    hook = named_hook("fp16").model_copy(update={"compress": Linear(fixed_ns=100), "decompress": Linear(fixed_ns=7)})
    trace = trace_of([[iteration(10, (30,), 30, 10)]], [4])
    prediction = predict(trace, costs, world_size=2, inputs=[2, 1], hook=hook)
    (first, second) = prediction.samples_ns
    shadow = prediction.timeline.engine_input.duration_ns[prediction.timeline.engine_input.ranks.index(1)]
    assert first == second
    assert shadow.sum() == 100 + 5 + 7


# Other buckets than those of the recording

COSTLY = Processor(pack=Linear(fixed_ns=9), launch_ns=7, stall_ns=3, slow_down=1.5)


def recorded_with(trace, layout, buckets=()):
    """The trace as if training under DDP had been recorded, with these buckets and their times in every iteration."""
    times = tuple(BucketTimes(ready_ns=a, launched_ns=a, done_ns=b) for a, b in buckets)
    times = times or tuple(BucketTimes(ready_ns=0, launched_ns=0, done_ns=0) for _ in layout)
    update = {"layout": 0, "synchronized": True, "buckets": times}
    changed = with_iterations(with_workload(trace, source="torch"), lambda one: one.model_copy(update=update))
    return changed.model_copy(update={"layouts": (tuple(map(tuple, layout)),)})


@given(traces(), st.data())
def test_a_recording_of_ddp_is_not_charged_for_what_it_contains(trace, data):
    """Not by a nanosecond, whatever copies, launches and slow-downs cost, where the buckets are those recorded."""
    layout = data.draw(partitions(len(trace.keys), tuple(trace.keys)))
    costly = FABRIC.model_copy(update={"processor": COSTLY})
    for recorded, plan in ((with_workload(trace, source="torch"), None), (recorded_with(trace, layout), layout)):
        charged, free = (predict(recorded, fabric, world_size=4, plan=plan) for fabric in (costly, FABRIC))
        assert charged.samples_ns == free.samples_ns


@given(st.permutations(range(8)), st.integers(1, 8), st.integers(0, 20), st.integers(0, 20), st.integers(1, 8))
def test_each_further_bucket_costs_a_launch_and_fewer_cost_none(order, recorded, launch_ns, stall_ns, world_size):
    trace = trace_of([[iteration(10, tuple(range(20, 100, 10)), 90, 10)]], [4] * 8)

    def split(count):
        edges = [8 * place // count for place in range(count + 1)]
        return tuple(tuple(order[start:end]) for start, end in pairwise(edges))

    processor = Processor(pack=Linear(fixed_ns=9), launch_ns=launch_ns, stall_ns=stall_ns)
    costs = FREE.model_copy(update={"processor": processor})
    times = [
        predict(recorded_with(trace, split(recorded)), costs, world_size=world_size, plan=split(count)).iteration_ns
        for count in range(1, 9)
    ]
    assert times == sorted(times)
    assert times[:recorded] == [100] * recorded
    each_ns = processor.launch_on(world_size)
    for count in range(recorded, 9):
        assert times[count - 1] - 100 == pytest.approx((count - recorded) * each_ns, abs=4 * count)


@given(st.lists(st.integers(1, 3000), min_size=4, max_size=4), st.integers(1, 6000), partitions(4), partitions(4))
def test_new_buckets_give_the_times_that_the_plain_module_gives(gaps_ns, cost_ns, before, after):
    """A recording whose collectives slowed computation by 1.5, in other buckets, predicts like one without them."""
    ready_ns = tuple(accumulate(gaps_ns, initial=1000))[1:]
    plain = trace_of([[iteration(1000, ready_ns, ready_ns[-1], 10)]], [4] * 4)
    fabric = Fabric.from_table([(2, 4, cost_ns), (2, 16, cost_ns)]).with_processor(slow_down=1.5)
    slowed_ns, buckets = _as_recorded(ready_ns, before, cost_ns)
    end_ns = max(slowed_ns[-1], buckets[-1][1])
    one = iteration(1000, slowed_ns, end_ns, 10).model_copy(update={"computed_ns": slowed_ns[-1]})
    recorded = recorded_with(trace_of([[one]], [4] * 4), before, buckets)
    plan = tuple(map(tuple, after))
    expected = predict(plain, fabric, world_size=2, plan=plan).iteration_ns
    assert predict(recorded, fabric, world_size=2, plan=plan).iteration_ns == pytest.approx(expected, abs=12)
    table = sweep(recorded, fabric, world_sizes=[2], bucket_caps_mb=[1e-6, 25])
    for cap, ns in zip(table["bucket_cap_mb"], table["iteration_ns"], strict=True):
        assert predict(recorded, fabric, world_size=2, bucket_cap_mb=cap).iteration_ns == ns


@examples(20)
@given(traces(), st.data())
def test_emulated_reducers_take_the_predicted_time_in_other_buckets(trace, data):
    layout, plan = (data.draw(partitions(len(trace.keys), tuple(trace.keys))) for _ in range(2))
    recorded = recorded_with(trace, layout, [(2000 * place, 2000 * place + 900) for place in range(len(layout))])
    settings = {"world_size": 2, "plan": tuple(map(tuple, plan))}
    fabric = FABRIC.model_copy(update={"processor": COSTLY})
    assert emulate(recorded, fabric, **settings).samples_ns == predict(recorded, fabric, **settings).samples_ns


def _as_recorded(ready_ns, buckets, cost_ns, slow_down=1.5):
    """Ready times beside the collectives of these buckets, one after the other, and start and end of each."""
    slowed_ns, in_flight = [], []
    now, computed = 1000.0, 1000
    full = set()
    for index, until in enumerate(ready_ns):
        left = until - computed
        for start, end in in_flight:  # in order; each starts when the one before has ended, or later
            alone = min(left, max(0.0, start - now))
            now, left = now + alone, left - alone
            beside = min(left, max(0.0, end - now) / slow_down) if now >= start else 0.0
            now, left = now + beside * slow_down, left - beside
        now, computed = now + left, until
        slowed_ns.append(round(now))
        full.add(index)
        while len(in_flight) < len(buckets) and full.issuperset(buckets[len(in_flight)]):
            start = max([now, *(end for _, end in in_flight[-1:])])
            in_flight.append((start, start + cost_ns))
    return tuple(slowed_ns), [(round(start), round(end)) for start, end in in_flight]
