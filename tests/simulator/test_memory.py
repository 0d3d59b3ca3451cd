"""Whether training fits; `validation/tests/test_memory.py` compares the bytes with measured ones."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.reference.trace import StepMemory
from ddplab.simulator.capacity.memory import OPTIMIZERS, Optimizer, capacity_bytes, memory_use, remedies
from ddplab.simulator.catalogue import read_catalogue
from ddplab.simulator.schedule.policy import Policy

from .changed_traces import gpu_trace, with_workload

MB = 10**6


def trace_with(memory: StepMemory | None, name: str = "NVIDIA H100 80GB HBM3"):
    return with_workload(gpu_trace(name), memory=memory, batch=memory and memory.batch)


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
    assert low >= sum(size for part, size in use.parts.items() if part != "activations"), "all of these at one time"
    assert (use.answer == "fits") == (batch <= use.largest_batch)
    if use.largest_batch:
        assert at(use.largest_batch).answer == "fits"
    assert at(use.largest_batch + 1).answer != "fits"


@given(frozen=st.integers(0, 10**12), optimizer=st.sampled_from(OPTIMIZERS), ranks=st.integers(1, 9))
def test_frozen_parameters_are_held_whole_on_each_rank(frozen, optimizer, ranks):
    """They have no gradients, no buckets and no states, so the optimiser and its shards change nothing about them."""
    memory, policy = held(8, 10**9), Policy(zero="parameters")
    less, more = (
        memory_use(trace_with(memory.model_copy(update={"frozen_bytes": one})), policy, optimizer, ranks)
        for one in (0, frozen)
    )
    assert more.peak_bytes - less.peak_bytes == more.parts["frozen parameters"] == frozen
    assert more.answer != "fits" or frozen < more.capacity_bytes


def test_a_batch_of_unknown_size_has_no_largest_number_of_samples():
    trace = trace_with(held(1, 10**9))
    assert memory_use(trace, Policy(), "sgd").largest_batch
    assert memory_use(with_workload(trace, batch=None), Policy(), "sgd").largest_batch is None


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


@pytest.mark.parametrize(
    ("name", "gb"),
    [
        *(("A100-SXM4-40GB", 42.3), ("Tesla V100-SXM2-32GB", 33.8), ("T4", 16.9)),
        ("NVIDIA H100 SXM, bf16, rescaled from A100-SXM4-40GB", 84.6),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5.3),
    ],
)
def test_a_gpus_memory_is_in_its_name_or_in_the_catalogue(name, gb):
    assert capacity_bytes(name) / 1e9 == pytest.approx(gb, abs=0.05)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_without_activations_only_a_no_is_certain(optimizer: Optimizer):
    use = memory_use(trace_with(None), Policy(), optimizer)
    assert use.answer == "unknown"
    assert use.band_bytes[1] is use.largest_batch is use.peak_bytes is None
    assert memory_use(trace_with(held(8, MB), "a GPU"), Policy(), optimizer).answer == "unknown"


def test_data_parallel_training_that_was_recorded_on_a_gpu_fits_there():
    recorded = with_workload(trace_with(None), source="torch", device="cuda")
    assert memory_use(recorded, Policy(), "sgd").answer == "fits"
    assert (
        memory_use(recorded, Policy(), "adam").answer == "unknown"
    )  # the trace does not say what its optimizer kept
    assert memory_use(with_workload(recorded, device="cpu"), Policy(), "sgd").answer == "unknown"


@given(batch=st.integers(2, 512), kept=st.integers(10**10, 10**12), low=st.booleans())
def test_what_is_named_instead_fits_with_each_optimizer(batch, kept, low):
    trace = trace_with(held(batch, kept))
    optimizers = OPTIMIZERS if low else OPTIMIZERS[:3]
    named = remedies(trace, Policy(), optimizers, 8)
    assert named
    for words in named:
        if found := re.fullmatch(r"a batch of ([\d,]+) per GPU", words):
            smaller = trace_with(held(batch, kept).with_batch(int(found[1].replace(",", ""))))
            assert {memory_use(smaller, Policy(), one).answer for one in optimizers} == {"fits"}
        elif words.startswith("ZeRO-1"):
            zero = Policy(zero="parameters")
            assert {memory_use(trace, zero, one, 8).answer for one in optimizers} == {"fits"}
        elif found := re.fullmatch(r"a GPU with (\d+) GB, such as (\S+)", words):
            larger = trace_with(held(batch, kept), read_catalogue().devices[found[2]].product)
            assert {memory_use(larger, Policy(), one).answer for one in optimizers} == {"fits"}
        else:
            assert words in ("only shards of the parameters (FSDP)", "only smaller inputs, or checkpointing")
