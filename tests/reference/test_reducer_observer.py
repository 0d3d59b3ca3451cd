"""Observers: which calls a reducer makes in an iteration, and in which order."""

from unittest.mock import Mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.recording.reducer_observer import Observer

from ..explore import examples

IN_ORDER = (
    "bucket_packing",
    "bucket_ready",
    "bucket_launching",
    "bucket_sending",
    "bucket_launched",
    "bucket_done",
    "bucket_copied_out",
)
"""Calls for each bucket."""


def calls_of(log):
    """The name and the bucket or parameter of each call; the log begins again."""
    calls = [(name, *arguments[:1]) for name, arguments, _ in log.method_calls]
    log.reset_mock()
    return calls


def calls_by_iteration(_rank, _world_size, watches_parameters, layers, bucket_cap_mb):
    """By synchronised iteration, an observer's calls and the number of buckets; then its calls under `no_sync`."""
    ddp = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(layers))), bucket_cap_mb=bucket_cap_mb
    )
    ddp.reducer.observers.append(log := Mock(spec=Observer, watches_parameters=watches_parameters))
    iterations = []
    for _ in range(3):
        ddp(torch.ones(1, 4)).sum().backward()
        iterations.append((calls_of(log), len(ddp.reducer.buckets)))
    with ddp.no_sync():
        ddp(torch.ones(1, 4)).sum().backward()
    return iterations, calls_of(log)


@examples(10)
@given(st.booleans(), st.integers(1, 4), st.sampled_from([1e-6, 1e-4, 25]))
def test_every_bucket_is_followed_from_packing_to_copying_out(two_ranks, watches, layers, cap_mb):
    for iterations, under_no_sync in two_ranks.run(calls_by_iteration, watches, layers, cap_mb):
        ready = [("parameter_ready", index) for index in range(layers)] if watches else []
        for calls, buckets in iterations:
            expected = [(name, bucket) for name in IN_ORDER for bucket in range(buckets)]
            once = [("forward_started",), ("backward_started",), ("backward_computed",)]
            assert sorted(calls) == sorted([*expected, *once, *ready])
            for bucket in range(buckets):
                of_bucket = [name for name, *at in calls if at == [bucket] and name.startswith("bucket")]
                assert of_bucket == list(IN_ORDER)
            names = [name for name, *_ in calls]
            assert names[0] == "forward_started"
            assert names.index("backward_started") < names.index("bucket_packing")
            last_launch = max(index for index, name in enumerate(names) if name == "bucket_launched")
            assert last_launch < names.index("backward_computed") < names.index("bucket_done")
        assert sorted(under_no_sync) == ready
