"""Cores of ranks: shares that are even, and ranks that keep to theirs."""

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.launch import RankPool
from ddplab.reference.ranks.process_settings import cores_of

from . import launch_bodies as bodies


@given(st.integers(1, 20), st.integers(1, 16))
def test_ranks_share_the_cores_evenly_or_not_at_all(world_size, count):
    available = list(range(100, 100 + count))
    shares = [cores_of(rank, world_size, available) for rank in range(world_size)]
    used = [core for share in shares for core in share]
    if world_size <= count:
        assert sorted(used) == available
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    elif world_size % count == 0:
        assert sorted(used) == sorted(available * (world_size // count))
    else:
        assert shares == [available] * world_size


@pytest.mark.skipif(sys.platform != "linux", reason="needs sched_setaffinity")
def test_a_pinned_rank_keeps_to_its_cores():
    available = sorted(os.sched_getaffinity(0))
    with RankPool(2, pinned=True) as pool:
        assert pool.run(bodies.cores) == [cores_of(rank, 2, available) for rank in range(2)]
