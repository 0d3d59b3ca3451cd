"""The event replay: examples with every span in nanoseconds, and laws of all iterations."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
import simpy
from hypothesis import example, given
from hypothesis import strategies as st

from simulator import predict
from simulator.engines.engine_input import EngineInput
from simulator.engines.event_replay import FULL_SPEED, PROGRESS_BITS, ProgressClock, replay
from simulator.engines.timeline import Span
from simulator.fabric import Contention, Fabric, Linear, LinkShare, Processor, Sharing, Slowdowns, Timing
from simulator.interval import simulate
from simulator.schedule.hook_messages import PowerSGD
from simulator.schedule.policy import Policy
from simulator.schedule.schedule import Compute, buckets_of, build_schedule
from simulator.step_costs import price_schedule
from simulator.workload.compute_times import IterationSampler, Straggler, Variation, recorded_model

from .explore import examples
from .strategies import fluid_fabrics, iteration, partitions, policies, steady_fabrics, trace_of, traces
from .strategies import iterations as any_iteration

ALIKE = iteration(forward_ns=10, ready_ns=(30, 20), backward_end_ns=32, step_ns=5)  # parameter 1 is ready first


def fabric(cost_ns: int, **fields) -> Fabric:
    """A fabric on which every collective of two ranks takes `cost_ns`."""
    return Fabric(all_reduce=(Timing(world_size=2, size_bytes=0, ns=cost_ns),), **fields)


def lines_of(ranks, buckets, costs: Fabric, *, buffer_bytes=(), **arguments) -> list[str]:
    """Predict one iteration of these ranks and return its spans, one line each, sorted by rank and start."""
    trace = trace_of([[one] for one in ranks], [4] * len(ranks[0].ready_ns), buffer_bytes)
    prediction = predict(trace, costs, world_size=2, plan=buckets, **arguments)
    spans = sorted(prediction.spans, key=lambda span: (span.rank, span.start_ns, span.stream))
    assert sum(prediction.breakdown.values()) == prediction.iteration_ns * arguments.get("sync_every", 1)
    return [
        f"{s.start_ns:3}-{s.end_ns:3} rank {s.rank} {s.kind}" + ("" if s.bucket is None else f" {s.bucket}")
        for s in spans
    ]


def test_communication_hides_behind_the_backward_pass_and_the_rest_is_exposed():
    assert lines_of([ALIKE], [[1], [0]], fabric(8))[:6] == [
        "  0- 10 rank 0 forward",
        " 10- 20 rank 0 backward 0",
        " 20- 28 rank 0 all_reduce 0",
        " 20- 30 rank 0 backward 1",
        " 30- 38 rank 0 all_reduce 1",
        " 30- 32 rank 0 backward",
    ]
    assert lines_of([ALIKE], [[1], [0]], fabric(8))[6:8] == [" 32- 38 rank 0 wait 1", " 38- 43 rank 0 step"]


def test_a_collective_starts_when_its_last_rank_has_launched_it():
    late = iteration(forward_ns=25, ready_ns=(45, 35), backward_end_ns=47, step_ns=5)
    lines = lines_of([ALIKE, late], [[0, 1]], fabric(8))
    assert " 30- 45 rank 0 straggler 0" in lines
    assert " 45- 53 rank 0 all_reduce 0" in lines
    assert " 32- 53 rank 0 wait 0" in lines


def test_buckets_are_launched_in_order_even_if_a_later_one_is_ready_first():
    lines = lines_of([ALIKE], [[0], [1]], fabric(8))
    assert " 30- 38 rank 0 all_reduce 0" in lines
    assert " 38- 46 rank 0 all_reduce 1" in lines


def test_a_backend_runs_as_many_collectives_as_it_has_slots():
    lines = lines_of([ALIKE], [[0], [1]], fabric(8, concurrency=2))
    assert {" 30- 38 rank 0 all_reduce 0", " 30- 38 rank 0 all_reduce 1"} <= set(lines)


def test_two_at_a_time_may_each_be_slower():
    lines = lines_of([ALIKE], [[0], [1]], fabric(8, concurrency=2, sharing=(Sharing(size_bytes=0, factor=1.5),)))
    assert {" 30- 42 rank 0 all_reduce 0", " 30- 42 rank 0 all_reduce 1"} <= set(lines)


def test_packing_and_launching_delay_the_backward_pass():
    costs = fabric(8, processor=Processor(pack=Linear(fixed_ns=1), launch_ns=2, copy_out=Linear(ns_per_byte=1)))
    lines = lines_of([ALIKE], [[1], [0]], costs)
    assert " 20- 21 rank 0 pack 0" in lines
    assert " 21- 23 rank 0 launch 0" in lines
    assert " 34- 36 rank 0 launch 1" in lines  # 30 + two packed + one launch
    assert " 38- 42 rank 0 copy_out 0" in lines  # 4 bytes; before that the backward pass ended, at 32 + 6
    assert " 44- 48 rank 0 copy_out 1" in lines


def test_buffers_are_broadcast_before_forward():
    lines = lines_of([ALIKE], [[0, 1]], fabric(8), buffer_bytes=[4, 4, 4])
    assert {"  0-  8 rank 0 broadcast", "  0-  8 rank 0 queued", "  8- 16 rank 0 broadcast"} <= set(lines)
    assert {" 16- 24 rank 0 broadcast", " 24- 34 rank 0 forward"} <= set(lines)


def test_two_pieces_of_buffers_are_broadcast_at_a_time():
    """A piece holds the buffers of one dtype; the third is launched when the first has arrived."""
    lines = lines_of([ALIKE], [[0, 1]], fabric(8, concurrency=3), buffer_bytes=[4, 4, 4])
    assert lines.count("  0-  8 rank 0 broadcast") == 2
    assert "  8- 16 rank 0 broadcast" in lines


def test_computation_is_slower_while_a_collective_runs():
    """Bucket 0 is launched at 20 and takes 8; meanwhile computation progresses by 4 ns, so the rest is 4 ns late."""
    costs = fabric(8, processor=Processor(contention=(Contention(compute=2.0),)))
    lines = lines_of([ALIKE], [[1], [0]], costs)
    assert " 20- 34 rank 0 backward 1" in lines
    assert " 34- 42 rank 0 all_reduce 1" in lines


def test_computation_stays_slow_for_a_while_after_a_collective():
    """Bucket 0 is launched at 20 and takes 2; up to 24 computation progresses by 2 ns, so the rest is 2 ns late."""
    costs = fabric(2, processor=Processor(contention=(Contention(compute=2.0),), lingers_ns=2))
    lines = lines_of([ALIKE], [[1], [0]], costs)
    assert " 20- 22 rank 0 all_reduce 0" in lines
    assert " 20- 32 rank 0 backward 1" in lines
    assert " 32- 36 rank 0 backward" in lines  # beside bucket 1, and after it
    assert " 36- 41 rank 0 step" in lines


def test_the_slow_time_after_a_collective_starts_anew_with_the_next_and_never_adds_up():
    """Bucket 1 is launched at 40, while computation is slow after bucket 0, until 48; it stays slow until 68."""
    costs = fabric(8, processor=Processor(contention=(Contention(compute=2.0),), lingers_ns=20))
    lines = lines_of([ALIKE], [[1], [0]], costs)
    assert {" 20- 40 rank 0 backward 1", " 40- 48 rank 0 all_reduce 1", " 48- 58 rank 0 step"} <= set(lines)


def test_a_collective_is_slower_while_a_rank_computes():
    """The bucket is launched at 30; computation goes on for 2 ns, in which the collective does 1 of its 8 ns."""
    costs = fabric(8, processor=Processor(contention=(Contention(collective=2.0),)))
    lines = lines_of([ALIKE], [[0, 1]], costs)
    assert " 30- 39 rank 0 all_reduce 0" in lines


def test_a_slot_that_is_taken_makes_the_next_collective_queue():
    lines = lines_of([ALIKE], [[1], [0]], fabric(15))
    assert " 30- 35 rank 0 queued 1" in lines
    assert " 35- 50 rank 0 all_reduce 1" in lines


def test_process_groups_in_turn_are_queues_of_their_own():
    lines = lines_of([ALIKE], [[1], [0]], fabric(15), process_groups=2)
    assert {" 20- 35 rank 0 all_reduce 0", " 30- 45 rank 0 all_reduce 1"} <= set(lines)


def test_ranks_whose_gradients_come_in_another_order_launch_in_the_same():
    """Rank 1 has bucket 1 full at 20 but launches it after bucket 0, at 30."""
    turned = iteration(forward_ns=10, ready_ns=(20, 30), backward_end_ns=32, step_ns=5)
    costs = fabric(4, processor=Processor(pack=Linear(fixed_ns=1)))
    lines = lines_of([ALIKE, turned], [[1], [0]], costs)
    assert " 21- 31 rank 0 straggler 0" not in lines
    assert " 21- 32 rank 0 straggler 0" in lines  # rank 1 packed both before its first launch
    assert " 32- 36 rank 0 all_reduce 0" in lines
    assert " 36- 40 rank 1 all_reduce 1" in lines


def test_unused_parameters_are_searched_for_and_the_map_is_added_up():
    unused = iteration(forward_ns=10, ready_ns=(30, None), backward_end_ns=32, step_ns=5)
    costs = fabric(8, processor=Processor(search_ns_per_parameter=2))
    lines = lines_of([unused], [[1], [0]], costs, find_unused_parameters=True)
    assert " 10- 14 rank 0 search" in lines
    assert " 34- 42 rank 0 all_reduce 0" in lines  # the unused one counts as ready with the first gradient
    assert " 42- 50 rank 0 all_reduce 1" in lines
    assert " 50- 58 rank 0 bitmap" in lines
    assert " 36- 58 rank 0 wait" in lines  # a gradient that no rank used must not be copied out
    assert lines[-1] == " 58- 63 rank 0 step"


def test_where_all_parameters_are_used_the_map_is_waited_for_last():
    costs = fabric(8, processor=Processor(copy_out=Linear(fixed_ns=1)))
    lines = lines_of([ALIKE], [[0, 1]], costs, find_unused_parameters=True)
    assert {" 38- 40 rank 0 copy_out 0", " 40- 46 rank 0 wait", " 46- 51 rank 0 step"} <= set(lines)


def test_averages_in_views_are_not_copied_out():
    costs = fabric(8, processor=Processor(copy_out=Linear(fixed_ns=3)))
    assert not any("copy_out" in line for line in lines_of([ALIKE], [[0, 1]], costs, gradient_as_bucket_view=True))
    assert " 38- 44 rank 0 copy_out 0" in lines_of([ALIKE], [[0, 1]], costs)


def test_the_rebuild_comes_before_the_second_forward_pass():
    costs = fabric(8, processor=Processor(rebuild_ns=3))
    lines = lines_of([ALIKE], None, costs, phase="rebuild")
    assert {"  0-  8 rank 0 order", "  8- 11 rank 0 rebuild", " 11- 21 rank 0 forward"} <= set(lines)
    assert not any("rebuild" in line for line in lines_of([ALIKE], None, costs, find_unused_parameters=True))


def test_a_static_graph_launches_after_its_first_backward_pass():
    lines = lines_of([ALIKE], [[1], [0]], fabric(8), static_graph=True, phase="first")
    assert " 32- 40 rank 0 all_reduce 0" in lines
    assert " 48- 56 rank 0 bitmap" in lines


def test_a_static_graph_packs_all_buckets_before_its_first_launch():
    costs = fabric(8, processor=Processor(pack=Linear(fixed_ns=1), launch_ns=2))
    lines = lines_of([ALIKE], [[1], [0]], costs, static_graph=True, phase="first")
    assert {" 32- 34 rank 0 pack 0", " 34- 36 rank 0 launch 0", " 36- 38 rank 0 launch 1"} <= set(lines)


def test_beside_each_other_all_reduces_of_a_table_share_their_link():
    """An empty one takes 4, so of the 8 of these half is latency and half is bytes, which take twice as long."""
    table = (Timing(world_size=2, size_bytes=0, ns=4), Timing(world_size=2, size_bytes=4, ns=8))
    lines = lines_of([ALIKE], [[0], [1]], Fabric(all_reduce=table, concurrency=2))
    assert {" 30- 42 rank 0 all_reduce 0", " 30- 42 rank 0 all_reduce 1"} <= set(lines)


def test_a_bucket_of_two_dtypes_is_refused_as_the_reducer_does():
    trace = trace_of([[ALIKE]], [4, 4])
    floats = trace.workload.parameters[0].model_copy(update={"dtype": "float32", "shape": (1,)})
    mixed = trace.workload.model_copy(update={"parameters": (floats, trace.workload.parameters[1])})
    with pytest.raises(ValueError, match="plan: expected one dtype per bucket, bucket 0 has float32 and int8"):
        predict(trace.model_copy(update={"workload": mixed}), fabric(8), world_size=2, plan=[[0, 1]])


def test_iterations_under_no_sync_only_compute():
    lines = lines_of([ALIKE], [[0, 1]], fabric(8), sync_every=3)
    assert lines[:2] == ["  0- 37 rank 0 unsynchronized", " 37- 74 rank 0 unsynchronized"]
    assert "104-112 rank 0 all_reduce 0" in lines


def test_buffers_are_sent_before_the_first_iteration_of_a_cycle():
    assert lines_of([ALIKE], [[0, 1]], fabric(8), sync_every=2, buffer_bytes=(4,))[1:3] == [
        "  0-  8 rank 0 wait",
        "  8- 45 rank 0 unsynchronized",
    ]


def test_under_join_ranks_with_inputs_do_not_wait_for_the_counts():
    """Ranks count those with inputs, and whether any averages, but only ranks without inputs need the results."""
    late = iteration(forward_ns=20, ready_ns=(40, 30), backward_end_ns=42, step_ns=5)
    lines = lines_of([ALIKE, late], [[0, 1]], fabric(8), sync_every=3, inputs=[3, 3])
    assert [line for line in lines if line.endswith(("rank 0 unsynchronized", "rank 0 wait"))] == [
        "  0- 37 rank 0 unsynchronized", " 37- 74 rank 0 unsynchronized",
    ]  # fmt: skip


def test_a_hook_without_communication_sends_nothing():
    assert not any("all_reduce" in line for line in lines_of([ALIKE], [[1], [0]], fabric(8), hook="noop"))


def test_a_second_collective_follows_the_launch_of_the_next_bucket():
    matrices = iteration(forward_ns=10, ready_ns=(30, 20), backward_end_ns=32, step_ns=5)
    trace = trace_of([[matrices]], [400, 400])
    shaped = tuple(parameter.model_copy(update={"shape": (20, 20)}) for parameter in trace.workload.parameters)
    trace = trace.model_copy(update={"workload": trace.workload.model_copy(update={"parameters": shaped})})
    hook = PowerSGD(compress=Linear(fixed_ns=1), recompress=Linear(fixed_ns=2), decompress=Linear(fixed_ns=3))
    spans = predict(trace, fabric(4), world_size=2, plan=[[1], [0]], hook=hook).spans
    lines = [f"{s.start_ns}-{s.end_ns} {s.kind} {s.bucket}" for s in spans if s.kind not in ("forward", "step")]
    assert [line for line in lines if "all_reduce" in line] == [
        "21-25 all_reduce 0", "32-36 all_reduce 1", "36-40 second_all_reduce 0", "40-44 second_all_reduce 1",
    ]  # fmt: skip
    assert {"32-34 recompress 0", "36-38 recompress 1", "40-43 decompress 0", "44-47 decompress 1"} <= set(lines)


def test_a_rank_without_inputs_takes_part_in_all_collectives():
    trace = trace_of([[ALIKE]], [4, 4])
    prediction = predict(trace, fabric(8), world_size=2, plan=[[0, 1]], inputs=[2, 1])
    assert prediction.samples_ns == (43, 43)  # rank 0 does not wait for the counts
    lines = {f"{s.start_ns}-{s.end_ns} {s.kind}" for s in prediction.spans if s.rank == 1}  # of the second iteration
    assert lines == {
        "0-8 join", "0-8 wait", "8-16 join", "8-16 wait", "16-30 straggler", "30-38 all_reduce", "16-38 wait",
    }  # fmt: skip


def test_a_straggler_makes_the_others_wait_for_it():
    trace = trace_of([[ALIKE]], [4, 4])
    prediction = predict(trace, fabric(8), world_size=2, plan=[[0, 1]], stragglers=[Straggler(rank=1, factor=2)])
    assert prediction.iteration_ns == 2 * 30 + 8 + 2 * 5
    assert prediction.breakdown["stragglers"] == 0  # on the slowest rank
    waits = {span.rank: span.duration_ns for span in prediction.spans if span.kind == "wait"}
    assert waits == {0: 36, 1: 4}


# The clock of progress

microsecond_or_day = st.sampled_from([10**3, 10**14])


@given(st.data(), microsecond_or_day, st.sampled_from([4.0, 1e4]))
def test_a_progress_clock_ends_each_computation_when_its_time_is_over(data, latest_ns, slowest):
    """Whenever computing starts and speeds change: time over slow-down, added up piece by piece, is the duration.

    Derived afterwards, the ends are those of the events to the nanosecond, also where arrays need Python integers.
    """
    moments = st.integers(0, latest_ns)
    computations = data.draw(st.lists(st.tuples(moments, moments), min_size=1, max_size=8))
    slowdowns = data.draw(st.dictionaries(moments, st.floats(1, slowest), max_size=6))
    env = simpy.Environment()
    clock = ProgressClock(env)
    ended = {}

    def compute(number, start_ns, duration_ns):
        yield env.timeout(start_ns)
        yield clock.reaches(clock.progress() + (duration_ns << PROGRESS_BITS))
        ended[number] = env.now

    def change():
        for moment, slowdown in sorted(slowdowns.items()):
            yield env.timeout(moment - env.now)
            clock.slow_down(slowdown)

    env.process(change())
    for number, (start_ns, duration_ns) in enumerate(computations):
        env.process(compute(number, start_ns, duration_ns))
    env.run()
    starts, durations = np.array(computations).T
    assert clock.ends(starts, durations).tolist() == [ended[number] for number in range(len(computations))]
    exact = [(moment, Fraction(int(slowdowns[moment] * FULL_SPEED), FULL_SPEED)) for moment in sorted(slowdowns)]
    rounding_ns = (len(exact) + 1) * max([Fraction(1), *dict(exact).values()]) / 2**PROGRESS_BITS
    for number, (start_ns, duration_ns) in enumerate(computations):
        now, factor, left = Fraction(start_ns), Fraction(1), Fraction(duration_ns)
        for moment, following in [*exact, (float("inf"), None)]:
            if moment > now:
                if left * factor <= moment - now:
                    break
                left -= (moment - now) / factor
                now = Fraction(moment)
            factor = following
        end = now + left * factor
        assert end - rounding_ns <= ended[number] <= ceil(end)


def test_reading_a_progress_clock_does_not_move_it():
    """Sums of as many pieces as there are readings were off by 2 ns in iterations of a second on 1,000 ranks."""
    env = simpy.Environment()
    clock = ProgressClock(env)
    clock.slow_down(3.0)
    for moment in range(10**9, 10**9 + 10_000):
        env.run(until=moment)
        clock.progress()
    assert clock.progress() == ceil(Fraction(env.now << PROGRESS_BITS, 3))


def two_buckets(durations_ns, costs_ns, compute: float, collective: float = 1.0) -> EngineInput:
    """Two buckets of different ranks; computation and collectives slow each other down by these factors."""
    return EngineInput(
        schedule=TWO_BUCKETS,
        duration_ns=np.array(durations_ns),
        ranks=tuple(range(len(durations_ns))),
        cost_ns=np.array(costs_ns),
        queues=(0, 0),
        sharing=(LinkShare(),) * 2,
        slowdowns=Slowdowns(((compute,),) * 2, ((collective,),) * 2),
    )


TWO_BUCKETS = build_schedule(
    Policy(), recorded_model(trace_of([[iteration(10, (20, 30), 90, 0)]], [4, 4])), [[0], [1]]
)


def only(kind: str, duration_ns: int) -> list[int]:
    """Durations of a rank that only computes one step of bucket 1."""
    return [duration_ns * (step == (kind, 1, 0)) for step in TWO_BUCKETS.steps]


@st.composite
def fluid_inputs(draw) -> EngineInput:
    """two_buckets([[0, 352, ...]], [175, 334], 2.00001): factors at which rounded floats are easily off."""
    few_ns = st.sampled_from([0, 0, 0, 1, 8]) | st.integers(0, 400)
    durations = st.lists(few_ns, min_size=len(TWO_BUCKETS.steps), max_size=len(TWO_BUCKETS.steps))
    factors = st.sampled_from([2.00001, 3.00001, 2.0, 1.0]) | st.floats(1, 3)
    return two_buckets(
        draw(st.lists(durations, min_size=1, max_size=3)),
        draw(st.lists(st.integers(0, 400), min_size=2, max_size=2)),
        draw(factors),
        draw(factors),
    )


@examples(500)
@given(fluid_inputs())
@example(two_buckets([only("backward", 176), only("step", 0)], [242, 58], 2.00001))
@example(two_buckets([only("launch", 176), only("step", 0)], [175, 334], 2.00001, 2.0))
def test_steps_end_in_order_and_no_collective_starts_before_its_last_launch(engine_input):
    """Rounded floats let a step end 1 ns before the step before it, and a collective start 1 ns early."""
    timeline = simulate(engine_input, "events")
    lengths_ns = np.diff(timeline.end_ns, axis=1, prepend=0)
    assert (lengths_ns >= 0).all()
    is_step = [isinstance(instruction, Compute) for instruction in engine_input.schedule.instructions]
    assert (lengths_ns[:, is_step] >= engine_input.duration_ns).all(), "slow-downs made a step shorter"
    assert (timeline.start_ns >= timeline.launched_ns.max(axis=0)).all()
    assert timeline.start_ns[0] == timeline.launched_ns[:, 0].max()
    assert timeline.iteration_ns == replay(engine_input)[2].max(), "the derived end differs from that of the events"


@st.composite
def engine_inputs(draw, fabrics=steady_fabrics) -> EngineInput:
    """One iteration of any trace under any policy, on a fabric that has every world size."""
    trace, world_size = draw(traces()), draw(st.integers(1, 4))
    policy, costs = draw(policies(tuple(trace.keys))), draw(fabrics(world_size))
    model = recorded_model(trace, unused_allowed=policy.unused_allowed)
    buckets = buckets_of(policy, model)
    schedule = build_schedule(policy, model, buckets, joins=draw(st.booleans()))
    costs = price_schedule(schedule, buckets, model, costs, policy, world_size)
    sampler = IterationSampler(model.compute_times, world_size, Variation(), sync_every=policy.sync_every)
    return costs.engine_input(sampler, [0]).at(0)


@given(engine_inputs())
def test_events_and_recurrence_agree_to_the_nanosecond(engine_input):
    by_events, by_recurrence = simulate(engine_input, "events"), simulate(engine_input, "closed_form")
    for moments in ("end_ns", "start_ns", "done_ns"):
        np.testing.assert_array_equal(getattr(by_events, moments), getattr(by_recurrence, moments))


@given(engine_inputs(fluid_fabrics))
def test_laws_of_every_iteration(engine_input):
    timeline, spans = simulate(engine_input, "events"), list(simulate(engine_input, "events").spans())
    assert spans == list(timeline.spans()), "not deterministic"
    total = timeline.iteration_ns
    assert total == replay(engine_input)[2].max()
    assert total == max((span.end_ns for span in spans if span.stream == "compute"), default=0)
    assert total >= engine_input.duration_ns.sum(axis=1).max()
    in_time = timeline.done_ns <= total  # under Join, nobody may wait for the counts of ranks
    assert total * engine_input.concurrency * len(set(engine_input.queues)) >= engine_input.cost_ns[in_time].sum()
    steady = replace(engine_input, slowdowns=None, sharing=(LinkShare(),) * len(engine_input.sharing))
    assert total >= simulate(steady, "events").iteration_ns, "slower parts made a faster whole"
    assert (np.diff(timeline.end_ns, axis=1, prepend=0) >= 0).all(), "a step ended before the one before it"
    for number, cost in enumerate(engine_input.cost_ns):
        assert timeline.done_ns[number] - timeline.start_ns[number] >= cost
    for rank in engine_input.ranks:
        assert _overlapping([s for s in spans if (s.stream, s.rank) == ("compute", rank)]) <= 1
    for queue in set(engine_input.queues):
        of_queue = [number for number, other in enumerate(engine_input.queues) if other == queue]
        running = [Span(0, "comm", "all_reduce", n, timeline.start_ns[n], timeline.done_ns[n]) for n in of_queue]
        assert _overlapping([span for span in running if span.duration_ns]) <= engine_input.concurrency
        free_ns = sorted(timeline.done_ns[of_queue].tolist())
        for place, number in enumerate(of_queue):
            slot_ns = free_ns[place - engine_input.concurrency] if place >= engine_input.concurrency else 0
            assert timeline.start_ns[number] == max(timeline.launched_ns[:, number].max(), slot_ns)


def _overlapping(spans: list[Span]) -> int:
    """How many of them run at the same time, at most."""
    events = sorted([(span.start_ns, 1) for span in spans] + [(span.end_ns, -1) for span in spans])
    running, most = 0, 0
    for _, change in events:
        running += change
        most = max(most, running)
    return most


@given(engine_inputs(fluid_fabrics), st.randoms())
def test_permuting_ranks_changes_nothing(engine_input, random):
    order = random.sample(range(len(engine_input.ranks)), len(engine_input.ranks))
    permuted = simulate(replace(engine_input, duration_ns=engine_input.duration_ns[order]), "events")
    np.testing.assert_array_equal(permuted.end_ns, simulate(engine_input, "events").end_ns[order])


@given(engine_inputs(), st.data())
def test_ranks_that_do_the_same_need_to_be_simulated_once(engine_input, data):
    copies = data.draw(st.lists(st.integers(0, len(engine_input.ranks) - 1), max_size=3))
    rows = [*range(len(engine_input.ranks)), *copies]
    more = replace(engine_input.at(rows), ranks=tuple(range(len(rows))))
    assert simulate(more, "events").iteration_ns == simulate(engine_input, "events").iteration_ns


@given(any_iteration(5), partitions(5), st.lists(st.integers(0, 9), min_size=4, max_size=4), st.integers(0, 9))
def test_buckets_are_packed_when_full_and_launched_in_order(one, buckets, pack_ns, launch_ns):
    """The same launches as when gradients are handled one by one, as in the reducer."""
    trace = trace_of([[one]], [4] * 5)
    policy = Policy(plan=tuple(map(tuple, buckets)))
    processor = Processor(launch_ns=launch_ns)
    model = recorded_model(trace)
    costs = price_schedule(
        build_schedule(policy, model, buckets), buckets, model, fabric(8, processor=processor), policy, 2
    )
    costs = replace(costs, pack_ns=np.array(pack_ns[: len(buckets)]))
    engine_input = costs.engine_input(IterationSampler(model.compute_times, 2, Variation()), [0]).at(0)
    assert simulate(engine_input, "events").launched_ns.tolist() == [
        _launches_one_by_one(one.ready_ns, buckets, pack_ns, launch_ns)
    ]


def _launches_one_by_one(ready_ns, buckets, pack_ns, launch_ns) -> list[int]:
    missing = [set(bucket) for bucket in buckets]
    launched: list[int] = []
    delay = 0
    by_bucket = [(number, index) for number, bucket in enumerate(buckets) for index in bucket]
    for number, index in sorted(by_bucket, key=lambda place: (ready_ns[place[1]], place[1])):
        missing[number].remove(index)
        if not missing[number]:
            delay += pack_ns[number]
        while len(launched) < len(buckets) and not missing[len(launched)]:
            delay += launch_ns
            launched.append(ready_ns[index] + delay)
    return launched


def test_the_closed_form_refuses_what_it_cannot_do():
    costs = fabric(8, processor=Processor(contention=(Contention(compute=1.5),)))
    with pytest.raises(ValueError, match="closed form: expected constant speeds"):
        predict(trace_of([[ALIKE]], [4, 4]), costs, world_size=2, engine="closed_form")
