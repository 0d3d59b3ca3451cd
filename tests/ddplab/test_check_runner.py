"""Running checks: what is left out after a fault, and which fault is made smaller."""

import os
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import Phase

from ddplab.conformance import check_runner as bench_module
from ddplab.conformance import class_under_test
from ddplab.conformance.check_runner import cause_of, run_checks
from ddplab.conformance.class_under_test import Subject
from ddplab.conformance.local_training import FindingError
from ddplab.conformance.timing_and_overlap import HAZARD
from ddplab.reference.errors import RankError

from ..faulty_reducers import wrong_on_rank_0
from .conformance_bench import NAIVE, faulty, outcomes

CHECKS = ["any timing", "one weight", "bucket caps", "real models", "random programs"]


def test_ranks_that_send_in_ready_order_are_told_once_and_all_else_is_tried_in_one_order(bench_of):
    found = list(outcomes(bench_of(faulty("LaunchesAsReady")), CHECKS).values())
    assert [one.outcome for one in found] == ["failed", *["passed"] * 4]
    assert found[0].message.startswith(HAZARD)


def test_where_ranks_do_not_match_only_checks_run_that_can_still_say_something(bench_of, monkeypatch):
    monkeypatch.setattr(bench_module, "TIMEOUT_S", 2.0)
    found = list(outcomes(bench_of(faulty("SendsMoreFromRankZero")), CHECKS).values())
    assert [one.outcome for one in found] == ["failed", "failed", "left out", "left out", "left out"]
    assert found[2].message == "the ranks did not match in any timing and one weight"
    assert [bool(one.problem) for one in found] == [True, True, False, False, False]


def test_only_the_first_fault_is_made_smaller(bench_of):
    bench = bench_of(faulty("Sums"))
    bench.shrinks = True
    assert Phase.shrink in bench.settings(1).phases
    outcomes(bench, ["random programs"])
    assert Phase.shrink not in bench.settings(1).phases
    assert bench.settings(1).derandomize, "every run tries the same programs"


def test_what_a_program_must_have_to_fail_is_told_with_the_first_fault(bench_of):
    bench = bench_of(faulty("HalvesUnderNoSync"))
    bench.shrinks = True
    message = outcomes(bench, ["accumulation"])["accumulation"].message
    assert message.endswith("; right without passes under no_sync")
    assert "right without" not in outcomes(bench, ["accumulation"])["accumulation"].message


def test_what_a_rank_returned_is_the_finding_when_others_hang_and_the_cause_has_no_advice(bench_of, monkeypatch):
    monkeypatch.setattr(bench_module, "TIMEOUT_S", 1.0)
    bench = bench_of(NAIVE)
    with pytest.raises(FindingError, match="wrong on rank 0") as error:
        bench.run(wrong_on_rank_0, bench.subject)
    hang = error.value.__context__
    assert "join" in str(hang)
    assert "Ranks [0] had returned." in cause_of(hang)
    assert "join" not in cause_of(hang)


def test_the_stack_of_a_hang_has_the_frames_of_the_class_and_not_those_of_the_kit(bench_of, monkeypatch):
    monkeypatch.setattr(bench_module, "TIMEOUT_S", 3.0)
    message = outcomes(bench_of(faulty("HangsInAHook")), ["one weight"])["one weight"].message
    for rank in range(2):
        stack = message.partition(f"Stack of rank {rank}, innermost call first:\n")[2].partition("\n\n")[0]
        calls = [line.rpartition(" in ")[2] for line in stack.splitlines()]
        assert calls[:4] == ["wait", "wait", "launch", "gradient_ready"]
        assert "faulty_reducers.py" in stack.splitlines()[2]
        assert not any(path in stack for path in class_under_test.KIT)


def end_rank_0(rank: int, _world_size: int, _subject: Subject) -> str:
    if rank == 0:
        os._exit(17)
    dist.barrier()
    return ""


def wait_for_rank_0(rank: int, _world_size: int, _subject: Subject) -> str:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank:
        dist.barrier(group)
    return ""


def hang(_rank: int, _world_size: int, _subject: Subject) -> str:
    threading.Event().wait()
    return ""


def fail_on_rank_0(rank: int, _world_size: int, _subject: Subject) -> str:
    if rank == 0:
        raise ArithmeticError
    return ""


@pytest.mark.parametrize(
    ("run", "body", "outcome", "unmatched"),
    [
        ("try_body", end_rank_0, "failed", True),
        ("try_body", wait_for_rank_0, "failed", True),
        ("try_body", hang, "failed", True),
        ("try_body", fail_on_rank_0, "failed", False),
    ],
)
def test_a_lost_rank_is_one_whatever_the_messages_say(bench_of, monkeypatch, run, body, outcome, unmatched):
    """A message of `ddplab.reference.launch` in other words once made an ordinary failure of a lost rank."""
    bench = bench_of(NAIVE)
    monkeypatch.setattr(bench_module, "TIMEOUT_S", 2.0 if body is hang else 20.0)
    as_it_is = RankError.__init__
    monkeypatch.setattr(
        RankError, "__init__", lambda self, rank, _cause, **more: as_it_is(self, rank, "in other words", **more)
    )
    (result,) = run_checks(bench, [("bucket caps", lambda bench: getattr(bench, run)(body))])
    assert (result.outcome, result.unmatched) == (outcome, unmatched)
