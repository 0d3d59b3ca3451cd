"""The event replay: its clock of progress, and laws of all iterations."""

from dataclasses import replace
from fractions import Fraction
from math import ceil

import numpy as np
import simpy
from hypothesis import example, given
from hypothesis import strategies as st

from ddplab.simulator.engines.closed_form import simulate
from ddplab.simulator.engines.event_replay import (
    FULL_SPEED,
    PROGRESS_BITS,
    Cluster,
    CollectiveCost,
    ProgressClock,
    RunningCollective,
)
from ddplab.simulator.engines.timeline import EngineInput, Span
from ddplab.simulator.fabric import Fabric, LinkShare, Timing
from ddplab.simulator.schedule.policy import Policy
from ddplab.simulator.schedule.schedule import Compute, build_schedule
from ddplab.simulator.workload.compute_times import recorded_model

from ..explore import examples
from ..strategies import engine_inputs, fluid_fabrics, iteration, trace_of
from .span_lines import ALIKE, lines_of


def test_beside_each_other_all_reduces_of_a_table_share_their_link():
    """An empty one takes 4, so of the 8 of these half is latency and half is bytes, which take twice as long."""
    table = (Timing(world_size=2, size_bytes=0, ns=4), Timing(world_size=2, size_bytes=4, ns=8))
    lines = lines_of([ALIKE], [[0], [1]], Fabric(all_reduce=table, concurrency=2))
    assert {" 30- 42 rank 0 all_reduce 0", " 30- 42 rank 0 all_reduce 1"} <= set(lines)


microsecond_or_day = st.sampled_from([10**3, 10**14])


@given(st.data(), microsecond_or_day, st.sampled_from([4.0, 1e4]))
def test_a_progress_clock_ends_each_computation_when_its_time_is_over(data, latest_ns, slowest):
    """Whenever computing starts and speeds change: time over slow-down, added up piece by piece, is the duration."""
    moments = st.integers(0, latest_ns)
    computations = data.draw(st.lists(st.tuples(moments, moments), min_size=1, max_size=8))
    slowdowns = data.draw(st.dictionaries(moments, st.floats(1, slowest), max_size=6))
    env = simpy.Environment()
    clock = ProgressClock(env)
    ended = {}

    def change(moment, slowdown):
        yield env.timeout(moment)
        clock.slow_down(slowdown)

    def compute(number, start_ns, duration_ns):
        yield env.timeout(start_ns)
        yield clock.reaches(clock.progress() + (duration_ns << PROGRESS_BITS))
        ended[number] = env.now

    for moment, slowdown in slowdowns.items():
        env.process(change(moment, slowdown))
    for number, computation in enumerate(computations):
        env.process(compute(number, *computation))
    env.run()
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
        env.timeout(moment).callbacks.append(lambda _: clock.progress())
    env.run()
    assert clock.progress() == ceil(Fraction(env.now << PROGRESS_BITS, 3))


def two_buckets(durations_ns, costs_ns, slow_down: float) -> EngineInput:
    """Two buckets of different ranks, whose collectives slow computation down."""
    return EngineInput(
        schedule=TWO_BUCKETS,
        duration_ns=np.array(durations_ns),
        ranks=tuple(range(len(durations_ns))),
        represented_by=np.arange(len(durations_ns)),
        cost_ns=np.array(costs_ns),
        sharing=(LinkShare(),) * 2,
        slow_down=slow_down,
    )


TWO_BUCKETS = build_schedule(
    Policy(plan=((0,), (1,))), recorded_model(trace_of([[iteration(10, (20, 30), 90, 0)]], [4, 4]))
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
    )


@examples(50)
@given(engine_inputs(fluid_fabrics) | fluid_inputs())
@example(two_buckets([only("backward", 176), only("step", 0)], [242, 58], 2.00001))
@example(two_buckets([only("launch", 176), only("step", 0)], [175, 334], 2.00001))
def test_laws_of_every_iteration(engine_input):
    """Rounded floats let a step end 1 ns before the step before it, and a collective start 1 ns early."""
    timeline, spans = simulate(engine_input, "events"), list(simulate(engine_input, "events").spans())
    assert spans == list(timeline.spans()), "not deterministic"
    total = timeline.iteration_ns
    assert total == max((span.end_ns for span in spans if span.stream == "compute"), default=0)
    assert total >= engine_input.duration_ns.sum(axis=1).max()
    in_time = timeline.done_ns <= total  # under Join, nobody may wait for the counts of ranks
    assert total * engine_input.concurrency >= engine_input.cost_ns[in_time].sum()
    steady = replace(engine_input, slow_down=1.0, sharing=(LinkShare(),) * len(engine_input.sharing))
    assert total >= simulate(steady, "events").iteration_ns, "slower parts made a faster whole"
    lengths_ns = np.diff(timeline.end_ns, axis=1, prepend=0)
    assert (lengths_ns >= 0).all(), "a step ended before the one before it"
    is_step = [isinstance(instruction, Compute) for instruction in engine_input.schedule.instructions]
    assert (lengths_ns[:, is_step] >= engine_input.duration_ns).all(), "slow-downs made a step shorter"
    for number, cost in enumerate(engine_input.cost_ns):
        assert timeline.done_ns[number] - timeline.start_ns[number] >= cost
    for rank in engine_input.ranks:
        assert _overlapping([s for s in spans if (s.stream, s.rank) == ("compute", rank)]) <= 1
    numbers = range(len(timeline.start_ns))
    running = [Span(0, "comm", "all_reduce", n, timeline.start_ns[n], timeline.done_ns[n]) for n in numbers]
    assert _overlapping([span for span in running if span.duration_ns]) <= engine_input.concurrency
    free_ns = sorted(timeline.done_ns.tolist())
    for number in numbers:
        slot_ns = free_ns[number - engine_input.concurrency] if number >= engine_input.concurrency else 0
        assert timeline.start_ns[number] == max(timeline.launched_ns[:, number].max(), slot_ns)


def _overlapping(spans: list[Span]) -> int:
    """How many of them run at the same time, at most."""
    events = sorted([(span.start_ns, 1) for span in spans] + [(span.end_ns, -1) for span in spans])
    running, most = 0, 0
    for _, change in events:
        running += change
        most = max(most, running)
    return most


def test_two_collectives_at_a_time_slow_computation_down_as_one_does():
    cluster = Cluster(concurrency=2, slow_down=3.0)
    for _ in range(2):
        cluster.launched_by_all(RunningCollective(cluster.env, CollectiveCost(300, LinkShare())))
    cluster.env.run(cluster.computation.reaches(100 << PROGRESS_BITS))
    assert cluster.now_ns == 300


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=5), st.data())
def test_collectives_that_only_share_a_link_together_take_as_long_as_one_after_the_other(costs_ns, data):
    """Whatever their weights; and with weights in proportion to their durations, they end at the same time."""
    weight = st.floats(0.01, 100)
    weights = data.draw(st.just(costs_ns) | st.lists(weight, min_size=len(costs_ns), max_size=len(costs_ns)))
    cluster = Cluster(concurrency=len(costs_ns))
    running = [
        RunningCollective(cluster.env, CollectiveCost(cost_ns, LinkShare(2.0, weight)))
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
