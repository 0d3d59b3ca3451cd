"""Autotuning with the simulator: the reducer then takes as long as the plan promises."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import simulator
from ddplab.emulation.emulate import emulate
from reference.autotuning import Autotune, TunedBuckets
from reference.data_parallel import DistributedDataParallel

from ..explore import examples
from ..strategies import emulations, partitions

pytestmark = pytest.mark.usefixtures("soon")


def tuned_to(buckets):
    """A class that autotunes in its first three iterations, with a tuner that returns these buckets."""

    class Tuned(DistributedDataParallel):
        def __init__(self, module, **arguments):
            tuner = Autotune(lambda _trace, _ddp: TunedBuckets(buckets, 1, 1), iterations=1)
            super().__init__(module, autotune=tuner, **arguments)

    return Tuned


@examples(40)
@given(st.data())
def test_after_the_rebuild_an_iteration_takes_the_predicted_time_of_the_plan(data):
    asked = data.draw(emulations())
    policy = asked.policy.model_copy(
        update={
            "plan": None,
            "order": "ready",
            "phase": "steady",
            "find_unused_parameters": False,
            "static_graph": False,
            "skip_all_reduce_unused_params": False,
        }
    )
    workload = asked.trace.workload
    every = [one for rank in asked.trace.ranks for one in rank.iterations]
    assume(all(None not in one.ready_ns for one in every))
    assume(workload.source == "module")  # other traces charge for buckets that differ from the recorded ones
    keys = tuple(f"{index}" if one.sparse else one.dtype for index, one in enumerate(workload.parameters))
    buckets = tuple(map(tuple, data.draw(partitions(len(keys), keys))))
    arguments = {
        "world_size": asked.world_size,
        "variation": asked.variation,
        "stragglers": asked.stragglers,
        "inputs": asked.inputs,
    }
    real = emulate(asked.trace, asked.fabric, reducer=tuned_to(buckets), policy=policy, **arguments)
    planned = policy.model_copy(update={"plan": buckets})
    predicted = simulator.predict(asked.trace, asked.fabric, policy=planned, **arguments)
    assert real.buckets == predicted.buckets == buckets
    assert real.samples_ns == predicted.samples_ns
