"""Emulation: in virtual time real reducers take as long as `predict` says, to the nanosecond."""

from hypothesis import given

from simulator.emulation.emulate import emulate

from .explore import examples
from .strategies import Asked, emulations, torch_emulations


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
@given(emulations())
def test_our_reducer_takes_the_predicted_time(asked):
    real, predicted = emulated(asked, "ddplab"), asked.predict()
    assert real.samples_ns == predicted.samples_ns
    assert real.buckets == predicted.buckets
    if asked.trace.workload.source == "module":  # otherwise the emulated reducer never sends buffers
        assert real.epoch_end_ns == predicted.epoch_end_ns


@examples(50)
@given(torch_emulations())
def test_torchs_reducer_takes_the_predicted_time(asked):
    real, predicted = emulated(asked, "torch"), asked.predict()
    assert real.samples_ns == predicted.samples_ns
    assert real.buckets in ((), predicted.buckets)  # torch does not tell the buckets that are never rebuilt
