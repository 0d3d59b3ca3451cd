"""Laws of predictions for any trace, policy, fabric and world size, and a counterexample to one that fails."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import Fabric, predict
from simulator.engines.closed_form import exposed_many
from simulator.engines.engine_input import EngineInput
from simulator.engines.event_replay import Cluster, CollectiveCost, RunningCollective
from simulator.fabric import LinkShare, Slowdowns, Timing
from simulator.interval import COMPUTATION, simulate
from simulator.results.breakdown import PARTS, break_down
from simulator.schedule.hook_messages import CommHook, named_hook
from simulator.schedule.policy import Policy
from simulator.schedule.schedule import Wait, buckets_of, build_schedule
from simulator.workload.compute_times import Variation, recorded_model

from .explore import examples
from .strategies import (
    any_predictions,
    iteration,
    policies,
    steady_fabrics,
    trace_of,
    traces,
)
from .test_replay import engine_inputs

FREE = Fabric.from_alpha_beta(alpha_ns=0, bytes_per_s=1e18)


# Bounds


@examples(30)
@given(any_predictions())
def test_an_iteration_takes_as_long_as_its_computation_and_as_its_busiest_link(asked):
    prediction = asked.predict()
    timeline = prediction.timeline
    engine_input = timeline.engine_input
    assert timeline.iteration_ns >= engine_input.duration_ns.sum(axis=1).max()
    for queue in set(engine_input.queues):
        on_link = sum(
            cost
            for number, cost in enumerate(engine_input.cost_ns.tolist())
            if engine_input.queues[number] == queue
            and timeline.done_ns[number] <= timeline.iteration_ns  # nobody may wait for the counts of Join
        )
        assert timeline.iteration_ns * engine_input.concurrency >= on_link
    assert prediction.iteration_ns >= prediction.compute_ns >= 0


@examples(30)
@given(any_predictions(fabrics=steady_fabrics))
def test_overlap_never_hurts_where_speeds_are_constant(asked):
    prediction = asked.predict()
    if len(prediction.timeline.engine_input.ranks) == 1:
        assert prediction.iteration_ns <= prediction.no_overlap_ns


# Bytes


@examples(30)
@given(any_predictions())
def test_every_parameter_is_in_one_bucket_and_every_buckets_bytes_are_sent(asked):
    prediction = asked.predict()
    parameters = asked.trace.workload.parameters
    assert sorted(itertools.chain(*prediction.buckets)) == list(range(len(parameters)))
    sent: dict[int, list[int]] = {}
    for collective in prediction.timeline.engine_input.schedule.collectives:
        if collective.bucket is not None:
            sent.setdefault(collective.bucket, []).append(collective.size_bytes)
    for number, bucket in enumerate(prediction.buckets):
        message = asked.policy.hook.message([parameters[index] for index in bucket])
        expected = [] if message is None else [size for size in message[1:] if size is not None]
        assert sent.get(number, []) == expected
    if type(asked.policy.hook) is CommHook:
        assert sum(map(sum, sent.values())) == sum(asked.trace.sizes_bytes)


# Sameness


@examples(30)
@given(any_predictions())
def test_the_same_seed_gives_the_same_prediction_to_the_nanosecond(asked):
    one, other = asked.predict(), asked.predict()
    assert one == other
    assert one.spans == other.spans


@examples(30)
@given(any_predictions(world_sizes=st.just(1)))
def test_one_rank_trains_locally_and_pays_only_its_own_processor(asked):
    """Copies, launches, what a hook computes; nothing waits."""
    engine_input = asked.predict().timeline.engine_input
    assert asked.predict().timeline.iteration_ns == engine_input.duration_ns.sum()
    assert asked.predict().breakdown["exposed_comm"] == asked.predict().breakdown["stragglers"] == 0
    bare = replace(asked, fabric=FREE, policy=asked.policy.model_copy(update={"hook": CommHook()})).predict()
    local = [
        place for place, step in enumerate(bare.timeline.engine_input.schedule.steps) if step.kind in COMPUTATION
    ]
    assert bare.iteration_ns == bare.compute_ns
    assert bare.timeline.iteration_ns == bare.timeline.engine_input.duration_ns[:, local].sum()


@examples(30)
@given(any_predictions(variation=st.just(Variation())), st.randoms(use_true_random=False))
def test_permuting_the_ranks_of_a_trace_changes_no_latency(asked, random):
    """If every recorded rank is repeated equally often, and buckets do not follow rank 0's ready order."""
    ranks = asked.trace.ranks
    plan = tuple(map(tuple, buckets_of(asked.policy, recorded_model(asked.trace))))
    policy = asked.policy.model_copy(update={"plan": plan})
    size = len(ranks) * (1 + asked.world_size // len(ranks) // 2)
    fabric = asked.fabric.model_copy(
        update={"all_reduce": tuple(t.model_copy(update={"world_size": size}) for t in asked.fabric.all_reduce)}
    )
    order = random.sample(range(len(ranks)), len(ranks))
    shuffled = asked.trace.model_copy(
        update={"ranks": tuple(ranks[old].model_copy(update={"rank": new}) for new, old in enumerate(order))}
    )
    one, other = (predict(trace, fabric, world_size=size, policy=policy) for trace in (asked.trace, shuffled))
    assert one.samples_ns == other.samples_ns
    assert one.interval_ns == other.interval_ns


# More bandwidth


@examples(30)
@given(
    traces(),
    st.integers(2, 4),
    st.floats(1e5, 1e12),
    st.floats(1, 100),
    st.data(),
)
def test_faster_links_never_hurt_where_speeds_are_constant(trace, world_size, rate, times, data):
    policy = data.draw(policies(tuple(trace.keys))).model_copy(
        update={"process_groups": 1}
    )  # several share the links
    slow, fast = (Fabric.from_alpha_beta(50, per_s) for per_s in (rate, rate * times))
    by_rate = [predict(trace, fabric, world_size=world_size, policy=policy) for fabric in (slow, fast)]
    assert np.less_equal(by_rate[1].samples_ns, by_rate[0].samples_ns).all()


@examples(30)
@given(engine_inputs(), st.data())
def test_cheaper_collectives_never_hurt_where_speeds_are_constant(engine_input, data):
    """Each collective may be cheaper by a different amount; the closed form uses only max and +."""
    less = [data.draw(st.integers(0, cost)) for cost in engine_input.cost_ns.tolist()]
    cheaper = replace(engine_input, cost_ns=np.array(less, dtype=np.int64))
    assert (simulate(cheaper, "events").end_ns <= simulate(engine_input, "events").end_ns).all()


@examples(30)
@given(any_predictions(fabrics=steady_fabrics), st.floats(0.01, 1))
def test_a_table_scaled_down_never_hurts_where_speeds_are_constant(asked, factor):
    scaled = replace(asked, fabric=asked.fabric.scaled(factor))
    assert np.less_equal(scaled.predict().samples_ns, asked.predict().samples_ns).all()


# A law that does not hold: under contention a cheaper collective may lengthen the iteration


def in_two_slots(p1_ns: int) -> list[str]:
    """Spans of two buckets under PowerSGD, whose collectives P0, P1, Q0, Q1 cost 10, `p1_ns`, 30 and 10 ns.

    The rank computes 10 ns forward, 10 ns up to each launch and 60 ns to the end. Beside each other computation takes
    twice as long and a collective four times: both together are slower than one after the other.
    """
    model = recorded_model(trace_of([[iteration(10, (20, 30), 90, 0)]], [4, 4]))
    schedule = build_schedule(Policy(hook=named_hook("batched_power_sgd")), model, [[0], [1]])
    duration_ns = {("forward", None): 10, ("backward", 0): 10, ("backward", 1): 10, ("backward", None): 60}
    engine_input = EngineInput(
        schedule=schedule,
        duration_ns=np.array([[duration_ns.get((step.kind, step.bucket), 0) for step in schedule.steps]]),
        ranks=(0,),
        cost_ns=np.array([10, p1_ns, 30, 10]),
        queues=(0,) * 4,
        concurrency=2,
        sharing=(LinkShare(),) * 4,
        slowdowns=Slowdowns(((2.0, 2.0),) * 4, ((4.0, 4.0),) * 4),
    )
    spans = sorted(simulate(engine_input, "events").spans(), key=lambda span: (span.start_ns, span.end_ns))
    return [f"{s.start_ns}-{s.end_ns} {s.kind}" + ("" if s.bucket is None else f" {s.bucket}") for s in spans]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), st.data())
def test_collectives_that_only_share_a_link_together_take_as_long_as_one_after_the_other(costs_ns, data):
    """Whatever their weights; and with weights in proportion to their durations, they end at the same time."""
    weight = st.floats(0.01, 100)
    weights = data.draw(st.just(costs_ns) | st.lists(weight, min_size=len(costs_ns), max_size=len(costs_ns)))
    cluster = Cluster([0], concurrency=len(costs_ns), slows_computation=False, lingers_ns=0)
    running = [
        RunningCollective(cluster.env, CollectiveCost(cost_ns, 0, LinkShare(2.0, weight)))
        for cost_ns, weight in zip(costs_ns, weights, strict=True)
    ]
    for one in running:
        cluster.launched_by_all(one)
    cluster.env.run()
    ends_ns = [one.done_ns for one in running]
    rounding = len(costs_ns) + 1e-6 * sum(costs_ns)
    assert abs(max(ends_ns) - sum(costs_ns)) <= rounding
    if weights == costs_ns:
        assert max(ends_ns) - min(ends_ns) <= rounding


def test_a_collective_that_is_twice_as_fast_may_make_an_iteration_longer():
    """P1 in 10 ns rather than 20: the iteration takes 160 ns rather than 150.

    Both ways the rank launches P0 at 20, at 40 P1, and waits for P0 until 45, of which 5 of 10 ns were left at 40.
    It starts Q0 at 45 and waits for P1, and as long as it does, Q0 has the processor to itself.

    With the slow P1 it waits until 60. Q0 has done 15 of its 30 ns; beside computation the others take 60, until 120.
    By then 30 of the last 60 ns are computed; alone, the other 30 take 30 ns, until 150.

    With the fast P1 it computes again at 50, when Q0 has done but 5. The other 25 take 100 ns, until 150. By then 50
    of the last 60 ns are computed; the other 10 take 10 ns, until 160.
    """
    assert in_two_slots(p1_ns=20) == [
        "0-10 forward", "10-20 backward 0", "20-40 backward 1", "20-45 all_reduce 0", "40-45 wait 0",
        "40-60 all_reduce 1", "45-60 wait 1", "45-120 second_all_reduce 0", "60-100 second_all_reduce 1",
        "60-150 backward",
    ]  # fmt: skip
    assert in_two_slots(p1_ns=10) == [
        "0-10 forward", "10-20 backward 0", "20-40 backward 1", "20-45 all_reduce 0", "40-45 wait 0",
        "40-50 all_reduce 1", "45-50 wait 1", "45-150 second_all_reduce 0", "50-90 second_all_reduce 1",
        "50-160 backward",
    ]  # fmt: skip


# Where time goes


@examples(60)
@given(any_predictions())
def test_the_breakdown_adds_up_to_the_iteration_of_the_slowest_rank(asked):
    """Computing at full speed, what contention adds to it, waiting while a collective runs, and all other waiting."""
    prediction = asked.predict()
    timeline, parts = prediction.timeline, prediction.breakdown
    engine_input = timeline.engine_input
    row = timeline.end_ns[:, -1].argmax()
    assert sum(parts.values()) == timeline.iteration_ns
    assert min(parts.values()) >= 0
    assert sum(parts[name] for name in PARTS) == engine_input.duration_ns[row].sum()
    assert parts["exposed_comm"] == _waits_while_communicating(timeline, row)
    assert prediction.exposed_comm_ns == round(parts["exposed_comm"] / asked.policy.sync_every)
    if len(engine_input.ranks) == 1:
        assert parts["stragglers"] == 0
    if engine_input.slowdowns is None:
        assert parts["slowdown"] == 0


def _waits_while_communicating(timeline, row) -> int:
    """Counted nanosecond by nanosecond."""
    communicates, waits = np.zeros((2, timeline.iteration_ns), bool)
    for start_ns, done_ns in zip(timeline.start_ns, timeline.done_ns, strict=True):
        communicates[start_ns:done_ns] = True
    instructions, ends = timeline.engine_input.schedule.instructions, timeline.end_ns[row]
    for instruction, start_ns, end_ns in zip(instructions, [0, *ends[:-1]], ends, strict=True):
        if isinstance(instruction, Wait):
            waits[start_ns:end_ns] = True
    return np.count_nonzero(communicates & waits)


@given(engine_inputs(), st.integers(1, 3))
def test_the_closed_form_gives_the_exposed_communication_of_the_breakdown(engine_input, times):
    one_at_a_time = replace(engine_input, concurrency=1, queues=(0,) * len(engine_input.queues))
    costs = np.array([one_at_a_time.cost_ns * factor for factor in range(times)])
    expected = [
        break_down(simulate(replace(one_at_a_time, cost_ns=cost), "closed_form"))["exposed_comm"] for cost in costs
    ]
    assert exposed_many(replace(one_at_a_time, cost_ns=costs)).tolist() == expected


def test_the_closed_form_refuses_exposed_communication_of_collectives_side_by_side():
    trace = trace_of([[iteration(0, (5, 5), 9, 0)]], [4, 4])
    engine_input = predict(trace, FREE.model_copy(update={"concurrency": 2}), world_size=2).timeline.engine_input
    steady = replace(engine_input, sharing=(LinkShare(),) * len(engine_input.sharing))
    with pytest.raises(ValueError, match="closed form: expected one collective at a time, got up to 2"):
        exposed_many(steady)


@examples(30)
@given(any_predictions())
def test_the_critical_path_is_a_chain_of_spans_from_the_start_to_the_end(asked):
    prediction = asked.predict()
    path = prediction.critical_path
    assert [span.start_ns for span in path[:1]] == [0] * bool(path)
    assert all(before.end_ns == after.start_ns for before, after in itertools.pairwise(path))
    assert prediction.timeline.iteration_ns == (path[-1].end_ns if path else 0)
    assert set(path) <= set(prediction.spans)
    assert not {span.kind for span in path} & {"wait", "queued", "straggler"}
    assert set(prediction.critical_buckets) <= set(range(len(prediction.buckets)))


@examples(30)
@given(any_predictions(fabrics=steady_fabrics))
def test_off_the_critical_path_collectives_that_take_turns_may_be_free_without_gain(asked):
    """With several slots a collective off the path may delay one on it, so the law needs one slot."""
    one_at_a_time = asked.fabric.model_copy(update={"concurrency": 1})
    prediction = replace(asked, fabric=one_at_a_time).predict()
    timeline = prediction.timeline
    on_path = {(span.kind, span.bucket, span.start_ns) for span in prediction.critical_path}
    collectives = zip(timeline.engine_input.schedule.collectives, timeline.start_ns.tolist(), strict=True)
    kept = [(one.kind, one.bucket, start) in on_path for one, start in collectives]
    assert (
        simulate(replace(timeline.engine_input, cost_ns=timeline.engine_input.cost_ns * kept), "events").iteration_ns
        == timeline.iteration_ns
    )


@examples(30)
@given(any_predictions())
def test_a_free_fabric_adds_only_copies_launches_and_hooks(asked):
    """If all ranks are alike; otherwise the fast ranks wait for the slow ones."""
    (first, *_), workload = asked.trace.ranks, asked.trace.workload
    alone = asked.trace.model_copy(
        update={"ranks": (first,), "workload": workload.model_copy(update={"world_size": 1})}
    )
    rows = asked.fabric.processor.contention
    rows = tuple(row.model_copy(update={"compute": 1.0, "compute_error": 0.0}) for row in rows)
    processor = asked.fabric.processor.model_copy(update={"contention": rows})
    asked = replace(asked, trace=alone, fabric=FREE.model_copy(update={"processor": processor}), stragglers=())
    asked = replace(asked, variation=Variation(), inputs=None)
    timeline = asked.predict().timeline
    breakdown = asked.predict().breakdown
    assert breakdown["exposed_comm"] == breakdown["stragglers"] == 0
    processing = [
        place for place, step in enumerate(timeline.engine_input.schedule.steps) if step.kind not in COMPUTATION
    ]
    assert timeline.iteration_ns - timeline.engine_input.duration_ns.sum() == 0
    charged = timeline.engine_input.duration_ns[:, processing].sum() / asked.policy.sync_every
    added_ns = asked.predict().iteration_ns - asked.predict().compute_ns
    assert added_ns == pytest.approx(charged, abs=1)
    assert asked.predict().exposed_comm_ns == 0


# Samples


@examples(30)
@given(any_predictions())
def test_figures_of_the_samples_are_in_their_order(asked):
    prediction = asked.predict()
    samples = prediction.samples_ns
    low, high = prediction.interval_ns
    assert low <= prediction.iteration_ns <= high
    assert prediction.p95_ns <= prediction.p99_ns <= max(samples)
    assert min(samples) <= prediction.mean_ns <= max(samples)
    assert prediction.iteration_ns in samples
    assert sum(sample < prediction.iteration_ns for sample in samples) <= len(samples) / 2


@examples(30)
@given(any_predictions(fabrics=steady_fabrics), st.floats(0, 0.5), st.floats(0, 0.4))
def test_knowing_the_fabric_less_well_never_narrows_the_interval(asked, spread, more):
    intervals = []
    for error in (spread, spread + more):
        timings = tuple(t.model_copy(update={"spread": error}) for t in asked.fabric.all_reduce)
        fabric = asked.fabric.model_copy(update={"all_reduce": timings})
        intervals.append(replace(asked, fabric=fabric).predict().interval_ns)
    assert intervals[1][0] <= intervals[0][0]
    assert intervals[1][1] >= intervals[0][1]


def test_the_interval_reaches_as_far_as_dearer_and_cheaper_collectives_do():
    """An all-reduce of 100 ns, give or take 20, begins at 10 and computation ends at 100: 10 ns to gain."""
    trace = trace_of([[iteration(0, (10,), 100, 0)]], [4])
    fabric = Fabric(all_reduce=(Timing(world_size=2, size_bytes=0, ns=100, spread=0.2),))
    prediction = predict(trace, fabric, world_size=2)
    assert prediction.iteration_ns == 110
    assert prediction.interval_ns == (100, 130)


@examples(30)
@given(any_predictions(variation=st.just(Variation()), stragglers=False), st.integers(2, 5))
def test_a_cycle_is_its_local_iterations_and_a_synchronised_one(asked, every):
    """With a recording of one rank; iterations under `no_sync` have no optimiser step."""
    ranks = asked.trace.ranks[:1]
    workload = asked.trace.workload.model_copy(update={"world_size": 1})
    asked = replace(asked, trace=asked.trace.model_copy(update={"ranks": ranks, "workload": workload}), inputs=None)
    one, cycle = (
        replace(asked, policy=asked.policy.model_copy(update={"sync_every": k})).predict() for k in (1, every)
    )
    recorded = ranks[0].iterations
    assert len(cycle.samples_ns) == max(1, len(recorded) // every)
    for number, sample in enumerate(cycle.samples_ns):
        numbers = [place % len(recorded) for place in range(number * every, (number + 1) * every)]
        local_ns = sum(recorded[place].duration_ns - _optimizer_ns(recorded[place]) for place in numbers[:-1])
        assert sample == round((local_ns + one.samples_ns[numbers[-1]]) / every)


def _optimizer_ns(recorded):
    return (recorded.optimizer_end_ns or 0) - (recorded.optimizer_start_ns or 0)


def test_iterations_of_a_cycle_vary_on_their_own():
    """The mean of 8 independent iterations varies 1 / sqrt(8) as much as one; of 8 equal ones, as much as one."""
    ranks = [[iteration(400, (900,), 1000, 0), iteration(800, (1800,), 2000, 0)]]
    trace = trace_of(ranks, [4])
    fabric = Fabric(all_reduce=(Timing(world_size=1, size_bytes=0, ns=0),))
    spread = {
        every: np.std(
            predict(
                trace, fabric, world_size=1, sync_every=every, variation=Variation(kind="resampled", iterations=4000)
            ).samples_ns
        )
        for every in (1, 8)
    }
    assert spread[1] == pytest.approx(500, rel=0.1)
    assert spread[8] == pytest.approx(500 / 8**0.5, rel=0.15)
