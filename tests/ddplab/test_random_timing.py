"""Random timing without a clock: a seed determines it, and faults of timing are found."""

from hypothesis import given
from hypothesis import strategies as st

from ddplab.conformance.class_under_test import Subject
from ddplab.conformance.local_training import same
from ddplab.conformance.random_programs import programs
from ddplab.conformance.timing_and_overlap import run_in_virtual_time
from ddplab.emulation import virtual_time

from ..explore import examples
from .conformance_bench import faulty, outcomes


def test_a_class_that_waits_where_virtual_time_cannot_see_it_does_not_support_virtual_time(bench_of, monkeypatch):
    monkeypatch.setattr(virtual_time, "TURN_TIMEOUT_S", 0.5)
    found = outcomes(bench_of(faulty("WaitsForAThread")), ["any timing", "overlap"])
    assert [one.outcome for one in found.values()] == ["not supported"] * 2
    assert all("rank 0 has not come back for 0.5 s" in one.message for one in found.values())
    assert not any("\n" in one.message for one in found.values())


@examples(10)
@given(programs(2), st.integers(0, 99))
def test_a_seed_determines_all_timing(program, seed):
    first, second = (run_in_virtual_time(Subject(faulty("DoesNotWait")), program, 2, seed) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        for a, b in zip(one, two, strict=True):
            assert all(same(a.gradients[name], b.gradients[name]) for name in a.gradients)
