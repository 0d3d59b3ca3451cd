"""Virtual time: a seed determines it, faults of timing are found; schedules, and those of a baseline."""

import pytest
from hypothesis import given

from ddplab.conformance import timing_and_overlap as overlap
from ddplab.conformance.class_under_test import Subject
from ddplab.conformance.local_training import same
from ddplab.conformance.random_programs import programs
from ddplab.conformance.timing_and_overlap import run_in_virtual_time
from ddplab.emulation import virtual_time

from ..explore import examples
from .conformance_bench import OURS, TORCHS, faulty, outcomes


def schedule_of(name: str, model: int = 0) -> overlap.EmulatedSchedule:
    return overlap.schedule_of(Subject(name), overlap.MODELS[model], overlap.NETWORKS[1])


@pytest.mark.parametrize("name", ["Naive", "Bucketed", "Flat"])
def test_a_class_that_launches_nothing_before_backward_ends_does_not_overlap(name):
    late = overlap.late_launches(schedule_of(f"ddplab.reference.minimal:{name}DataParallel"))
    assert "after the last gradient was ready" in late


def test_a_class_that_overlaps_does(tmp_path):
    schedules = [schedule_of(name) for name in (OURS, TORCHS)]
    assert list(map(overlap.late_launches, schedules)) == ["", ""]
    assert schedules[0] == schedules[1]  # copies and launches cost nothing here
    overlap.save(tmp_path / "s.json", OURS, schedules)
    assert overlap.load(tmp_path / "s.json") == tuple(schedules)


@pytest.fixture(scope="module")
def schedule() -> overlap.EmulatedSchedule:
    return schedule_of(OURS, model=2)


def test_a_slower_schedule_is_named_by_its_first_late_bucket(schedule):
    def later(number: int, ns: int) -> overlap.EmulatedSchedule:
        launches = list(schedule.launches)
        moved = {"launched_ns": launches[number].launched_ns + ns}
        launches[number] = launches[number].model_copy(update=moved)
        slower = schedule.iteration_ns + schedule.iteration_ns // 50
        return schedule.model_copy(update={"launches": tuple(launches), "iteration_ns": slower})

    def says(now: overlap.EmulatedSchedule) -> str:
        (sentence,) = overlap.compare([now], [schedule])
        return sentence

    assert overlap.compare([schedule], [schedule]) == []
    assert overlap.compare([schedule], []) == []
    gap = schedule.launches[2].launched_ns - schedule.launches[1].launched_ns
    assert says(later(1, gap)).startswith("bucket 1 waits for bucket 2: +2.0% on 64 ranks at 100 Gbit/s")
    assert says(later(1, 10**6)).startswith("bucket 1 is launched 1 ms later")
    assert says(later(1, 10**9)).startswith("bucket 1 waits for the end of the backward pass")
    assert "2 collectives beside" in says(later(1, 5).model_copy(update={"other_collectives": 2}))
    assert "1 buckets instead of" in says(later(1, 5).model_copy(update={"launches": schedule.launches[:1]}))
    by_a_nanosecond = schedule.model_copy(update={"iteration_ns": schedule.iteration_ns + 1})
    assert says(by_a_nanosecond).startswith("the same launches, but the iteration ends later: +1 ns")


def test_a_class_that_waits_where_virtual_time_cannot_see_it_does_not_support_virtual_time(bench_of, monkeypatch):
    monkeypatch.setattr(virtual_time, "TURN_TIMEOUT_S", 0.5)
    bench = bench_of(faulty("WaitsForAThread"))
    # Here, where the time-out is shorter.
    monkeypatch.setattr(overlap, "run_alone", lambda _bench, function, *arguments: function(*arguments))
    found = outcomes(bench, ["any timing", "overlap"])
    assert [one.outcome for one in found.values()] == ["not supported"] * 2
    assert all("rank 0 has not come back for " in one.message for one in found.values())
    assert not any("\n" in one.message for one in found.values())


@examples(10)
@given(programs(2))
def test_a_seed_determines_all_timing(program):
    first, second = (run_in_virtual_time(Subject(faulty("DoesNotWait")), program) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        for a, b in zip(one, two, strict=True):
            assert all(same(a.gradients[name], b.gradients[name]) for name in a.gradients)
