"""Emulation: in virtual time the real reducer takes as long as `predict` says, to the nanosecond."""

from hypothesis import assume, given

from simulator.emulation.emulate import emulate

from .explore import examples
from .strategies import Asked, any_predictions


def emulated(asked: Asked, reducer: str):
    return emulate(
        asked.trace,
        asked.fabric,
        world_size=asked.world_size,
        reducer=reducer,
        policy=asked.policy,
        variation=asked.variation,
        stragglers=asked.stragglers,
        inputs=asked.inputs,
    )


@examples(300)
@given(any_predictions())
def test_the_real_reducer_takes_the_predicted_time(asked):
    assume(asked.inputs is None or asked.policy.phase == "steady")
    real, predicted = emulated(asked, "ddplab"), asked.predict()
    assert real.samples_ns == predicted.samples_ns
    assert real.buckets == predicted.buckets
