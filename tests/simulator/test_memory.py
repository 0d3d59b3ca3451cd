"""Whether training fits; `validation/tests/test_memory.py` compares the bytes with measured ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.trace import StepMemory
from ddplab.simulator.capacity.memory import OPTIMIZERS, Optimizer, capacity_bytes, memory_use
from ddplab.simulator.schedule.policy import Policy

from .changed_traces import gpu_trace, with_workload

MB = 10**6


def trace_with(memory: StepMemory | None, name: str = "NVIDIA H100 80GB HBM3"):
    return with_workload(gpu_trace(name), memory=memory)


def held(batch: int, kept: int, constant: int = 0) -> StepMemory:
    return StepMemory(
        batch=batch,
        batch_bytes=batch,
        constant_bytes=constant,
        kept_bytes=kept,
        peak_bytes=kept + kept // 10,
        peak_with_gradients_bytes=kept + kept // 8,
        ready_bytes=(kept // 2,),
    )


@given(
    batch=st.integers(1, 512),
    kept=st.integers(10**9, 10**12),
    constant=st.integers(0, MB),
    optimizer=st.sampled_from(OPTIMIZERS),
    views=st.booleans(),
)
def test_the_largest_batch_fits_and_one_sample_more_may_not(batch, kept, constant, optimizer, views):
    policy = Policy(gradient_as_bucket_view=views)

    def at(samples: int):
        return memory_use(trace_with(held(batch, kept, constant).with_batch(samples)), policy, optimizer)

    use = memory_use(trace_with(held(batch, kept, constant)), policy, optimizer)
    low, high = use.band_bytes
    assert low < use.peak_bytes * 1.01 + 1e9
    assert high is not None
    assert high > use.peak_bytes
    assert (use.answer == "fits") == (batch <= use.largest_batch)
    if use.largest_batch:
        assert at(use.largest_batch).answer == "fits"
    assert at(use.largest_batch + 1).answer != "fits"


@given(kept=st.integers(MB, 10**12), optimizer=st.sampled_from(OPTIMIZERS))
def test_views_never_take_more(kept, optimizer):
    trace = trace_with(held(8, kept))
    views, copies = (memory_use(trace, Policy(gradient_as_bucket_view=one), optimizer) for one in (True, False))
    assert views.peak_bytes <= copies.peak_bytes


@given(kept=st.integers(MB, 10**12), optimizer=st.sampled_from(OPTIMIZERS), ranks=st.integers(1, 9))
def test_a_rank_keeps_the_states_of_its_shard(kept, optimizer, ranks):
    """Of three equal parameters, one of several ranks holds at least one."""
    trace = trace_with(held(8, kept))
    trace = with_workload(trace, parameters=trace.workload.parameters[:1] * 3)
    alone, shard = (memory_use(trace, Policy(zero=one), optimizer, ranks) for one in (None, "parameters"))
    assert shard.parts == alone.parts | {"optimizer": alone.parts["optimizer"] * {1: 3, 2: 2}.get(ranks, 1) // 3}
    assert shard.peak_bytes <= alone.peak_bytes


@pytest.mark.parametrize(("name", "gb"), [("A100-SXM4-40GB", 42.3), ("Tesla V100-SXM2-32GB", 33.8), ("T4", 16.9)])
def test_a_gpus_memory_is_in_its_name_or_in_the_catalogue(name, gb):
    assert capacity_bytes(name) / 1e9 == pytest.approx(gb, abs=0.05)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_activations_only_a_no_is_certain(optimizer: Optimizer):
    use = memory_use(trace_with(None), Policy(), optimizer)
    assert use.answer == "unknown"
    assert use.band_bytes[1] is use.largest_batch is use.peak_bytes is None
    assert memory_use(trace_with(held(8, MB), "a GPU"), Policy(), optimizer).answer == "unknown"
