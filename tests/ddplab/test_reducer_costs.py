"""Costs of the reducer: the search for unused parameters and the rebuilding of buckets."""

from types import SimpleNamespace
from unittest import mock

import torch.distributed as dist

from ddplab.calibration import reducer_costs, repeated_timing
from reference import view_and_sparse_buckets
from reference.autograd_graph import reachable

TINY = "tests.models_for_cli:tiny"


# What the reducer does before a backward pass


def preparation_in_ticks(rank: int, world_size: int) -> tuple[list, list]:
    """What `time_search_and_rebuild` measures by a clock that a found parameter moves by 1, a broadcast by 1000.

    Making a bucket moves it by 10.
    """
    clock = SimpleNamespace(now=0)
    real_broadcast, real_bucket = dist.broadcast, view_and_sparse_buckets.Bucket

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
        mock.patch.object(view_and_sparse_buckets, "Bucket", bucket),
        mock.patch.object(reducer_costs, "clock_ns", now),
        mock.patch.object(repeated_timing, "clock_ns", now),
    ):
        return reducer_costs.time_search_and_rebuild(rank, world_size, TINY, 2)


def test_the_search_is_timed_per_parameter_and_the_rebuild_without_its_broadcast(two_ranks):
    """All 6 parameters are found, and one bucket is made anew."""
    assert two_ranks.run(preparation_in_ticks) == [([1, 1], [10, 10])] * 2
