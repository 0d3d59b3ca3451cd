"""Training runs: what is recorded, under which module, and traces without averaging."""

from contextlib import contextmanager
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddplab import models, training_runs
from reference.trace import Trace

from ..strategies import traces

TINY = "tests.models_for_cli:tiny"


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

    with mock.patch.object(models, "build", build), mock.patch.object(training_runs.Trainer, "step", step):
        trace = training_runs.record_computation(rank, world_size, "m", iterations=2)
    assert all(iteration.ready_ns[2] is None for of_rank in trace.ranks for iteration in of_rank.iterations)
    return trained


def test_a_model_with_an_unused_parameter_is_recorded_without_the_reducer(two_ranks):
    assert two_ranks.run(record_with_an_unused_parameter) == [["Linear"] * (training_runs.WARM_UP + 2)] * 2


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
