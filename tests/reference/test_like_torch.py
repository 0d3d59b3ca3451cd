"""Torch's DDP is the oracle: the same script sees the same bits under our class."""

import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplab.conformance.all_checks import difference_of_runs
from ddplab.conformance.class_under_test import Subject
from ddplab.conformance.random_programs import programs
from ddplab.conformance.training_programs import Program, run_until_error
from ddplab.reference.launch import RankPool

from .. import scenarios
from ..explore import examples
from ..scenarios import CASES, Wrap, assert_same_pairs, on_both_classes
from ..strategies import caps_mb
from ..torch_options import taken

modes = st.fixed_dictionaries(
    taken({"gradient_as_bucket_view": st.booleans(), "batched_grad_copy": st.booleans(), "bucket_cap_mb": caps_mb()})
)
OURS = "ddplab.reference.data_parallel:DistributedDataParallel"
TORCHS = "torch.nn.parallel:DistributedDataParallel"


@on_both_classes
def run_scenario(wrap: Wrap, rank: int, case: str) -> list:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CASES[case](wrap, rank)


@pytest.mark.parametrize("case", scenarios.CASES)
def test_a_script_sees_the_same_as_under_torchs_class(two_ranks, case):
    assert_same_pairs(two_ranks.run(run_scenario, case))


def assert_like_torchs(two_ranks: RankPool, program: Program) -> None:
    """Equal bit for bit, on two ranks: a sum of two has one order."""
    ours, torchs = (two_ranks.run(run_until_error, Subject(name), program) for name in (OURS, TORCHS))
    for got, expected in zip(ours, torchs, strict=True):
        assert difference_of_runs(got, expected) == ""


def random_programs(**how: Any) -> st.SearchStrategy[Program]:
    """Some weights large enough to be copied alone."""
    return programs(2, options=modes, keep=True, shapes=[(), (3,), (2, 2), (200, 100), (70_000,)], **how)


@examples(15)
@given(random_programs(kinds=("train", "accumulate"), any_use=True))
def test_any_parameters_may_be_used_in_any_step_with_find_unused_parameters(two_ranks, program):
    """Used by one rank or none, under no_sync or not, gradients kept, zeroed or None before."""
    assert_like_torchs(two_ranks, replace(program, options=program.options | {"find_unused_parameters": True}))


@examples(15)
@given(random_programs(kinds=("train", "accumulate")) | random_programs(kinds=("train",), static=True))
def test_any_order_of_steps_is_as_under_torchs_class(two_ranks, program):
    static = len({step.used for step in program.steps}) == 1 and all(step.kind == "train" for step in program.steps)
    assert_like_torchs(two_ranks, replace(program, options=program.options | {"static_graph": static}))
