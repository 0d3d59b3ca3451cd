"""Training runs: what is recorded, under which module, and traces without averaging."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddplab import models, training_runs
from ddplab.reference.trace import Trace

from ..strategies import traces

TINY = "tests.models_for_cli:tiny"


def recording_events(rank: int, world_size: int) -> tuple[list[str], set[int]]:
    """What `record_computation` does, in order, and parameters without a gradient."""
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
        trace = training_runs.record_computation(rank, world_size, TINY, iterations=2)
    moments = [one.ready_ns for of_rank in trace.ranks for one in of_rank.iterations]
    return events, {index for of_iteration in moments for index, ns in enumerate(of_iteration) if ns is None}


def record_with_an_unused_parameter(rank: int, world_size: int) -> tuple[list[str], set[int]]:
    def build(_name):
        module = nn.Linear(3, 3)
        module.unused = nn.Parameter(torch.zeros(2))
        return module, lambda called: called(torch.ones(1, 3)).sum()

    with mock.patch.object(models, "build", build):
        return recording_events(rank, world_size)


@pytest.mark.parametrize(
    ("body", "trained", "unused"),
    [(recording_events, "DistributedDataParallel", set()), (record_with_an_unused_parameter, "Linear", {2})],
)
def test_ranks_meet_before_each_iteration_under_the_reducer_if_all_is_used(two_ranks, body, trained, unused):
    for events, without_gradient in two_ranks.run(body):
        assert without_gradient == unused
        assert events[events.index("open") + 1 :] == ["meet", trained] * (training_runs.WARM_UP + 2)


@given(traces(), st.integers(1, 3))
def test_without_averaging_a_backward_pass_ends_with_its_last_gradient(trace, count):
    count = min(count, *(len(rank.iterations) for rank in trace.ranks))
    kept = Trace.model_validate(training_runs.last_iterations(trace, count, averaged=True).model_dump())
    for before, after in zip(trace.ranks, kept.ranks, strict=True):
        assert len(after.iterations) == count
        for old, new in zip(before.iterations[-count:], after.iterations, strict=True):
            assert new.backward_end_ns == max(ns for ns in new.ready_ns if ns is not None)
            assert new.end_ns - new.backward_end_ns == old.end_ns - old.backward_end_ns
            assert new.forward_end_ns - new.forward_start_ns == old.forward_end_ns - old.forward_start_ns
