"""Costs of comm hooks: a hook's own work, without its collectives."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab import models
from ddplab.calibration import comm_hook_costs
from ddplab.calibration.repeated_timing import TimedCollective
from ddplab.reference.trace import Parameter
from ddplab.simulator.schedule.comm_hook_messages import HALVES, HOOKS, named_hook

TINY = "tests.models_for_cli:tiny"


def timed(issued: int, done: int) -> TimedCollective:
    collective = TimedCollective(issued)
    collective.done.set_result(done)
    return collective


@given(st.integers(1, 4), st.lists(st.integers(0, 1000), min_size=10, max_size=10))
def test_a_hooks_parts_and_its_collectives_make_up_its_time(count, gaps):
    moments = list(accumulate(gaps))[: 2 * count + 2]
    collectives = [timed(*moments[at : at + 2]) for at in range(1, 2 * count, 2)]
    parts = comm_hook_costs.parts_of(timed(moments[0], moments[-1]), collectives)
    assert (parts.recompress is None) == (count == 1)
    communicating = sum(collective.wait() - collective.issued_ns for collective in collectives)
    assert sum(filter(None, parts)) + communicating == moments[-1] - moments[0]
    assert (parts.compress, parts.decompress) == (moments[1] - moments[0], moments[-1] - moments[-2])


def test_every_hook_that_can_be_predicted_can_be_measured():
    assert {"none", *comm_hook_costs.REAL_HOOKS} == set(HOOKS)
    assert set(comm_hook_costs.HALVES) == set(HALVES)


@pytest.mark.parametrize("name", [*(name for name in HOOKS if name != "none"), "bf16+power_sgd:2"])
def test_a_hook_has_the_parts_that_its_messages_imply(two_ranks, name):
    """All gradients of `tiny` are one bucket, some of them worth compressing."""
    measured = two_ranks.run(comm_hook_costs.time_hook, named_hook(name).name, TINY, 2)
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
