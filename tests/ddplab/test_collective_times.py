"""Times of collectives: queues of all-reduces, broadcasts, and two messages at a time."""

from itertools import accumulate
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddplab.calibration import collective_times
from ddplab.calibration.collective_times import AllReduceQueue

from ..explore import examples


def run_queue(_rank, _world_size, sizes):
    """How long messages of ones took, and what became of each."""
    messages = [torch.ones(size) for size in sizes]
    queue = AllReduceQueue(messages)
    queue.wait()
    return queue.ns_per_all_reduce(), [set(message.tolist()) for message in messages]


@examples(8)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_a_queue_adds_up_every_message_once(two_ranks, sizes):
    for took_ns, sums in two_ranks.run(run_queue, sizes):
        assert took_ns > 0
        assert sums == [{2.0}] * len(sizes)


def failing_queue(_rank, _world_size):
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
            AllReduceQueue([torch.ones(4)] * 5).wait()
        except RuntimeError as error:
            return str(error)
    return None


def test_waiting_for_a_queue_raises_the_error_of_its_all_reduce(two_ranks):
    assert two_ranks.run(failing_queue) == ["connection closed by peer"] * 2


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
    queue._start_ns, queue._results, queue._ends = 0, [], [torch.futures.Future() for _ in ends_ns]
    for end, ns in zip(queue._ends, ends_ns, strict=True):
        end.set_result(ns)
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
