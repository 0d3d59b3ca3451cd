"""The modelled network in one process: real averages, and ranks whose collectives differ."""

import pytest
import torch
import torch.distributed as dist

from ddplab.emulation.emulate import emulate
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.errors import RankError
from ddplab.reference.recording.reducer_observer import Observer

from .small_trace import FABRIC, small_trace

pytestmark = pytest.mark.usefixtures("soon")


def test_ranks_that_differ_average_their_gradients():
    averages = set()

    class Watched(DistributedDataParallel):
        def forward(self, *inputs):
            self.module.value = float(dist.get_rank() + 1)
            self.reducer.observers.append(self)
            return super().forward(*inputs)

        def __getattr__(self, name):
            return (lambda *_: None) if name in vars(Observer) else super().__getattr__(name)

        def bucket_copied_out(self, _bucket):
            averages.update(value for one in self.module.parameters() for value in one.grad.unique().tolist())

    emulate(small_trace(3), FABRIC, world_size=3, bucket_cap_mb=25, reducer=Watched)
    assert averages == {2.0}  # the mean of 1, 2 and 3


def test_ranks_that_launch_different_collectives_are_named():
    class Wrong(DistributedDataParallel):
        def forward(self, *inputs):
            dist.all_reduce(torch.zeros(dist.get_rank() + 1))
            return super().forward(*inputs)

    with pytest.raises(RankError, match=r"rank 1: expected its collective \d+ to be an all_reduce of 4 bytes"):
        emulate(small_trace(2), FABRIC, world_size=2, reducer=Wrong)


def test_emulation_leaves_other_process_groups_alone():
    assert not dist.is_initialized()
    emulate(small_trace(), FABRIC, world_size=2)
    assert not dist.is_initialized()
