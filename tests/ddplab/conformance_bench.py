"""Classes to check, the checks that are quick, and their outcomes."""

from ddplab.conformance.all_checks import CHECKS
from ddplab.conformance.check_outcomes import CheckResult
from ddplab.conformance.check_runner import Bench, run_checks

OURS = "ddplab.reference.data_parallel:DistributedDataParallel"
TORCHS = "torch.nn.parallel:DistributedDataParallel"
NAIVE = "ddplab.reference.minimal:NaiveDataParallel"
LITTLE = 12
SLOW = {"a failing rank", "a lost rank", "state machine", "overlap", "a long run", "new interpreters"}
"""Checks that start processes or take seconds; `ddplab conform` runs them in CI."""


def faulty(name: str) -> str:
    return f"tests.faulty_reducers:{name}"


def outcomes(bench: Bench, checks=None) -> dict[str, CheckResult]:
    names = [name for name in CHECKS if name not in SLOW] if checks is None else checks
    return {result.check: result for result in run_checks(bench, [(name, CHECKS[name]) for name in names])}
