"""Timing hooks: iterations begin and end where they should, and no hook stays."""

import pytest
import torch
from torch import nn

from ddplab.reference.recorder import record
from ddplab.reference.recording.timing_hooks import Timestamps, rank_trace


def test_a_ranks_offset_counts_from_its_own_start():
    """Its clock is 7 ns behind rank 0's, and its recording began 100 ns later on its own clock."""
    timestamps = Timestamps(1)
    timestamps.forward_started()
    timestamps.forward_ended(synchronized=False, layout=None)
    timestamps.backward_started()
    timestamps.backward_ended()
    timestamps.finish_iteration()
    in_ns = timestamps.in_ns(7, 0)
    trace = rank_trace(1, in_ns, zero=in_ns.zero - 100, layouts={})
    assert trace.clock_offset_ns == 107


@pytest.mark.parametrize(
    "when", ["during the backward pass", "between two backward passes", "before the backward pass"]
)
def test_a_step_that_does_not_follow_the_backward_pass_keeps_its_recording(when):
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    if when == "during the backward pass":
        module.weight.register_post_accumulate_grad_hook(lambda _parameter: optimizer.step())
    with record(module) as recording:
        for _ in range(2):
            loss = module(torch.ones(1, 2)).sum()
            if when == "before the backward pass":
                optimizer.step()
            loss.backward()
            if when == "between two backward passes":
                optimizer.step()
                module.weight.sum().backward()
                optimizer.step()
    for iteration in recording.trace.ranks[0].iterations:
        assert (iteration.optimizer_start_ns is not None) == (when == "between two backward passes")


def test_hooks_are_gone_after_the_recording():
    module = nn.Linear(2, 1)
    with record(module) as recording:
        module(torch.ones(1, 2)).sum().backward()
    before = recording.trace
    module(torch.ones(1, 2)).sum().backward()
    assert recording.trace == before
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    assert not module.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("kind", ["a parameter", "one tensor again and again"])
def test_tensors_that_outlive_the_recording_keep_no_hooks(kind):
    """A module may return a leaf, or a tensor that it returned before, which gets one hook at most."""
    module = nn.Linear(2, 1)
    kept = module.weight if kind == "a parameter" else module(torch.ones(1, 2))
    inner = module.forward
    module.forward = lambda x: (inner(x), kept)
    with record(module) as recording:
        for _ in range(3):
            output, _ = module(torch.ones(1, 2))
            assert len(kept._backward_hooks or ()) <= 1
            output.sum().backward()
    assert not kept._backward_hooks
    assert len(recording.trace.ranks[0].iterations) == 3


def test_several_passes_before_one_backward_are_one_iteration():
    module = nn.Linear(2, 1)
    with record(module) as recording:
        (module(torch.ones(1, 2)) + module(torch.ones(1, 2))).sum().backward()
    assert len(recording.trace.ranks[0].iterations) == 1
