"""The class under test, found by its name."""

import runpy

import pytest

from ddplab.conformance.class_under_test import Subject, was_raised_on_purpose


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.at_all:DDP", "expected the name of an importable module"),
        ("torch.nn:nothing_of_this_name", "expected a class or a function named nothing_of_this_name"),
        ("torch.nn:Module.forward", "expected MODULE:CLASS"),
        (":C", "expected MODULE:CLASS"),
    ],
)
def test_a_class_that_does_not_exist_is_told_in_one_line(name, message):
    with pytest.raises(ValueError, match=message) as error:
        Subject(name).offer()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "on_purpose"),
    [
        ("raise NotImplementedError('sparse gradients are not averaged')", True),
        ("raise TypeError(\n    'expected no sparse gradients'\n)", True),
        ("if True: raise NotImplementedError('sparse gradients are not supported')", True),
        ("[][0] if True else None  # raise sparse", False),
        ("try:\n    {}['sparse']\nexcept KeyError:\n    raise ValueError('no sparse gradients') from None", True),
        ("import torch; torch.zeros(2).to_sparse().reshape(1, 2)", False),
        ("raise RuntimeError('out of luck')", False),
        ("raise RuntimeError('CUDA error: CUDA driver version is insufficient for CUDA runtime version')", True),
        ("raise AssertionError('sparse')", False),
        ("raise RuntimeError('sparse') from NameError('a')", False),
        ("def average_in_my_ddp_DDP(sparse): ...\naverage_in_my_ddp_DDP()", False),
        ("sparse_buckets", False),
        ("{}['sparse']", False),
        ("int('sparse DDP')", False),
        ("[].sparse", False),
        ("import sparse_gradients_of_mine", False),
        ("1 / 0", False),
        ("from pathlib import Path; Path('sparse').relative_to('/')", False),
    ],
)
def test_only_an_error_that_was_raised_to_refuse_something_is_a_refusal(tmp_path, code, on_purpose):
    (tmp_path / "mine.py").write_text(code + "\n")
    with pytest.raises(Exception, match=r".") as error:
        runpy.run_path(str(tmp_path / "mine.py"))
    assert was_raised_on_purpose(error.value, "sparse") == on_purpose
