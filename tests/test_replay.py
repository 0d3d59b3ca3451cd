"""The replay: small stories told in nanoseconds, and laws that hold for every story."""

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from simulator.engines.closed_form import solve
from simulator.engines.replay import Job, make_job, replay
from simulator.engines.work_clock import WorkClock
from simulator.fabric import Fabric, Linear, Processor, Sharing, Timing
from simulator.spans import Span, iteration_ns
from simulator.workload.rank_work import RankWork, launch_schedule

from .strategies import partitions, rank_works, steady_fabrics

WORK = RankWork(forward_ns=10, ready_ns=(30, 20), backward_end_ns=32, step_ns=5)  # parameter 1 is ready first


def fabric(cost_ns: int, **fields) -> Fabric:
    """Every all-reduce of two ranks takes `cost_ns`."""
    return Fabric(all_reduce=(Timing(world_size=2, size_bytes=0, ns=cost_ns),), **fields)


def story(works, buckets, costs: Fabric, **arguments) -> list[str]:
    """What happened, a line each, in order of time."""
    job = make_job(works, buckets, [4, 4], costs, **arguments)
    spans = sorted(replay(job, costs), key=lambda span: (span.rank, span.start_ns, span.stream))
    return [
        f"{s.start_ns:3}-{s.end_ns:3} rank {s.rank} {s.kind}" + ("" if s.bucket is None else f" {s.bucket}")
        for s in spans
    ]


def test_communication_hides_behind_the_backward_pass_and_the_rest_is_exposed():
    assert story([WORK] * 2, [[1], [0]], fabric(8))[:6] == [
        "  0- 10 rank 0 forward",
        " 10- 20 rank 0 backward 0",
        " 20- 28 rank 0 all_reduce 0",
        " 20- 30 rank 0 backward 1",
        " 30- 38 rank 0 all_reduce 1",
        " 30- 32 rank 0 backward",
    ]
    assert story([WORK] * 2, [[1], [0]], fabric(8))[6:8] == [" 32- 38 rank 0 wait 1", " 38- 43 rank 0 step"]


def test_a_collective_starts_when_its_last_rank_has_launched_it():
    late = RankWork(forward_ns=25, ready_ns=(45, 35), backward_end_ns=47, step_ns=5)
    lines = story([WORK, late], [[0, 1]], fabric(8))
    assert " 30- 45 rank 0 queued 0" in lines
    assert " 45- 53 rank 0 all_reduce 0" in lines
    assert " 32- 53 rank 0 wait 0" in lines


def test_buckets_are_launched_in_order_even_if_a_later_one_is_ready_first():
    lines = story([WORK] * 2, [[0], [1]], fabric(8))
    assert " 30- 38 rank 0 all_reduce 0" in lines
    assert " 38- 46 rank 0 all_reduce 1" in lines


def test_a_backend_runs_as_many_collectives_as_it_has_slots():
    lines = story([WORK] * 2, [[0], [1]], fabric(8, concurrency=2))
    assert {" 30- 38 rank 0 all_reduce 0", " 30- 38 rank 0 all_reduce 1"} <= set(lines)


def test_two_at_a_time_may_each_be_slower():
    lines = story([WORK] * 2, [[0], [1]], fabric(8, concurrency=2, sharing=(Sharing(size_bytes=0, factor=1.5),)))
    assert {" 30- 42 rank 0 all_reduce 0", " 30- 42 rank 0 all_reduce 1"} <= set(lines)


def test_packing_and_launching_delay_the_backward_pass():
    costs = fabric(8, processor=Processor(pack=Linear(fixed_ns=1), launch_ns=2, copy_out=Linear(ns_per_byte=1)))
    lines = story([WORK] * 2, [[1], [0]], costs)
    assert " 10- 21 rank 0 backward 0" in lines
    assert " 21- 23 rank 0 launch 0" in lines
    assert " 34- 36 rank 0 launch 1" in lines  # 30 + two packed + one launch
    assert " 38- 42 rank 0 copy_out 0" in lines  # 4 bytes; before that the backward pass ended, at 32 + 6
    assert " 44- 48 rank 0 copy_out 1" in lines


def test_buffers_are_broadcast_before_forward():
    assert story([WORK] * 2, [[0, 1]], fabric(8), buffer_bytes=[4, 4])[:2] == [
        "  0- 16 rank 0 broadcast",
        " 16- 26 rank 0 forward",
    ]


def test_computation_is_slower_while_a_collective_runs():
    """Bucket 0 is launched at 20 and takes 8; meanwhile computation does 4 ns of work, so the rest is 4 ns late."""
    costs = fabric(8, processor=Processor(compute_slowdown=2.0))
    lines = story([WORK] * 2, [[1], [0]], costs)
    assert " 20- 34 rank 0 backward 1" in lines
    assert " 34- 42 rank 0 all_reduce 1" in lines


def test_a_collective_is_slower_while_a_rank_computes():
    """Bucket 1 is launched at 30; computation goes on for 2 ns, in which it does 1 of its 8 ns."""
    costs = fabric(8, processor=Processor(collective_slowdown=2.0))
    lines = story([WORK] * 2, [[0, 1]], costs)
    assert " 30- 39 rank 0 all_reduce 0" in lines


moments = st.integers(0, 1000)


@given(
    st.lists(st.tuples(moments, moments), min_size=1, max_size=8),
    st.dictionaries(moments, st.floats(1, 4), max_size=6),
)
def test_a_work_clock_wakes_each_when_its_work_is_done(works, slowdowns):
    """Whenever work begins and speeds change: the sum of time over slow-down, piece by piece, is the work."""
    env = simpy.Environment()
    clock = WorkClock(env)
    ended = {}

    def work(number, start, work_ns):
        yield env.timeout(start)
        yield clock.after(work_ns)
        ended[number] = env.now

    def change():
        for moment, slowdown in sorted(slowdowns.items()):
            yield env.timeout(moment - env.now)
            clock.slow_down(slowdown)

    env.process(change())
    for number, (start, work_ns) in enumerate(works):
        env.process(work(number, start, work_ns))
    env.run()
    changes = [*sorted(slowdowns.items()), (10**6, 1.0)]
    for number, (start, work_ns) in enumerate(works):
        now, factor, left = start, 1.0, float(work_ns)
        for moment, following in changes:
            if moment > now:
                if left * factor <= moment - now:
                    break
                left -= (moment - now) / factor
                now = moment
            factor = following
        assert ended[number] == pytest.approx(now + left * factor, abs=1.01)


@st.composite
def jobs(draw) -> tuple[Job, Fabric]:
    world_size, count = draw(st.integers(2, 4)), draw(st.integers(1, 6))
    costs = draw(steady_fabrics(world_size))
    works = [draw(rank_works(count)) for _ in range(world_size)]
    sizes = draw(st.lists(st.integers(0, 300), min_size=count, max_size=count))
    buckets = draw(partitions(count))
    buffers = draw(st.lists(st.integers(0, 100), max_size=2))
    return make_job(works, buckets, sizes, costs, buffer_bytes=buffers), costs


@given(jobs())
def test_events_and_recurrence_agree_to_the_nanosecond(job_and_fabric):
    job, costs = job_and_fabric
    spans, outcome = replay(job, costs), solve(job, costs)
    assert iteration_ns(spans) == outcome.iteration_ns
    for rank, end in enumerate(outcome.end_ns):
        assert max((span.end_ns for span in spans if span.rank == rank), default=0) == end
    for span in spans:
        if span.kind == "all_reduce":
            assert (span.start_ns, span.end_ns) == (
                outcome.start_ns[span.bucket],
                outcome.done_ns[span.bucket],
            )


@given(jobs(), st.floats(1, 3), st.floats(1, 3), st.floats(1, 3))
def test_laws_of_every_iteration(job_and_fabric, compute, collective, shared):
    job, costs = job_and_fabric
    slow = costs.model_copy(
        update={
            "processor": costs.processor.model_copy(
                update={"compute_slowdown": compute, "collective_slowdown": collective}
            ),
            "sharing": (Sharing(size_bytes=0, factor=shared),),
        }
    )
    spans = replay(job, slow)
    assert spans == replay(job, slow), "not deterministic"
    total = iteration_ns(spans)
    assert total >= max(work.compute_ns for work in job.works)
    assert total * costs.concurrency >= sum(job.costs_ns)
    assert total >= iteration_ns(replay(job, costs)), "slower parts made a faster whole"
    for bucket, cost in enumerate(job.costs_ns):
        done = [span for span in spans if span.kind == "all_reduce" and span.bucket == bucket]
        assert len(done) == (len(job.works) if cost else 0)
        assert len({(span.start_ns, span.end_ns) for span in done}) <= 1
        assert all(span.duration_ns >= cost for span in done)
    assert _overlapping([span for span in spans if span.stream == "compute" and span.rank == 0]) <= 1
    assert _overlapping([span for span in spans if span.kind == "all_reduce" and span.rank == 0]) <= costs.concurrency


def _overlapping(spans: list[Span]) -> int:
    """How many of them run at the same time, at most."""
    events = sorted([(span.start_ns, 1) for span in spans] + [(span.end_ns, -1) for span in spans])
    running, most = 0, 0
    for _, change in events:
        running += change
        most = max(most, running)
    return most


@given(jobs())
def test_permuting_ranks_changes_nothing(job_and_fabric):
    job, costs = job_and_fabric
    mirrored = Job(
        job.works[::-1], job.schedules[::-1], job.sizes_bytes, job.costs_ns, job.copy_out_ns, job.broadcast_ns
    )
    assert iteration_ns(replay(mirrored, costs)) == iteration_ns(replay(job, costs))


@given(rank_works(5), partitions(5))
def test_without_costs_a_bucket_is_launched_when_it_and_all_before_it_are_ready(work, buckets):
    schedule = launch_schedule(work, buckets, [4] * 5, Processor())
    ready = [max(work.ready_ns[index] for index in bucket) for bucket in buckets]
    assert schedule.at_ns == tuple(max(ready[: number + 1]) for number in range(len(buckets)))


def test_the_closed_form_refuses_what_it_cannot_do():
    costs = fabric(8, processor=Processor(compute_slowdown=1.5))
    with pytest.raises(ValueError, match="closed form: expected constant speeds"):
        solve(make_job([WORK] * 2, [[0, 1]], [4, 4], costs), costs)
