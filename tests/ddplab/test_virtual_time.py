"""Virtual time: ranks that wait for ever and ranks that fail are named."""

import threading

import pytest
import torch
import torch.distributed as dist

from ddplab.emulation.emulate import emulate
from ddplab.reference.data_parallel import DistributedDataParallel
from ddplab.reference.errors import RankError

from .small_trace import FABRIC, small_trace

pytestmark = pytest.mark.usefixtures("soon")


def test_ranks_that_wait_for_each_other_are_named():
    class Late(DistributedDataParallel):
        passes = 0

        def forward(self, *inputs):
            loss = super().forward(*inputs)
            self.passes += 1
            if dist.get_rank() == 0 and self.passes == 4:  # the last one before the ranks start together
                engine = torch.autograd.Variable._execution_engine
                loss.register_hook(lambda _: engine.queue_callback(dist.barrier))
            return loss

    message = r"no rank can go on: ranks \[0\] wait for collective \d+, .*; ranks \[1\] wait for the other"
    with pytest.raises(RankError, match=message):
        emulate(small_trace(2), FABRIC, world_size=2, reducer=Late)


def test_an_error_of_a_rank_ends_all_threads_and_names_the_rank():
    class Failing(DistributedDataParallel):
        def forward(self, *inputs):
            if dist.get_rank() == 1:
                raise ArithmeticError("no more numbers")
            return super().forward(*inputs)

    before = set(threading.enumerate())  # a test of a class that hangs outside virtual time leaves its thread
    with pytest.raises(RankError, match="rank 1 failed in virtual time: ArithmeticError: no more numbers"):
        emulate(small_trace(3), FABRIC, world_size=3, reducer=Failing)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("rank ")]
