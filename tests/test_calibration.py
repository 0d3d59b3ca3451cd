"""Calibration: summaries of samples, slow-downs, collectives, costs of comm hooks, and real calibrations."""

import threading
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddplab import models
from ddplab.calibration import collective_times, hook_costs, reducer_costs, repeated_timing
from ddplab.calibration.calibrate import calibrate, measure_hooks
from ddplab.calibration.collective_times import AllReduceQueue, MessageBuffer
from ddplab.calibration.repeated_timing import (
    ContentionTimes,
    TimedCollective,
    count_outliers,
    fit_linear,
    relative_spread,
    slowdown_factor,
    timed_collectives,
)
from ddplab.calibration.slow_downs import ISOLATION_NS, IsolatedTimes, SlowdownTimes, choose_far_apart, fit_lingering
from ddplab.cli.terminal_output import show_calibration
from ddplab.validation import training_runs
from ddplab.validation.fitted_slow_downs import (
    Reference,
    fitted,
    reference_runs,
    with_hook_costs,
    with_slow_downs,
)
from ddplab.validation.validation_report import Configuration, Measurement, SpeedCheck, policy_of, predict_one
from reference import bucket_kinds
from reference.autograd_graph import reachable
from reference.bucketing import MIB
from reference.buckets import Bucket
from reference.launch import RankPool
from reference.trace import Parameter, Trace
from simulator import Fabric, predict
from simulator.fabric import Contention, Linear, Processor, Timing
from simulator.fabric.processor_costs import HookCost
from simulator.schedule.hook_messages import HALVES, HOOKS, named_hook
from simulator.schedule.schedule import buckets_of
from simulator.workload.compute_times import recorded_model

from .explore import examples
from .strategies import HOOK_COSTS, iteration, policies, trace_of, traces

TINY = "tests.models_for_cli:tiny"
positive = st.integers(1, 10**9)
times = st.lists(positive, min_size=1, max_size=12)


# Summaries of samples


@given(times, st.integers(1, 1000), st.randoms())
def test_spread_is_a_fraction_whatever_the_unit_and_the_order(taken, unit, random):
    shuffled = random.sample(taken, len(taken))
    assert relative_spread([unit * ns for ns in shuffled]) == pytest.approx(relative_spread(taken))
    assert relative_spread(taken) >= 0


@given(positive, st.integers(1, 9))
def test_what_never_varies_has_no_spread(ns, count):
    assert relative_spread([ns] * count) == 0


@given(st.lists(positive, min_size=7, max_size=7), positive)
def test_one_wild_sample_of_seven_does_not_move_the_spread(taken, more):
    *others, slowest = sorted(taken)
    assert relative_spread([*others, slowest + more]) == relative_spread(taken)


@pytest.mark.parametrize("count", [3, 5, 7, 20])
def test_the_spread_of_normal_samples_is_that_of_their_middle_ninety_percent(count):
    """However few they are: the quantiles of numpy's default would give 0.8 of it for 7."""
    drawn = np.random.default_rng(0).normal(1000, 10, size=(4000, count))
    assert np.mean([relative_spread(row) for row in drawn]) == pytest.approx(0.01645, rel=0.05)


@given(times, st.integers(3, 9))
def test_what_took_over_twice_the_median_is_an_outlier(taken, factor):
    assert 2 * count_outliers(taken) <= len(taken)
    assert count_outliers([100] * 5 + [100 * factor] * 2 + [199, 200]) == 2


lines = st.builds(Linear, fixed_ns=st.floats(1, 1e6), ns_per_byte=st.floats(1e-3, 10))
sizes = st.lists(st.integers(1, 10**8), min_size=2, max_size=6, unique=True)


@given(lines, sizes)
def test_a_line_is_fitted_by_itself(line, sizes):
    found = fit_linear({size: [line.fixed_ns + line.ns_per_byte * size] * 3 for size in sizes})
    for size in sizes:
        assert found(size) == pytest.approx(line(size), rel=1e-3, abs=1)


@given(st.dictionaries(st.integers(1, 10**8), st.lists(st.integers(0, 10**9), min_size=1), max_size=6))
def test_no_cost_is_fitted_below_zero(taken):
    """Linear itself refuses negative costs."""
    assert (fit_linear(taken) == Linear()) == (not taken)


def test_work_that_gets_cheaper_with_its_size_is_fitted_as_a_fixed_cost():
    found = fit_linear({1000: [300], 10**6: [200]})
    assert found.ns_per_byte == 0
    assert 200 < found.fixed_ns < 300


@given(positive, st.integers(1, 20), st.integers(1, 5), st.integers(1, 3))
def test_contended_times_over_times_alone_are_the_slowdown(ns, factor, rounds, ranks):
    measured = ContentionTimes([[ns, ns]] * rounds, [[factor * ns] * 3] * rounds)
    assert slowdown_factor([measured] * ranks) == pytest.approx((factor, 0))


def test_ranks_are_averaged_and_a_disturbed_round_shows_in_the_band_alone():
    twice = ContentionTimes([[10] * 4] * 4, [[20] * 4] * 4)
    disturbed = ContentionTimes(twice.alone, [*twice.contended[:3], [200] * 4])
    assert slowdown_factor([twice, ContentionTimes(twice.alone, [[40] * 4] * 4)]) == (3, 0)
    factor, band = slowdown_factor([disturbed])
    assert factor == 2
    assert band > 1


def test_contention_never_speeds_up():
    assert slowdown_factor([ContentionTimes([[10]], [[5]])])[0] == 1


@given(st.floats(1, 5), st.floats(0, 2), st.floats(1, 5), st.floats(0, 2))
def test_slowdowns_move_by_their_bands_and_never_below_one(compute, compute_error, collective, collective_error):
    measured = Contention(
        compute=compute, compute_error=compute_error, collective=collective, collective_error=collective_error
    )
    processor = Processor(contention=(measured,), lingers_ns=300, lingers_error_ns=200)
    assert processor.slowed(0) == processor
    assert [processor.slowed(widths).lingers_ns for widths in (-2, -1, 1)] == [0, 100, 500]
    (slower,), (faster,) = processor.slowed(1).contention, processor.slowed(-1).contention
    assert slower.compute == pytest.approx(compute + compute * compute_error)
    assert slower.collective == pytest.approx(collective + collective * collective_error)
    assert 1 <= faster.compute <= compute
    assert 1 <= faster.collective <= collective


# Collectives on their own


@given(st.dictionaries(st.integers(0, 99), positive, min_size=1), positive)
def test_chosen_moments_are_far_apart_and_no_further_one_would_fit(moments, least):
    chosen = choose_far_apart(moments, least)
    at = [moments[place] for place in chosen]
    assert at[0] == min(moments.values())
    assert all(later - earlier >= least for earlier, later in pairwise(at))
    for place in moments.keys() - chosen:
        assert any(earlier <= moments[place] < earlier + least for earlier in at)


@given(st.floats(1.2, 3), st.floats(1, 3), *[st.integers(0, 2_000_000)] * 3)
def test_lingering_is_recovered_from_the_replay_of_isolated_collectives(
    compute, collective, cost_ns, launch_ns, lingers_ns
):
    one = iteration(0, tuple(range(10_000_000, 80_000_000, 20_000_000)), 90_000_000, 0)
    trace = trace_of([[one]] * 2, [4] * len(one.ready_ns))
    rows = (Contention(compute=compute, collective=collective),)
    fabric = Fabric(
        all_reduce=(Timing(world_size=2, size_bytes=0, ns=1 + cost_ns),),
        processor=Processor(contention=rows, launch_ns=launch_ns, lingers_ns=lingers_ns),
    )
    slowed = predict(trace, fabric, world_size=2, plan=[[index] for index in range(len(one.ready_ns))])
    passes = ContentionTimes([[slowed.compute_ns]], [[slowed.iteration_ns]])
    contended = [SlowdownTimes({}, {4: IsolatedTimes(len(one.ready_ns), passes)})] * 2
    found_ns, band_ns = fit_lingering(contended, rows, launch_ns, lambda size: fabric.all_reduce_ns(size, 2))
    assert found_ns == pytest.approx(lingers_ns, abs=20)
    assert band_ns == 0


def test_nothing_lingers_where_computation_is_not_slowed_or_was_not_interrupted():
    single = IsolatedTimes(3, ContentionTimes([[100]], [[130]]))
    assert fit_lingering([SlowdownTimes({}, {4: single})], (Contention(collective=2.0),), 1, lambda _: 5) == (0, 0)
    assert fit_lingering([SlowdownTimes({}, {})], (Contention(compute=2.0),), 1, lambda _: 5) == (0, 0)


def test_lingering_is_limited_to_zero_and_to_the_distance_of_the_collectives():
    rows, faster, hung = (
        (Contention(compute=2.0),),
        ContentionTimes([[100]], [[90]]),
        ContentionTimes([[100]], [[10**12]]),
    )
    assert fit_lingering([SlowdownTimes({}, {4: IsolatedTimes(3, faster)})], rows, 1, lambda _: 5) == (0, 0)
    assert fit_lingering([SlowdownTimes({}, {4: IsolatedTimes(3, hung)})], rows, 1, lambda _: 5) == (ISOLATION_NS, 0)


# Queues of all-reduces


def run_queue(_rank, _world_size, sizes, all_at_once):
    """How long messages of ones took, and what became of each."""
    messages = [torch.ones(size) for size in sizes]
    queue = AllReduceQueue(messages, all_at_once=all_at_once)
    queue.wait()
    return queue.ns_per_all_reduce(), [set(message.tolist()) for message in messages]


@examples(20)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.booleans())
def test_a_queue_adds_up_every_message_once(two_ranks, sizes, all_at_once):
    for took_ns, sums in two_ranks.run(run_queue, sizes, all_at_once):
        assert took_ns > 0
        assert sums == [{2.0}] * len(sizes)


def failing_queue(_rank, _world_size, all_at_once):
    """The third all-reduce fails as Gloo's do, in its future."""
    real, failed = dist.all_reduce, []

    def all_reduce(message, **options):
        failed.append(message)
        if len(failed) != 3:
            return real(message, **options)
        future = torch.futures.Future()
        future.set_exception(RuntimeError("connection closed by peer"))
        return mock.Mock(get_future=lambda: future)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        try:
            AllReduceQueue([torch.ones(4)] * 5, all_at_once=all_at_once).wait()
        except RuntimeError as error:
            return str(error)
    return None


@pytest.mark.parametrize("all_at_once", [False, True])
def test_waiting_for_a_queue_raises_the_error_of_its_all_reduce(two_ranks, all_at_once):
    assert two_ranks.run(failing_queue, all_at_once) == ["connection closed by peer"] * 2


@given(st.integers(1, 40), st.integers(1, 50), st.integers(1, 30))
def test_messages_lie_after_each_other_in_the_memory_of_all_gradients(total, size, count):
    memory = MessageBuffer(4 * max(total, size))
    messages = memory.messages(4 * size, count)
    places = max(total, size) // size
    starts = [message.storage_offset() for message in messages]
    assert starts == [size * (n % places) for n in range(count)]
    assert [len(message) for message in messages] == [size] * count


# Broadcasts


def broadcasts_in_ticks(rank: int, world_size: int) -> dict:
    """`time_collectives` by a clock that a broadcast moves by 1 on its root and by 1000 on the other rank."""
    clock = SimpleNamespace(now=0)
    real = dist.broadcast

    def broadcast(*arguments):
        real(*arguments)
        clock.now += 1000 if rank else 1

    def now() -> int:
        return clock.now

    with mock.patch.object(dist, "broadcast", broadcast), mock.patch.object(collective_times, "clock_ns", now):
        assert collective_times.last_to_last_ns(dist.broadcast, torch.ones(1), 0) == 1000
        clock.now = 7 * rank
        return collective_times.last_to_last_ns(dist.broadcast, torch.ones(1), 0)


def test_a_broadcast_lasts_until_the_slowest_rank_has_the_message(two_ranks):
    """The second one is called 7 ticks later on rank 1, and it counts from there."""
    assert two_ranks.run(broadcasts_in_ticks) == [1000] * 2


def queue_that_ends_at(ends_ns):
    queue = object.__new__(collective_times.AllReduceQueue)
    queue._ends_ns, queue._start_ns = ends_ns, 0
    queue._over, queue._error = threading.Event(), None
    queue._over.set()
    return queue


@given(st.lists(st.integers(1, 10**6), min_size=3, max_size=20), st.data())
def test_the_first_messages_of_a_queue_do_not_count(gaps, data):
    """A link that was idle lets a burst pass, so the first messages are faster than the others."""
    in_flight = data.draw(st.integers(1, len(gaps) - 1))
    ends_ns = list(accumulate(gaps))
    shuffled = data.draw(st.permutations(ends_ns))
    steady_ns = collective_times.steady_ns_per_all_reduce(queue_that_ends_at(shuffled).ends_ns, in_flight)
    assert steady_ns == sum(gaps[in_flight:]) // (len(gaps) - in_flight)


def two_at_a_time_in_ticks(rank: int, world_size: int) -> int:
    """`two_at_a_time_ns` of ranks that end an all-reduce 40 ticks apart, and in turns."""
    ends_ns = [100 * number + (40 if number % 2 == rank else 0) for number in range(1, 6)]
    with mock.patch.object(collective_times, "AllReduceQueue", return_value=queue_that_ends_at(ends_ns)):
        return collective_times.two_at_a_time_ns([])


def test_two_at_a_time_are_timed_by_the_rank_that_has_each_of_them_last(two_ranks):
    """The last rank ends them 100 ticks apart; from the second to the fifth, rank 1 alone would take 340 for 300."""
    assert two_ranks.run(two_at_a_time_in_ticks) == [200] * 2


def recording_events(rank: int, world_size: int) -> list[str]:
    """What `record_computation` does, in order."""
    events = []
    real_record, real_meet, real_step = training_runs.record, training_runs.meet, training_runs.Trainer.step

    @contextmanager
    def record(*arguments, **named):
        with real_record(*arguments, **named) as recording:
            events.append("open")
            yield recording

    def meet():
        events.append("meet")
        real_meet()

    def step(trainer, module):
        events.append(type(module).__name__)
        real_step(trainer, module)

    with (
        mock.patch.object(training_runs, "record", record),
        mock.patch.object(training_runs, "meet", meet),
        mock.patch.object(training_runs.Trainer, "step", step),
    ):
        training_runs.record_computation(rank, world_size, TINY, iterations=2)
    return events


def test_ranks_meet_before_each_recorded_iteration_which_runs_under_the_reducer(two_ranks):
    for events in two_ranks.run(recording_events):
        assert events[events.index("open") + 1 :] == ["meet", "DistributedDataParallel"] * (training_runs.WARM_UP + 2)


def record_with_an_unused_parameter(rank: int, world_size: int) -> list[str]:
    """The classes of the modules that `record_computation` trains."""
    trained = []
    real_step = training_runs.Trainer.step

    def step(trainer, module):
        trained.append(type(module).__name__)
        real_step(trainer, module)

    def build(_name):
        module = nn.Linear(3, 3)
        module.unused = nn.Parameter(torch.zeros(2))
        return module, lambda called: called(torch.ones(1, 3)).sum()

    with (
        mock.patch.object(models, "build", build),
        mock.patch.object(training_runs.Trainer, "step", step),
    ):
        trace = training_runs.record_computation(rank, world_size, "m", iterations=2)
    assert all(iteration.ready_ns[2] is None for of_rank in trace.ranks for iteration in of_rank.iterations)
    return trained


def test_a_model_with_an_unused_parameter_is_recorded_without_the_reducer(two_ranks):
    assert two_ranks.run(record_with_an_unused_parameter) == [["Linear"] * (training_runs.WARM_UP + 2)] * 2


@given(traces(), st.integers(1, 3))
def test_without_averaging_a_backward_pass_ends_with_its_last_gradient(trace, count):
    count = min(count, *(len(rank.iterations) for rank in trace.ranks))
    kept = Trace.model_validate(training_runs.without_averaging(trace, count).model_dump())
    for before, after in zip(trace.ranks, kept.ranks, strict=True):
        assert len(after.iterations) == count
        for old, new in zip(before.iterations[-count:], after.iterations, strict=True):
            assert new.backward_end_ns == max(ns for ns in new.ready_ns if ns is not None)
            assert new.end_ns - new.backward_end_ns == old.end_ns - old.backward_end_ns
            assert new.forward_end_ns - new.forward_start_ns == old.forward_end_ns - old.forward_start_ns


# The reference run


@given(traces(), st.floats(1e-5, 1e-3))
def test_reference_runs_have_buckets_that_no_target_has(trace, cap_mb):
    targets = [Configuration(cap) for cap in (cap_mb, 1e-5, 1e-4, float("inf"))]
    model = recorded_model(trace, unused_allowed=True)
    taken = [buckets_of(policy_of(target), model) for target in targets]
    plans = [buckets_of(policy_of(run), model) for run in reference_runs(trace, targets)]
    assert not [plan for plan in plans if plan in taken or len(plan) < 2]
    assert all(len(many) >= 2 * len(few) for few, many in pairwise(plans))


GRADIENTS = 24
EVEN = trace_of(
    [[iteration(10**7, tuple(10**7 + 2_000_000 * (GRADIENTS - n) for n in range(GRADIENTS)), 6 * 10**7, 0)]],
    [MIB] * GRADIENTS,
)
"""Gradients 2 ms apart, whose all-reduces take 1 ms each."""
SLOWED = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9).model_copy(
    update={"processor": Processor(contention=(Contention(compute=1.5),))}
)


@given(st.floats(0, 4), st.floats(-0.05, 0.05))
def test_slow_downs_are_fitted_to_the_reference_runs_on_average(factor, noise):
    """One run was measured too long and the other too short by as much."""
    runs = reference_runs(EVEN, [Configuration(1.0), Configuration(25.0)])
    truth = with_slow_downs(SLOWED, factor)
    measured = {
        run: Reference((predict_one(EVEN, truth, run, 2).iteration_ns / (1 + error),) * 3, SpeedCheck(1, 1))
        for run, error in zip(runs, (noise, -noise), strict=True)
    }
    fabric = fitted(partial(with_slow_downs, SLOWED), EVEN, 2, measured)
    for cap_mb in (1.0, 3.0, 25.0):
        found, right = (predict_one(EVEN, one, Configuration(cap_mb), 2).iteration_ns for one in (fabric, truth))
        assert found == pytest.approx(right, rel=0.02)


@given(st.floats(0, 4))
def test_a_comm_hook_is_fitted_to_its_reference_run(factor):
    hook = HookCost(name="fp16", compress=Linear(ns_per_byte=1), decompress=Linear(fixed_ns=1000))
    fabric = SLOWED.model_copy(update={"processor": Processor(hooks=(hook,))})
    run = Configuration(1.0, hook="fp16")
    measured_ns = predict_one(EVEN, with_hook_costs(fabric, "fp16", factor), run, 2).iteration_ns
    measured = {run: Reference((measured_ns,) * 3, SpeedCheck(1, 1))}
    found = fitted(partial(with_hook_costs, fabric, "fp16"), EVEN, 2, measured)
    assert predict_one(EVEN, found, run, 2).iteration_ns == pytest.approx(measured_ns, rel=0.01)


def test_turns_of_the_reference_run_are_compared_at_the_usual_speed():
    turns = [Measurement((ns,), SpeedCheck(ns // 2, ns // 2)) for ns in (100, 110, 90)]
    assert Reference.of(turns) == Reference((pytest.approx(100),) * 3, SpeedCheck(50, 50))


# A hook's own work


@given(st.integers(1, 4), st.lists(st.integers(0, 1000), min_size=10, max_size=10))
def test_a_hooks_parts_and_its_collectives_make_up_its_time(count, gaps):
    moments = list(accumulate(gaps))[: 2 * count + 2]
    collectives = [TimedCollective(*moments[at : at + 2]) for at in range(1, 2 * count, 2)]
    parts = hook_costs.parts_of(TimedCollective(moments[0], moments[-1]), collectives)
    assert (parts.recompress is None) == (count == 1)
    communicating = sum(collective.done_ns - collective.issued_ns for collective in collectives)
    assert sum(filter(None, parts)) + communicating == moments[-1] - moments[0]
    assert (parts.compress, parts.decompress) == (moments[1] - moments[0], moments[-1] - moments[-2])


def test_a_hook_without_collectives_only_compresses():
    assert hook_costs.parts_of(TimedCollective(10, 17), []) == (7, None, None)


def test_collectives_are_no_longer_timed_once_the_block_has_failed():
    before = dist.all_reduce
    with suppress(ZeroDivisionError), timed_collectives("all_reduce"):
        assert dist.all_reduce is not before
        raise ZeroDivisionError
    assert dist.all_reduce is before


def hook_in_ticks(rank: int, _world_size: int) -> tuple:
    """Parts of a hook that computes 5, 7 and 11 ticks of a clock that only it moves; collectives take 1000 each.

    They do so on rank 0, which goes on only after it has added its callback. On rank 1 a collective may be done at
    once, and then its callbacks run in any order.
    """
    clock = SimpleNamespace(now=0)

    def average(buffer, then):
        if rank:
            dist.recv(torch.zeros(1), 0)  # so that rank 0 has to wait in its collective
        future = dist.all_reduce(buffer, async_op=True).get_future().then(then)
        if not rank:
            clock.now += 1000
            dist.send(torch.zeros(1), 1)
        return future

    def hook(_state, bucket):
        clock.now += 5
        average(bucket.buffer(), lambda _: None).wait()
        clock.now += 7

        def decompress(_future):
            clock.now += 11
            return bucket.buffer()

        return average(bucket.buffer(), decompress)

    def now() -> int:
        return clock.now

    with mock.patch.object(hook_costs, "clock_ns", now), mock.patch.object(repeated_timing, "clock_ns", now):
        return hook_costs.time_parts(hook, None, Bucket([0], [nn.Parameter(torch.ones(3))]))


def test_waiting_for_collectives_is_no_work_of_the_hook(two_ranks):
    assert two_ranks.run(hook_in_ticks)[0] == (5, 7, 11)


def test_every_hook_that_can_be_predicted_can_be_measured():
    assert {"none", *hook_costs.REAL_HOOKS} == set(HOOKS)
    assert set(hook_costs.HALVES) == set(HALVES)


@pytest.mark.parametrize("name", [*(name for name in HOOKS if name != "none"), "bf16+power_sgd:2"])
def test_a_hook_has_the_parts_that_its_messages_imply(two_ranks, name):
    """All gradients of `tiny` are one bucket, some of them worth compressing."""
    measured = two_ranks.run(hook_costs.time_hook, named_hook(name).name, TINY, 2)
    parameters = [
        Parameter(name=parameter, shape=tuple(p.shape), dtype="float32", size_bytes=p.nbytes)
        for parameter, p in models.build(TINY)[0].named_parameters()
    ]
    total = sum(parameter.size_bytes for parameter in parameters)
    for of_rank in measured:
        assert sum(size for size, _ in of_rank) == total
        for _, repetitions in of_rank:
            assert len(repetitions) == 2
            for parts in repetitions:
                message = named_hook(name).message(parameters)
                assert parts.compress >= 0
                assert (parts.decompress is None) == (message is None)
                assert (parts.recompress is None) == (message is None or message.second_bytes is None)


# What the reducer does before a backward pass


def preparation_in_ticks(rank: int, world_size: int) -> tuple[list, list]:
    """What `time_search_and_rebuild` measures by a clock that a found parameter moves by 1, a broadcast by 1000.

    Making a bucket moves it by 10.
    """
    clock = SimpleNamespace(now=0)
    real_broadcast, real_bucket = dist.broadcast, bucket_kinds.Bucket

    def search(outputs, indices):
        found = reachable(outputs, indices)
        clock.now += len(found)
        return found

    def broadcast(*arguments, **named):
        clock.now += 1000
        return real_broadcast(*arguments, **named)

    def bucket(*arguments, **named):
        clock.now += 10
        return real_bucket(*arguments, **named)

    def now() -> int:
        return clock.now

    with (
        mock.patch.object(reducer_costs, "reachable", search),
        mock.patch.object(dist, "broadcast", broadcast),
        mock.patch.object(bucket_kinds, "Bucket", bucket),
        mock.patch.object(reducer_costs, "clock_ns", now),
        mock.patch.object(repeated_timing, "clock_ns", now),
    ):
        return reducer_costs.time_search_and_rebuild(rank, world_size, TINY, 2)


def test_the_search_is_timed_per_parameter_and_the_rebuild_without_its_broadcast(two_ranks):
    """All 6 parameters are found, and one bucket is made anew."""
    assert two_ranks.run(preparation_in_ticks) == [([1, 1], [10, 10])] * 2


# Real calibrations


@pytest.fixture(scope="module")
def calibrated(two_ranks: RankPool) -> tuple[Fabric, list[str]]:
    """A calibration with hooks, one of them asked for twice, and the words of its progress."""
    words: list[str] = []
    fabric = calibrate(
        two_ranks,
        TINY,
        hooks=["fp16", "none", "power_sgd", "fp16"],
        sizes_bytes=[65536, 4096],
        repeats=3,
        on_progress=lambda word, done, total: words.append(word),
    )
    return fabric, words


def test_a_calibration_has_all_that_a_prediction_charges(calibrated):
    fabric, words = calibrated
    for rows in (fabric.all_reduce, fabric.broadcast):
        assert [(row.world_size, row.size_bytes) for row in rows] == [(2, 4096), (2, 65536)]
        assert all(row.ns > 0 for row in rows)
    assert [row.size_bytes for row in fabric.sharing] == [4096, 65536]
    assert any(row.spread > 0 for row in fabric.all_reduce)
    assert all(row.repeats >= 3 and 2 * row.outliers <= row.repeats for row in fabric.all_reduce)
    assert fabric.relative_error(2) == np.median([row.spread for row in fabric.all_reduce])
    processor = fabric.processor
    assert min(processor.launch_ns, processor.rebuild_ns, processor.search_ns_per_parameter) > 0
    assert processor.pack != Linear() != processor.copy_out
    assert [row.running for row in processor.contention] == [2, 1]
    assert all(row.compute_error > 0 and row.collective_error > 0 for row in processor.contention)
    assert TINY in fabric.source
    assert list(dict.fromkeys(words)) == [
        *("calibrating collectives", "calibrating slow-downs", "calibrating fp16", "calibrating power_sgd:1")
    ]


def test_hooks_are_measured_once_each_and_part_by_part(calibrated):
    costs = {cost.name: cost for cost in calibrated[0].processor.hooks}
    assert list(costs) == ["fp16", "none", "power_sgd:1"]
    assert len(calibrated[0].processor.hooks) == 3
    assert costs["none"] == HookCost(name="none")
    nothing = Linear()
    assert costs["fp16"].compress != nothing != costs["fp16"].decompress
    assert costs["fp16"].recompress == nothing
    assert nothing not in (costs["power_sgd:1"].compress, costs["power_sgd:1"].recompress)
    assert costs["power_sgd:1"].decompress != nothing


def test_a_calibration_with_hooks_is_loaded_as_it_was_saved(calibrated, tmp_path):
    calibrated[0].save(tmp_path / "fabric.json")
    assert Fabric.load(tmp_path / "fabric.json") == calibrated[0]


def test_a_calibration_is_shown_with_a_row_for_each_part_of_a_hook(calibrated, capsys):
    show_calibration(calibrated[0], "tiny", "2 ranks")
    shown = capsys.readouterr().out
    assert shown.count("fp16") == 2
    assert shown.count("power_sgd:1") == 3
    assert "none" not in shown
    assert "65,536" in shown


def test_without_hooks_that_cost_anything_no_table_of_them_is_shown(calibrated, capsys):
    fabric = calibrated[0]
    free = fabric.processor.model_copy(update={"hooks": (HookCost(name="none"),)})
    show_calibration(fabric.model_copy(update={"processor": free}), "tiny", "2 ranks")
    assert "comm hooks" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "measure",
    [
        partial(calibrate, model=TINY, hooks=["zip"]),
        partial(measure_hooks, fabric=Fabric.from_table([(2, 8, 1)]), model=TINY, hooks=["zip"]),
    ],
)
def test_an_unknown_hook_is_refused_before_a_rank_is_started(measure):
    pool = mock.create_autospec(RankPool, instance=True)
    with pytest.raises(ValueError, match=r"^hook: expected one of none, noop, .*; got 'zip'$"):
        measure(pool)
    pool.run.assert_not_called()


# Predictions with measured hooks

FABRIC = Fabric.from_alpha_beta(alpha_ns=100, bytes_per_s=1e9)
ONE = iteration(forward_ns=10, ready_ns=(30, 20), backward_end_ns=32, step_ns=5)


def with_hooks(*costs: HookCost) -> Fabric:
    return FABRIC.model_copy(update={"processor": Processor(hooks=costs)})


@pytest.mark.parametrize("part", ["compress", "recompress", "decompress"])
def test_a_measured_hook_is_charged_for_each_bucket(part):
    """PowerSGD's parts follow each other where there is one bucket; fp16 has nothing between collectives."""
    trace = trace_of([[ONE]], [400, 400])
    cost = Linear(fixed_ns=1e6, ns_per_byte=2)
    for name in ("fp16", "batched_power_sgd:1"):
        free, charged = (
            predict(trace, fabric, world_size=2, hook=name)
            for fabric in (FABRIC, with_hooks(HookCost(name="bf16"), HookCost(name=name, **{part: cost})))
        )
        happens = name != "fp16" or part != "recompress"
        assert charged.iteration_ns - free.iteration_ns == happens * (1_000_000 + 1600)


@given(
    st.integers(1, 8), st.integers(1, 8), st.sampled_from(["fp16", "quantize_per_tensor", "bf16+quantize_per_tensor"])
)
def test_what_is_gathered_from_more_ranks_takes_longer_to_decompress(measured, asked, name):
    """All else that a hook computes does not depend on the ranks."""
    cost = HookCost(name=name, world_size=measured, compress=Linear(fixed_ns=70), decompress=Linear(fixed_ns=840))
    prediction = predict(trace_of([[ONE]], [400, 400]), with_hooks(cost), world_size=asked, hook=name)
    grown = 840 * asked / measured if "quantize" in name else 840
    assert prediction.breakdown["hook"] == 70 + grown


def test_the_prediction_lists_what_counts_as_free():
    """Hooks that compute nothing, were measured, or have explicit costs are not listed."""
    trace, cost = trace_of([[ONE]], [400, 400]), Linear(fixed_ns=1)
    measured = with_hooks(HookCost(name="power_sgd:1", compress=cost))
    hook_with_costs = named_hook("bf16").model_copy(update={"compress": cost})
    no_costs = "the fabric has no processor costs, so copies, launches and slow-downs count as free"
    for hook in ("none", "noop", "power_sgd", hook_with_costs):
        assert predict(trace, measured, world_size=2, hook=hook).counted_as_free == (no_costs,)
    complete = FABRIC.model_copy(update={"processor": Processor(launch_ns=1)})
    assert predict(trace, complete, world_size=2).counted_as_free == ()
    (sentence,) = predict(trace, complete, world_size=2, hook="fp16").counted_as_free
    assert sentence.startswith("the hook fp16 was not measured")


def test_costs_of_another_hook_are_not_charged():
    trace = trace_of([[ONE]], [400, 400])
    other = with_hooks(HookCost(name="power_sgd:2", compress=Linear(fixed_ns=1e6)))
    assert predict(trace, other, world_size=2, hook="power_sgd:1") == predict(
        trace, FABRIC, world_size=2, hook="power_sgd:1"
    )


@given(st.data())
def test_measured_costs_count_like_explicit_ones_which_take_precedence(data):
    trace = data.draw(traces())
    hook = data.draw(policies(tuple(trace.keys))).hook
    parts = {part: getattr(hook, part) for part in HOOK_COSTS}
    cost = HookCost(name=hook.name, world_size=2, **parts)
    other = HookCost(name=hook.name, compress=Linear(fixed_ns=12345))
    explicit = predict(trace, FABRIC, world_size=2, hook=hook)
    if hook.has_costs:
        assert predict(trace, with_hooks(cost), world_size=2, hook=named_hook(hook.name)) == explicit
        assert predict(trace, with_hooks(other), world_size=2, hook=hook) == explicit


def test_waiting_for_a_collective_includes_its_callback():
    """Other callbacks of a collective may run before its end has been noted."""
    call = TimedCollective(issued_ns=0)
    late = threading.Timer(0.05, call.finish)
    late.start()
    assert call.wait() == call.done_ns > 0
    late.join()
